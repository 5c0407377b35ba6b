"""The manifest: what a checkpoint holds and where, as one checked value.

The class models the document and what follows from it, and nothing else: it does no I/O and knows nothing of DCP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import DcpEngineError, MalformedCheckpointError, PlanError
from dcp_engine.storage import dtypes
from dcp_engine.storage.columns import pack_document
from dcp_engine.storage.dtypes import DtypeInfo
from dcp_engine.storage.envelope import MANIFEST_MAGIC, open_body, pack_record, parse_record, shard_name
from dcp_engine.storage.limits import FORMAT_VERSION, HEADER_BYTES, RECORD_BYTES
from dcp_engine.storage.manifest_checks import check_fields, check_files, untiled_entries
from dcp_engine.storage.manifest_document import FileRecord, from_document, num_rows, to_document
from dcp_engine.storage.packed_table import PackedTable
from dcp_engine.storage.shard_table import ShardTable
from dcp_engine.storage.table import TableBuilder, merge_tables
from dcp_engine.storage.table_columns import TableColumns, aligned, row_starts

__all__ = ["ChunkView", "EntryView", "FileRecord", "Manifest", "Receipt"]

_I64 = npt.NDArray[np.int64]


class Receipt(Protocol):
    """What a manifest needs to know of a file that was written."""

    @property
    def name(self) -> str: ...
    @property
    def component(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def stripe(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def nonce(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def table(self) -> PackedTable: ...
    @property
    def footer_sha256(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class EntryView:
    """One stored tensor or object.

    Attributes:
        id: index of the entry.
        name: key under which it is stored.
        dtype: element type.
        shape: global shape, in elements.
        chunks: ids of its chunks.
    """

    id: int
    name: str
    dtype: DtypeInfo
    shape: tuple[int, ...]
    chunks: _I64


@dataclass(frozen=True, slots=True)
class ChunkView:
    """One stored box.

    Attributes:
        entry: id of the entry that it is part of.
        offsets: where it begins in the entry, in elements.
        sizes: its extents, in elements.
        file: index of its file.
        first_block: id of the block that holds its first byte, among the blocks of all files.
        num_blocks: consecutive blocks that hold it.
        block_offset: where it begins in the raw bytes of its first block, in bytes.
        nbytes: its raw bytes.
    """

    entry: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    first_block: int
    num_blocks: int
    block_offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """A whole checkpoint, described.

    Made by :meth:`build` or :meth:`decode`; whichever way, it is checked when made: its tables are consistent, its boxes tile every tensor,
    its names and sizes are within the limits.

    Attributes:
        writer_version: version of the package that wrote it.
        nonce: of the attempt, 32 hex digits.
        run_id: the training run, any text.
        step: training step, if known.
        saved_at: when the save was committed to, UTC, RFC 3339 with a final Z.
        world_size: number of ranks that wrote it.
        codec: what the writer was asked for; each block has its own.
        files: the shard files, by component, rank and stripe.
        table: entries, chunks and blocks of all files.
        aliases: further name -> name of the entry that it shares its storage with.
        planner_data: DCP's planner data in the encoding of :mod:`dcp_engine.objects`; may be empty.
        skeleton: the typed containers of the state, likewise.
        metadata: user metadata and contract, likewise.
        format_version: version of the format.

    Raises:
        MalformedCheckpointError, LimitExceededError: a rule of the format does not hold.

    Thread-safety: immutable; what is derived lazily may be derived twice.
    """

    writer_version: str
    nonce: str
    run_id: str
    step: int | None
    saved_at: str
    world_size: int
    codec: str
    files: tuple[FileRecord, ...]
    table: ShardTable
    aliases: Mapping[str, str]
    planner_data: bytes
    skeleton: bytes
    metadata: bytes
    format_version: int = FORMAT_VERSION

    def __repr__(self) -> str:
        # The metadata that dcp.save returns shows this: the default would print every column.
        return f"Manifest(step={self.step}, saved_at={self.saved_at!r}, nonce={self.nonce!r}, {len(self.files)} files, {self.table!r})"

    def __post_init__(self) -> None:
        check_fields(self)
        check_files(self)
        for alias, target in self.aliases.items():
            if alias in self.ids or target not in self.ids:
                raise MalformedCheckpointError(
                    "an alias of nothing, or of a name that is an entry itself", tensor=alias, found=repr(target)
                )
        if faulty := untiled_entries(self.table):
            raise MalformedCheckpointError(
                "the chunks of an entry do not cover it exactly once", tensor=self.names[faulty[0]], found=self._coverage(faulty[0])
            )

    def _coverage(self, entry: int) -> str:
        offsets, sizes, _ = self.chunks_of(entry)
        volume = int(sizes.prod(axis=1, dtype=np.float64).sum())
        return f"{len(offsets)} chunks with {volume} elements for shape {self.table.shape(entry)}"

    @classmethod
    def build(
        cls,
        *,
        receipts: Iterable[Receipt],
        empty_entries: Sequence[tuple[str, int, tuple[int, ...]]] = (),
        nonce: str,
        writer_version: str,
        run_id: str,
        step: int | None,
        saved_at: str,
        world_size: int,
        aliases: Mapping[str, str],
        planner_data: bytes,
        skeleton: bytes,
        metadata: bytes,
        codec: str,
    ) -> Manifest:
        """The manifest of files that were written.

        Args:
            receipts: one for each file, in any order.
            empty_entries: name, dtype code and shape of tensors without elements, which no file knows of.
            The rest: see the attributes.

        Raises:
            PlanError: files of another attempt, disagreement about an entry, or an entry that is not covered exactly once.
        """
        ordered = sorted(receipts, key=lambda receipt: (receipt.component, receipt.rank, receipt.stripe))
        extra = TableBuilder()
        for entry in empty_entries:
            extra.add_entry(*entry)
        table, num_blocks, num_chunks = merge_tables([*_tables_of(ordered, nonce, world_size), extra.build()])
        files = tuple(
            FileRecord(
                receipt.name, receipt.component, receipt.rank, receipt.size_bytes, receipt.footer_sha256, chunks, blocks, receipt.stripe
            )
            for receipt, chunks, blocks in zip(ordered, num_chunks[:-1], num_blocks[:-1], strict=True)
        )
        try:
            return cls(
                writer_version=writer_version,
                nonce=nonce,
                run_id=run_id,
                step=step,
                saved_at=saved_at,
                world_size=world_size,
                codec=codec,
                files=files,
                table=table,
                aliases=dict(aliases),
                planner_data=planner_data,
                skeleton=skeleton,
                metadata=metadata,
            )
        except MalformedCheckpointError as error:
            if error.tensor is None:
                raise
            # What the ranks wrote is sound file by file, but does not add up.
            raise PlanError(error.message, tensor=error.tensor, expected=error.expected, found=error.found) from error

    def encode(self) -> bytes:
        """The bytes of the file MANIFEST, made once.

        Raises:
            LimitExceededError: larger than the format allows.
        """
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        document = to_document(self, self.file_extents)
        return b"".join(pack_record(MANIFEST_MAGIC, pack_document(document), num_rows(document)))

    @classmethod
    def decode(cls, data: bytes | memoryview, *, path: str | None = None) -> Manifest:
        """Parse and check the bytes of the file MANIFEST. Safe for any bytes: memory and time are bounded by the
        format's limits, and for a short file by its length (see ``limits.max_record_raw_bytes``).

        Args:
            data: the whole file.
            path: of the checkpoint, for messages.

        Raises:
            CorruptCheckpointError kinds, UnsupportedVersionError
        """
        view = memoryview(data)
        try:
            record = parse_record(bytes(view[:RECORD_BYTES]), MANIFEST_MAGIC, file="MANIFEST")
            body = open_body(record, view[RECORD_BYTES:], file="MANIFEST")
            return cls(format_version=record.version, **from_document(body, record.stored_bytes))
        except DcpEngineError as error:
            error.path = path
            error.file = error.file or "MANIFEST"
            raise

    @property
    def names(self) -> list[str]:
        """Names of the stored entries, without aliases."""
        return self.table.names

    @cached_property
    def ids(self) -> dict[str, int]:
        """Name -> id of the stored entries, without aliases."""
        return {name: index for index, name in enumerate(self.table.names)}

    def entry_id(self, name: str) -> int | None:
        """Id of the entry stored under a name or an alias; ``None`` if there is none."""
        return self.ids.get(self.aliases.get(name, name))

    def entry(self, entry: int) -> EntryView:
        """One entry by its id."""
        return EntryView(
            entry, self.names[entry], dtypes.of_code(int(self.table.entry_dtypes[entry])), self.table.shape(entry), self.chunk_ids(entry)
        )

    @cached_property
    def entry_starts(self) -> list[int]:
        """Where the chunks of each entry begin in the table's ``chunk_order``, and where the last one's end."""
        starts: list[int] = row_starts(np.bincount(self.table.chunk_entries, minlength=len(self.names))).tolist()
        return starts

    def chunk_ids(self, entry: int) -> _I64:
        """Ids of the chunks of an entry, ascending."""
        return self.table.chunk_order[self.entry_starts[entry] : self.entry_starts[entry + 1]]

    def chunks_of(self, entry: int) -> tuple[_I64, _I64, _I64]:
        """The chunks of an entry.

        Returns:
            Offsets ``[num_chunks, num_dims]`` and sizes ``[num_chunks, num_dims]``, in elements, and ids ``[num_chunks]``.
        """
        ids = self.chunk_ids(entry)
        places = self.table.box_starts[ids][:, None] + np.arange(int(self.table.entry_dims[entry]))
        return self.table.chunk_offsets[places], self.table.chunk_sizes[places], ids

    def chunk(self, chunk: int) -> ChunkView:
        """One chunk by its id."""
        table = self.table
        offsets, sizes = table.box(chunk)
        first_block = int(table.chunk_first_block[chunk])
        return ChunkView(
            entry=int(table.chunk_entries[chunk]),
            offsets=offsets,
            sizes=sizes,
            file=int(self.block_file[first_block]),
            first_block=first_block,
            num_blocks=int(table.chunk_num_blocks[chunk]),
            block_offset=int(table.chunk_block_offset[chunk]),
            nbytes=int(table.chunk_bytes[chunk]),
        )

    @cached_property
    def _last_blocks(self) -> _I64:
        return self.table.chunk_first_block + self.table.chunk_num_blocks - 1

    def chunks_of_block(self, block: int) -> range:
        """Ids of the chunks that have bytes in a block: a range, since chunks come in the order of their bytes."""
        first = int(np.searchsorted(self._last_blocks, block))
        return range(first, int(np.searchsorted(self.table.chunk_first_block, block, side="right")))

    @cached_property
    def block_file(self) -> _I64:
        """Index of the file of each block."""
        return np.repeat(np.arange(len(self.files)), [file.num_blocks for file in self.files])

    @cached_property
    def block_extent(self) -> _I64:
        """Bytes that each block takes up in its file, padding included."""
        return aligned(self.table.block_stored_bytes)

    @cached_property
    def block_position(self) -> _I64:
        """Byte position of each block in its file."""
        before = row_starts(self.block_extent)
        first = row_starts([file.num_blocks for file in self.files])[:-1]
        return HEADER_BYTES + before[:-1] - before[first][self.block_file]

    @cached_property
    def file_extents(self) -> _I64:
        """Sum of the extents of each file's blocks: what lies between its header and its footer."""
        return np.diff(row_starts(self.block_extent)[row_starts([file.num_blocks for file in self.files])])

    def footer_position(self, file: int) -> int:
        """Byte position of a file's footer body."""
        return HEADER_BYTES + int(self.file_extents[file])

    def __reduce__(self) -> tuple[Any, ...]:
        # The encoded form is a fraction of the arrays', and whoever receives it checks it.
        return (_decode, (self.encode(),))


def _tables_of(receipts: Sequence[Receipt], nonce: str, world_size: int) -> list[TableColumns]:
    """The tables of files that were written. Raises ``PlanError`` if one is not of this save, or has no table."""
    tables = []
    known: dict[Any, Any] = {}
    for receipt in receipts:
        expected = (nonce, world_size, shard_name(receipt.component, receipt.rank, receipt.stripe))
        found = (receipt.nonce, receipt.world_size, receipt.name)
        if found != expected:
            raise PlanError(
                "a file does not belong to this save",
                file=receipt.name,
                rank=receipt.rank,
                expected=f"nonce, world size and name {expected}",
                found=found,
                remedy="the path must belong to one save at a time",
            )
        try:
            tables.append(receipt.table.unpack(known))
        except DcpEngineError as error:
            error.file, error.rank = receipt.name, receipt.rank
            raise
    return tables


def _decode(data: bytes) -> Manifest:
    return Manifest.decode(data)
