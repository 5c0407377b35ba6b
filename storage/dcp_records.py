"""The translation between DCP's records and the format's: the only file that knows both.

Saving: write items -> chunk sources; ``Metadata`` -> the chunks that all ranks must deliver, and the entries that have none.
Loading: manifest -> ``Metadata``, read items -> read requests.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from dcp_engine.components import ComponentMap
from dcp_engine.errors import (
    DcpEngineError,
    DtypeMismatchError,
    KindMismatchError,
    MalformedCheckpointError,
    PlanError,
    ShapeMismatchError,
    UnencodableObjectError,
    UntrustedDataError,
)
from dcp_engine.memory import require_memory
from dcp_engine.objects import decode_object, encode_object
from dcp_engine.storage import dtypes
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.records import ChunkSource, ReadRequest
from dcp_engine.storage.table import ShardTable
from dcp_engine.types import EncodedObject, EngineMetadata, PlannerData

__all__ = [
    "ChunkLocation",
    "ManifestIndex",
    "check_dtypes",
    "chunks_of_metadata",
    "chunks_of_table",
    "empty_entries",
    "metadata_of_manifest",
    "requests_of_plan",
    "sources_of_plan",
]

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offsets, sizes. An object is ``(key, (), ())``: a plan does not know its length."""


# ---------------------------------------------------------------------------------------------------------------- saving


def chunks_of_metadata(metadata: Metadata) -> set[Box]:
    """The boxes that all ranks together must have written. Empty boxes are stored nowhere, aliases of ties are stored under another key."""
    ties = metadata.planner_data.ties if isinstance(metadata.planner_data, PlannerData) else {}
    boxes: set[Box] = set()
    for key, entry in metadata.state_dict_metadata.items():
        if key in ties:
            continue
        if isinstance(entry, BytesStorageMetadata):
            boxes.add((key, (), ()))
            continue
        for chunk in entry.chunks:
            if math.prod(chunk.sizes):
                boxes.add((key, tuple(chunk.offsets), tuple(chunk.sizes)))
    return boxes


def chunks_of_table(table: ShardTable) -> set[Box]:
    """The boxes that one shard file's table describes, in the terms of :func:`chunks_of_metadata`."""
    return {
        (name, (), ()) if code in (dtypes.OBJECT.code, dtypes.OPAQUE.code) else (name, offsets, sizes)
        for name, code, offsets, sizes in table.chunks()
    }


def check_dtypes(plan: SavePlan) -> None:
    """Refuse tensors that cannot be stored before the plans of all ranks are merged: DCP's own planner fails there on some, without a key.

    Raises:
        UnsupportedTensorError: naming the first one's key and dtype.
    """
    known: set[torch.dtype] = set()
    for item in plan.items:
        if item.tensor_data is not None and (dtype := item.tensor_data.properties.dtype) not in known:
            dtypes.of_tensor_dtype(dtype, tensor=item.index.fqn)
            known.add(dtype)


def sources_of_plan(plan: SavePlan, planner: SavePlanner, components: ComponentMap) -> dict[str, list[ChunkSource]]:
    """What a rank has to write, by component, each in the plan's order.

    Objects are encoded here, since their length must be known before their chunk is described; they stay in memory until written.

    Args:
        plan: the final local plan.
        planner: resolves items to data. ``resolve_data`` is called lazily for tensors, at least once an item, from worker threads.
        components: decides the component of a key.

    Raises:
        UnencodableObjectError: an object cannot be represented; the error names the key.
        UnsupportedTensorError: a tensor's dtype cannot be stored.
        PlanError: an item carries no tensor data.
    """
    sources: dict[str, list[ChunkSource]] = {}
    for item in plan.items:
        source = _object_source(item, planner) if item.type is WriteItemType.BYTE_IO else _tensor_source(item, planner)
        sources.setdefault(components.of(item.index.fqn), []).append(source)
    return sources


def empty_entries(metadata: Metadata) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Name, dtype code and shape of the tensors without elements: they have no chunks, so only the metadata knows of them."""
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and 0 in entry.size:
            yield key, dtypes.of_tensor_dtype(entry.properties.dtype, tensor=key).code, tuple(entry.size)


def _box_of(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if item.tensor_data is None:
        raise PlanError("a write item of a tensor carries no tensor data", tensor=item.index.fqn, remedy="use a planner that fills it")
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


def _tensor_source(item: WriteItem, planner: SavePlanner) -> ChunkSource:
    offsets, sizes = _box_of(item)
    assert item.tensor_data is not None
    dtype = dtypes.of_tensor_dtype(item.tensor_data.properties.dtype, tensor=item.index.fqn)
    return ChunkSource(
        name=item.index.fqn,
        dtype=dtype,
        shape=tuple(item.tensor_data.size),
        offsets=offsets,
        sizes=sizes,
        nbytes=math.prod(sizes) * dtype.itemsize,
        load=_TensorLoad(planner, item, sizes, dtype.torch_dtype),
    )


@dataclass(frozen=True, slots=True)
class _TensorLoad:
    """Resolves one item to the row-major bytes of its box."""

    planner: SavePlanner
    item: WriteItem
    sizes: tuple[int, ...]
    dtype: torch.dtype | None

    def __call__(self) -> NDArray[np.uint8]:
        tensor = self.planner.resolve_data(self.item)
        key = self.item.index.fqn
        if not isinstance(tensor, torch.Tensor):
            raise KindMismatchError(
                "the planner planned a tensor and resolved something else",
                tensor=key,
                expected="torch.Tensor",
                found=type(tensor).__name__,
            )
        if tuple(tensor.shape) != self.sizes:
            raise PlanError(
                "the planner resolved a tensor that is not the box it planned",
                tensor=key,
                expected=f"sizes {self.sizes}",
                found=f"sizes {tuple(tensor.shape)}",
                remedy="transform the plan and the data in tandem",
            )
        if tensor.dtype != self.dtype:
            raise PlanError(
                "the planner resolved a tensor of another dtype than planned",
                tensor=key,
                expected=self.dtype,
                found=tensor.dtype,
                remedy="transform the plan and the data in tandem",
            )
        return _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Row-major bytes: a view where the tensor is contiguous CPU memory, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dtypes.carrier(plain).reshape(-1).view(np.uint8)


def _object_source(item: WriteItem, planner: SavePlanner) -> ChunkSource:
    key = item.index.fqn
    info = dtypes.OBJECT
    if _serialises_as_stock(planner):
        # A stock planner would hand over a pickle, which the format never holds: take the object itself and encode it.
        data: Any = encode_object(planner.lookup_object(item.index), key=key)  # type: ignore[attr-defined]
    else:
        resolved = planner.resolve_data(item)
        if not isinstance(resolved, io.BytesIO):
            raise KindMismatchError(
                "the planner planned an object and resolved something else",
                tensor=key,
                expected="io.BytesIO",
                found=type(resolved).__name__,
            )
        info = dtypes.OBJECT if isinstance(resolved, EncodedObject) else dtypes.OPAQUE
        data = resolved.getbuffer()
    array = np.frombuffer(data, dtype=np.uint8)
    if not array.size:
        raise UnencodableObjectError("the planner serialised an object to no bytes at all", tensor=key, remedy="write at least one byte")
    extent = (array.size,)
    return ChunkSource(name=key, dtype=info, shape=extent, offsets=(0,), sizes=extent, nbytes=array.size, load=lambda: array)


def _serialises_as_stock(planner: SavePlanner) -> bool:
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind = type(planner)
    stock = DefaultSavePlanner
    return kind.resolve_data is stock.resolve_data and kind.transform_object is stock.transform_object


# --------------------------------------------------------------------------------------------------------------- loading


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


@dataclass(slots=True)
class ManifestIndex(Mapping[MetadataIndex, ChunkLocation]):
    """``Metadata.storage_data`` of a checkpoint of ours: where each chunk lies, looked up in the manifest when asked.

    Crosses ranks as the encoded manifest, a dozen bytes a block, instead of one object a chunk. Thread-safe: immutable but for caches.
    """

    manifest: Manifest
    path: str
    _by_offsets: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ManifestIndex, (self.manifest, self.path))

    def __len__(self) -> int:
        return sum(len(self.manifest.chunks_of(self._entry(name))[2]) for name in self._names())

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name in self._names():
            entry = self._entry(name)
            if self.manifest.entry(entry).dtype.torch_dtype is None:
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
        offsets, _, ids = self.manifest.chunks_of(entry)
        if self.manifest.entry(entry).dtype.torch_dtype is None:
            return int(ids[0]) if len(ids) else None
        wanted = tuple(index.offset) if index.offset is not None else (0,) * offsets.shape[1]
        hint = index.index
        if hint is not None and 0 <= hint < len(ids) and tuple(offsets[hint].tolist()) == wanted:
            return int(ids[hint])
        known = self._by_offsets.get(entry)
        if known is None:
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


def metadata_of_manifest(manifest: Manifest, *, path: str, manifest_sha256: str) -> EngineMetadata:
    """DCP's view of a checkpoint. Chunks are listed in the manifest's order, so that an index hint of a read item is the position there.

    Raises:
        MalformedCheckpointError: the planner data or the metadata of the manifest cannot be decoded, or is of another kind.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name in (*manifest.names, *manifest.aliases):
        entry = manifest.entry_id(name)
        assert entry is not None
        state[name] = _entry_metadata(manifest, entry)
    planner_data = _decoded(manifest.planner_data, "planner_data", path) if manifest.planner_data else None
    if manifest.skeleton:
        if not isinstance(planner_data, dict) or not {tuple}.issuperset(map(type, planner_data.values())):
            raise _malformed(path, "planner_data", "a dict of paths", planner_data)
        planner_data = PlannerData(planner_data, skeleton=manifest.skeleton, ties=manifest.aliases)
    metadata = _decoded(manifest.metadata, "metadata", path) if manifest.metadata else {}
    if not isinstance(metadata, dict) or not isinstance(user_metadata := metadata.get("user", {}), dict):
        raise _malformed(path, "metadata", "a dict, with a dict under 'user'", metadata)
    return EngineMetadata(
        state_dict_metadata=state,
        planner_data=planner_data,
        storage_data=ManifestIndex(manifest, path),
        version=str(manifest.format_version),
        step=manifest.step,
        run_id=manifest.run_id or None,
        saved_at=manifest.saved_at,
        nonce=manifest.nonce,
        manifest_sha256=manifest_sha256,
        user_metadata=user_metadata,
    )


def _decoded(data: bytes, field: str, path: str) -> object:
    try:
        return decode_object(data, key=field)
    except DcpEngineError as error:
        error.path, error.file, error.tensor = path, "MANIFEST", None
        raise


def _malformed(path: str, field: str, expected: str, found: object) -> MalformedCheckpointError:
    return MalformedCheckpointError(
        f"the manifest's {field} is of another kind", path=path, file="MANIFEST", expected=expected, found=type(found).__name__
    )


def _entry_metadata(manifest: Manifest, entry: int) -> TensorStorageMetadata | BytesStorageMetadata:
    view = manifest.entry(entry)
    if view.dtype.torch_dtype is None:
        return BytesStorageMetadata()
    offsets, sizes, _ = manifest.chunks_of(entry)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=view.dtype.torch_dtype),
        size=torch.Size(view.shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(extent))
            for begin, extent in zip(offsets.tolist(), sizes.tolist(), strict=True)
        ],
    )


def requests_of_plan(plan: LoadPlan, planner: LoadPlanner, index: ManifestIndex, *, allow_opaque: bool) -> list[ReadRequest]:
    """What a rank has to read.

    Args:
        plan: the final local plan.
        planner: gives targets (``resolve_tensor``), takes results (``commit_tensor``, ``load_bytes``). It is called from worker threads,
            one call at a time, since a planner promises nothing about threads.
        index: the checkpoint.
        allow_opaque: hand bytes of unknown kind to the planner, which may unpickle them.

    Raises:
        PlanError: an item names a key, chunk or box that the checkpoint does not have.
        UntrustedDataError: an item is opaque and ``allow_opaque`` is off.
    """
    lock = threading.Lock()
    return [_request(item, planner, index, lock, allow_opaque=allow_opaque) for item in plan.items]


def _request(item: ReadItem, planner: LoadPlanner, index: ManifestIndex, lock: threading.Lock, *, allow_opaque: bool) -> ReadRequest:
    manifest = index.manifest
    key = item.storage_index.fqn
    entry = manifest.entry_id(key)
    chunk = None if entry is None else index.find_chunk(entry, item.storage_index)
    if entry is None or chunk is None:
        raise PlanError(
            "the load plan names a chunk that the checkpoint does not have",
            path=index.path,
            tensor=key,
            found=f"offsets {None if item.storage_index.offset is None else tuple(item.storage_index.offset)}",
            remedy="plan from the metadata that this reader returned",
        )
    info = manifest.entry(entry).dtype
    if item.type is LoadItemType.BYTE_IO:
        if info.torch_dtype is not None:
            raise KindMismatchError("the load plan wants an object where a tensor is stored", path=index.path, tensor=key)
        if info is dtypes.OPAQUE and not allow_opaque:
            raise UntrustedDataError(
                "this object was stored as opaque bytes by a planner of your own, and reading it may run a pickle",
                path=index.path,
                tensor=key,
                remedy="pass ShardReader(..., allow_opaque=True) if you trust whoever wrote this checkpoint",
            )
        return _object_request(item, planner, key, chunk, manifest.chunk(chunk).nbytes, lock, encoded=info is dtypes.OBJECT)
    if info.torch_dtype is None:
        raise KindMismatchError("the load plan wants a tensor where an object is stored", path=index.path, tensor=key)
    target = _TensorTarget(item, planner, info.torch_dtype, lock)
    return ReadRequest(
        name=key,
        chunk=chunk,
        offsets=tuple(item.storage_offsets),
        sizes=tuple(item.lengths),
        open=target.open,
        commit=target.commit,
    )


class _TensorTarget:
    """One tensor box to fill: asks the planner for it late, gives it back when it is whole."""

    __slots__ = ("_dtype", "_item", "_lock", "_planner", "_staged", "_tensor")

    def __init__(self, item: ReadItem, planner: LoadPlanner, dtype: torch.dtype, lock: threading.Lock) -> None:
        self._item = item
        self._planner = planner
        self._dtype = dtype
        self._lock = lock
        self._tensor: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None

    def open(self) -> NDArray[Any]:
        with self._lock:
            self._tensor = tensor = self._planner.resolve_tensor(self._item)
        target = tensor.detach()
        self._check(target)
        if target.device.type == "cpu" and not target.is_conj() and not target.is_neg():
            return dtypes.carrier(target)
        self._staged = torch.empty(tuple(self._item.lengths), dtype=self._dtype)
        return dtypes.carrier(self._staged)

    def commit(self) -> None:
        with self._lock:
            if self._tensor is None:  # an empty box: nothing was read, but the planner may count on the pair of calls
                self._tensor = self._planner.resolve_tensor(self._item)
            if self._staged is not None:
                self._tensor.detach().copy_(self._staged)
            self._planner.commit_tensor(self._item, self._tensor)
        self._tensor = self._staged = None

    def _check(self, target: torch.Tensor) -> None:
        key = self._item.dest_index.fqn
        if tuple(target.shape) != tuple(self._item.lengths):
            raise ShapeMismatchError(
                "the planner's target is not the box that it planned",
                tensor=key,
                expected=f"sizes {tuple(self._item.lengths)}",
                found=f"sizes {tuple(target.shape)}",
            )
        if target.dtype != self._dtype:
            raise DtypeMismatchError(
                "the target's dtype is not the stored one",
                tensor=key,
                expected=f"{self._dtype} (stored)",
                found=f"{target.dtype} (target)",
                remedy='load with ReshardLoadPlanner(dtype="cast") to convert floats, or give a target of the stored dtype',
            )


def _object_request(
    item: ReadItem, planner: LoadPlanner, key: str, chunk: int, nbytes: int, lock: threading.Lock, *, encoded: bool
) -> ReadRequest:
    buffer = np.empty(0, dtype=np.uint8)

    def open_() -> NDArray[Any]:
        nonlocal buffer
        require_memory(nbytes, what="an object", tensor=key)
        buffer = np.empty(nbytes, dtype=np.uint8)
        return buffer

    def commit() -> None:
        nonlocal buffer
        value = _payload(buffer, planner, key, encoded=encoded)
        with lock:
            planner.load_bytes(item, value)
        buffer = np.empty(0, dtype=np.uint8)

    return ReadRequest(name=key, chunk=chunk, offsets=(0,), sizes=(nbytes,), open=open_, commit=commit)


def _payload(buffer: NDArray[np.uint8], planner: LoadPlanner, key: str, *, encoded: bool) -> io.BytesIO:
    if not encoded:
        return io.BytesIO(buffer.tobytes())
    if getattr(planner, "accepts_encoded_objects", False):
        return EncodedObject(buffer.tobytes())
    # A stock planner unpickles what it is handed: it gets bytes that were made here, from a value that was decoded without a pickle.
    stream = io.BytesIO()
    torch.save(decode_object(buffer.data, key=key), stream)
    stream.seek(0)
    return stream
