"""DCP's view of a checkpoint of ours, made of the manifest when somebody looks, entry by entry: a plan by columns looks at few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_engine.errors import DcpEngineError, MalformedCheckpointError
from dcp_engine.memory import memory_bytes
from dcp_engine.objects import decode_object
from dcp_engine.storage import dtypes
from dcp_engine.storage.manifest import Manifest
from dcp_engine.stored_chunks import StoredChunks
from dcp_engine.stored_tensors import StoredTensors
from dcp_engine.types import EngineMetadata, PlannerData

__all__ = ["ChunkLocation", "ManifestIndex", "ManifestMetadata", "metadata_of_manifest"]

_EntryMetadata = TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Where one chunk lies.

    Attributes:
        file: name of the shard file.
        position: byte position of the chunk's first block in the file.
        block_offset: where the chunk begins in that block's raw bytes, in bytes: not zero only where small tensors share a block.
        num_blocks: consecutive blocks that hold the chunk.
        nbytes: bytes of the chunk before encoding.
    """

    file: str
    position: int
    block_offset: int
    num_blocks: int
    nbytes: int


class ManifestIndex(Mapping[MetadataIndex, ChunkLocation]):
    """``Metadata.storage_data`` of a checkpoint of ours: where each chunk lies, looked up in the manifest when asked.

    Crosses ranks as the encoded manifest, a dozen bytes a block, instead of one object a chunk, and is decoded when somebody looks: every
    rank of a save receives one, and hardly any asks.

    Args:
        manifest: of the checkpoint, or its encoded form.
        path: of the checkpoint.

    Raises:
        Every use but :attr:`path` and a pickle: ``CorruptCheckpointError`` kinds, where the encoded form is no manifest.

    Thread-safety: immutable but for caches, which may be filled twice.
    """

    __slots__ = ("_by_offsets", "_manifest", "path")

    def __init__(self, manifest: Manifest | bytes, path: str) -> None:
        self._manifest = manifest
        self._by_offsets: dict[int, dict[tuple[int, ...], int]] = {}
        self.path = path

    @property
    def manifest(self) -> Manifest:
        """What is looked up."""
        found = self._manifest
        if isinstance(found, bytes):
            found = self._manifest = Manifest.decode(found, path=self.path)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        found = self._manifest
        return (ManifestIndex, (found if isinstance(found, bytes) else found.encode(), self.path))

    def __repr__(self) -> str:
        return f"ManifestIndex({self.path!r})"

    def __len__(self) -> int:
        return sum(len(self.manifest.chunks_of(self._entry(name))[2]) for name in self._names())

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name in self._names():
            entry = self._entry(name)
            if self.manifest.entry(entry).dtype.is_object:
                if len(self.manifest.chunks_of(entry)[2]):  # opaque bytes may be none at all
                    yield MetadataIndex(name)
                continue
            for position, offsets in enumerate(self.manifest.chunks_of(entry)[0]):
                yield MetadataIndex(name, offsets.tolist(), position)

    def __getitem__(self, index: MetadataIndex) -> ChunkLocation:
        entry = self.manifest.entry_id(index.fqn)
        if entry is None:
            raise KeyError(index)
        chunk = self.find_chunk(entry, index)
        if chunk is None:
            raise KeyError(index)
        view = self.manifest.chunk(chunk)
        return ChunkLocation(
            file=self.manifest.files[view.file].name,
            position=int(self.manifest.block_position[view.first_block]),
            block_offset=view.block_offset,
            num_blocks=view.num_blocks,
            nbytes=view.nbytes,
        )

    def find_chunk(self, entry: int, index: MetadataIndex) -> int | None:
        """Manifest id of the chunk of ``entry`` that begins at ``index.offset``; ``index.index`` is a hint. ``None``: there is none."""
        table, ids = self.manifest.table, self.manifest.chunk_ids(entry)
        if dtypes.of_code(int(table.entry_dtypes[entry])).is_object:
            return int(ids[0]) if len(ids) else None
        wanted = tuple(index.offset) if index.offset is not None else (0,) * int(table.entry_dims[entry])
        hint = index.index
        if hint is not None and 0 <= hint < len(ids) and table.box(chunk := int(ids[hint]))[0] == wanted:
            return chunk
        known = self._by_offsets.get(entry)
        if known is None:
            offsets, _, _ = self.manifest.chunks_of(entry)
            known = {tuple(row): int(chunk) for row, chunk in zip(offsets.tolist(), ids, strict=True)}
            self._by_offsets[entry] = known
        return known.get(wanted)

    def _names(self) -> Iterator[str]:
        yield from self.manifest.names
        yield from self.manifest.aliases

    def _entry(self, name: str) -> int:
        entry = self.manifest.entry_id(name)
        assert entry is not None
        return entry


class ManifestEntries(Mapping[str, _EntryMetadata]):
    """``Metadata.state_dict_metadata``: each entry's record is made when it is asked for, and kept.

    Chunks are listed in the manifest's order, so that an index hint of a read item is the position there. Crosses ranks as the encoded
    manifest. Thread-safe.
    """

    __slots__ = ("_known", "_manifest")

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._known: dict[str, _EntryMetadata] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (ManifestEntries, (self._manifest,))

    def __len__(self) -> int:
        return len(self._manifest.names) + len(self._manifest.aliases)

    def __iter__(self) -> Iterator[str]:
        yield from self._manifest.names
        yield from self._manifest.aliases

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._manifest.entry_id(name) is not None

    def __getitem__(self, name: str) -> _EntryMetadata:
        known = self._known.get(name)
        if known is None:
            entry = self._manifest.entry_id(name)
            if entry is None:
                raise KeyError(name)
            known = self._known.setdefault(name, _entry_metadata(self._manifest, entry))
        return known

    def __repr__(self) -> str:
        return f"ManifestEntries({len(self)} entries)"


def _entry_metadata(manifest: Manifest, entry: int) -> _EntryMetadata:
    dtype = dtypes.of_code(int(manifest.table.entry_dtypes[entry])).torch_dtype
    if dtype is None:
        return BytesStorageMetadata()
    return StoredTensor(TensorProperties(dtype=dtype), torch.Size(manifest.table.shape(entry)), manifest, entry)


class StoredTensor(TensorStorageMetadata):
    """DCP's record of a tensor. Those of its chunks are made when somebody looks: an ordinary list. Crosses ranks as an ordinary record."""

    def __init__(self, properties: TensorProperties, size: torch.Size, manifest: Manifest, entry: int) -> None:
        self.properties = properties
        self.size = size
        self._manifest = manifest
        self._entry = entry

    @cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:  # type: ignore[override]
        """As of :class:`TensorStorageMetadata`."""
        offsets, sizes, _ = self._manifest.chunks_of(self._entry)
        rows = zip(offsets.tolist(), sizes.tolist(), strict=True)
        return [ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(extent)) for begin, extent in rows]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorStorageMetadata):
            return NotImplemented
        return (self.properties, self.size, self.chunks) == (other.properties, other.size, other.chunks)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (TensorStorageMetadata, (self.properties, self.size, self.chunks))


class ManifestMetadata(EngineMetadata):
    """Metadata of a manifest. ``planner_data`` is decoded when somebody looks: a load into a state of the caller's needs only the ties.

    Its first look raises ``MalformedCheckpointError`` where it cannot be decoded, or is of another kind.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if "planner_data" not in fields:
            del self.__dict__["planner_data"]  # what __init__ put there would hide the descriptor

    @cached_property
    def planner_data(self) -> Any:
        """As of :class:`EngineMetadata`."""
        index = self.storage_data
        assert isinstance(index, ManifestIndex)
        return _planner_data(index.manifest, index.path)

    @cached_property
    def stored_tensors(self) -> StoredTensors:
        """All entries, by columns: tells our planner that this reader takes reads by columns."""
        index = self.storage_data
        assert isinstance(index, ManifestIndex)
        return _stored_tensors(index.manifest)

    @cached_property
    def stored_chunks(self) -> StoredChunks:
        """Their chunks, by columns, for our planner."""
        index = self.storage_data
        assert isinstance(index, ManifestIndex)
        manifest, table = index.manifest, index.manifest.table
        starts = np.array(manifest.entry_starts, dtype=np.int64)
        return StoredChunks(manifest.ids, table.chunk_order, starts, table.box_starts, table.chunk_offsets, table.chunk_sizes)


def metadata_of_manifest(manifest: Manifest, *, path: str, manifest_sha256: str) -> ManifestMetadata:
    """DCP's view of a checkpoint.

    Raises:
        MalformedCheckpointError: the metadata of the manifest cannot be decoded, or is of another kind.
    """
    metadata = _decoded(manifest.metadata, "metadata", path) if manifest.metadata else {}
    if not isinstance(metadata, dict) or not isinstance(user_metadata := metadata.get("user", {}), dict):
        raise _malformed(path, "metadata", "a dict, with a dict under 'user'", metadata)
    return ManifestMetadata(
        state_dict_metadata=ManifestEntries(manifest),
        storage_data=ManifestIndex(manifest, path),
        version=str(manifest.format_version),
        step=manifest.step,
        run_id=manifest.run_id or None,
        saved_at=manifest.saved_at,
        nonce=manifest.nonce,
        manifest_sha256=manifest_sha256,
        user_metadata=user_metadata,
    )


def _planner_data(manifest: Manifest, path: str) -> Any:
    planner_data = _decoded(manifest.planner_data, "planner_data", path) if manifest.planner_data else None
    if not manifest.skeleton:
        return planner_data
    if not isinstance(planner_data, dict) or not {tuple}.issuperset(map(type, planner_data.values())):
        raise _malformed(path, "planner_data", "a dict of paths", planner_data)
    return PlannerData(planner_data, skeleton=manifest.skeleton, ties=manifest.aliases)


def _stored_tensors(manifest: Manifest) -> StoredTensors:
    table = manifest.table
    num_entries = len(table.names)
    num_bytes = np.zeros(num_entries, dtype=np.int64)
    num_bytes[table.chunk_entries] = table.chunk_bytes
    codes = table.entry_dtypes.tolist()
    by_code = {code: dtypes.of_code(code).torch_dtype for code in set(codes)}
    is_tensor = np.array([by_code.get(code) is not None for code in range(256)])[table.entry_dtypes]
    is_single = np.bincount(table.chunk_entries, minlength=num_entries) == 1
    is_whole = is_single & is_tensor
    # Of these rows alone: a chunk bounds their extents. A hostile manifest may hold others by the million, with large ones.
    flat = table.entry_shapes[np.repeat(is_whole, table.entry_dims)].tolist()
    starts = [0, *np.cumsum(np.where(is_whole, table.entry_dims, 0), dtype=np.int64).tolist()]
    return StoredTensors(
        rows=manifest.ids,
        dtypes=[by_code[code] for code in codes],
        shapes=[tuple(flat[begin:end]) for begin, end in itertools.pairwise(starts)],
        is_whole=is_whole.tolist(),
        num_bytes=num_bytes,
        ties=manifest.aliases if manifest.skeleton else {},
    )


def _decoded(data: bytes, field: str, path: str) -> object:
    try:
        return decode_object(data, key=field, budget_bytes=memory_bytes())
    except DcpEngineError as error:
        error.path, error.file, error.tensor = path, "MANIFEST", None
        raise


def _malformed(path: str, field: str, expected: str, found: object) -> MalformedCheckpointError:
    return MalformedCheckpointError(
        f"the manifest's {field} is of another kind", path=path, file="MANIFEST", expected=expected, found=type(found).__name__
    )
