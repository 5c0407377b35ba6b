"""A table: which entries, chunks and blocks a shard file holds, or all files of a checkpoint together, as columns.

What follows from other columns is not stored, so that it cannot contradict them: the chunks of a file come in the order of their bytes, a
bit says which of them begins a block, and from that and the sizes of the chunks follow the blocks of each chunk, its offset in them, and
the raw length of every block. Gaps, overlaps and blocks without an owner cannot be written down.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import LimitExceededError, MalformedCheckpointError
from dcp_engine.storage import columns
from dcp_engine.storage.codecs import NAMES, RAW
from dcp_engine.storage.dtypes import ITEMSIZE_OF_CODE, OBJECT, OPAQUE
from dcp_engine.storage.limits import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_ELEMENTS,
    MAX_ENTRIES,
    MAX_NAME_BYTES,
    PACK_BYTES,
)

__all__ = ["TABLE_FIELDS", "ShardTable", "check_count", "check_name", "row_starts", "rows_by_dims"]

_I64 = npt.NDArray[np.int64]

TABLE_FIELDS: dict[str, type] = dict.fromkeys(
    (
        "entry_names",
        "entry_name_bytes",
        "entry_dtypes",
        "entry_dims",
        "entry_shapes",
        "chunk_entries",
        "chunk_offsets",
        "chunk_sizes",
        "chunk_begins",
        "block_saved",
        "block_codecs",
        "block_digests",
    ),
    bytes,
)
"""The fields of a table in a document, in their order; all of them columns."""


def check_count(what: str, count: int, limit: int) -> None:
    """Raises ``LimitExceededError`` for more than the format allows."""
    if count > limit:
        raise LimitExceededError(f"too many {what}", expected=f"at most {limit}", found=count)


def check_name(name: str) -> None:
    """Raises ``LimitExceededError`` for a name of an entry or alias that is too long."""
    # Most names need not be encoded to know that they are short enough.
    if len(name) > MAX_NAME_BYTES // 4 and len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise LimitExceededError("a key is too long", tensor=name, expected=f"at most {MAX_NAME_BYTES} bytes", remedy="shorten it")


def row_starts(counts: npt.NDArray[Any] | Sequence[int]) -> _I64:
    """Where each of consecutive groups starts, and where the last ends."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """Entries, chunks and blocks as columns. Arrays are not to be written to.

    Attributes:
        names: name of each entry.
        entry_dtypes: u8 dtype code of each entry.
        entry_dims: number of dimensions of each entry.
        entry_shapes: flat: the extents of one entry after those of the one before, in elements.
        chunk_entries: index of the entry that each chunk belongs to.
        chunk_offsets: flat: where the chunk begins in the entry, in elements.
        chunk_sizes: flat: the chunk's extents, in elements, none of them zero.
        chunk_begins: whether the chunk begins a block.
        block_codecs: u8 codec of each block.
        block_saved_bytes: raw less stored bytes of each block: zero for raw blocks, else more.
        block_digests: u64 digest of each block's stored bytes.

    The rest is derived:
        shape_starts, box_starts: where the extents of an entry, or of a chunk, start in the flat columns; one more than there are rows.
        chunk_bytes: raw bytes of each chunk.
        chunk_first_block: block that holds the chunk's first byte.
        chunk_num_blocks: blocks that the chunk spans, at least 1.
        chunk_block_offset: where the chunk begins in the raw bytes of its first block.
        block_raw_bytes: raw bytes of each block.
        block_stored_bytes: bytes of each block as stored, without padding.

    Raises:
        MalformedCheckpointError: the columns contradict each other or the format. LimitExceededError: a size beyond the limits.

    Thread-safety: immutable.
    """

    names: list[str]
    entry_dtypes: npt.NDArray[np.uint8]
    entry_dims: npt.NDArray[np.uint8]
    entry_shapes: _I64
    chunk_entries: _I64
    chunk_offsets: _I64
    chunk_sizes: _I64
    chunk_begins: npt.NDArray[np.bool_]
    block_codecs: npt.NDArray[np.uint8]
    block_saved_bytes: _I64
    block_digests: npt.NDArray[np.uint64]
    shape_starts: _I64 = field(init=False)
    box_starts: _I64 = field(init=False)
    chunk_bytes: _I64 = field(init=False)
    chunk_first_block: _I64 = field(init=False)
    chunk_num_blocks: _I64 = field(init=False)
    chunk_block_offset: _I64 = field(init=False)
    block_raw_bytes: _I64 = field(init=False)
    block_stored_bytes: _I64 = field(init=False)

    def __repr__(self) -> str:
        return f"ShardTable({len(self.names)} entries, {len(self.chunk_entries)} chunks, {len(self.block_codecs)} blocks)"

    def __post_init__(self) -> None:
        check_count("entries", len(self.names), MAX_ENTRIES)
        check_count("chunks", len(self.chunk_entries), MAX_CHUNKS)
        check_count("blocks", len(self.block_codecs), MAX_BLOCKS)
        self._set(shape_starts=row_starts(self.entry_dims))
        self._check_entries()
        chunk_dims = self.entry_dims[self.chunk_entries]
        self._set(box_starts=row_starts(chunk_dims))
        _require(len(self.chunk_offsets) == self.box_starts[-1] == len(self.chunk_sizes), "boxes of another number of dimensions")
        _require(not len(self.chunk_sizes) or int(self.chunk_sizes.min()) >= 1, "a chunk without elements")
        elements = _products(self.chunk_sizes, self.box_starts)
        self._set(chunk_bytes=elements * ITEMSIZE_OF_CODE[self.entry_dtypes[self.chunk_entries]])
        self._lay_out()

    def _set(self, **derived: _I64) -> None:
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check_entries(self) -> None:
        _require(len(self.entry_dims) == len(self.entry_dtypes) == len(self.names), "entry columns of different lengths")
        _require(len(set(self.names)) == len(self.names), "two entries of one name")
        _require(bool(ITEMSIZE_OF_CODE[self.entry_dtypes].all()), "an unknown dtype code")
        _require(not len(self.entry_dims) or int(self.entry_dims.max()) <= MAX_DIMS, f"more than {MAX_DIMS} dimensions")
        _require(len(self.entry_shapes) == self.shape_starts[-1], "shapes of another number of dimensions")
        if len(self.entry_shapes):
            _require(int(self.entry_shapes.min()) >= 0 and int(self.entry_shapes.max()) <= MAX_ELEMENTS, "an extent beyond the limits")
        _products(self.entry_shapes, self.shape_starts)
        objects = (self.entry_dtypes == OBJECT.code) | (self.entry_dtypes == OPAQUE.code)
        _require(bool((self.entry_dims[objects] == 1).all()), "an object that is not one-dimensional")

    def _lay_out(self) -> None:
        """Derive where every chunk lies, and check that the blocks are just those that the chunks need."""
        begins, nbytes = self.chunk_begins, self.chunk_bytes
        num_blocks = len(self.block_codecs)
        _require(len(begins) == len(self.chunk_entries), "chunk columns of different lengths")
        _require(num_blocks == len(self.block_saved_bytes) == len(self.block_digests), "block columns of different lengths")
        large = nbytes >= PACK_BYTES
        _require(bool(begins[large].all()) and bool(begins[:1].all()), "a chunk that does not begin its own block")
        spans = -(-nbytes // BLOCK_BYTES)
        owned = np.where(begins, spans, 0)
        _require(float(owned.sum(dtype=np.float64)) == num_blocks, "more or fewer blocks than the chunks need")
        ends = np.cumsum(owned)
        leaders = np.flatnonzero(begins)
        leader = leaders[np.cumsum(begins) - 1] if len(begins) else leaders
        shared = ~begins
        _require(not bool(large[leader[shared]].any()), "a chunk that shares the block of a large one")
        codes = self.entry_dtypes[self.chunk_entries]
        _require(bool((codes == codes[leader]).all()), "chunks of different dtypes in one block")
        # Large chunks are left out of the running sum: it stays within the blocks' total size, and only small ones share.
        running = row_starts(np.where(large, 0, nbytes))[:-1]
        self._set(
            chunk_first_block=ends - np.where(begins, owned, 1),
            chunk_num_blocks=spans,
            chunk_block_offset=running - running[leader],
        )
        raw = np.full(num_blocks, BLOCK_BYTES, dtype=np.int64)
        raw[ends[large] - 1] = (nbytes[large] - 1) % BLOCK_BYTES + 1
        packs = np.flatnonzero(begins & ~large)
        if len(packs):
            raw[ends[packs] - 1] = np.add.reduceat(np.where(large, 0, nbytes), leaders)[~large[leaders]]
        _require(not num_blocks or int(raw.max()) <= BLOCK_BYTES, "a shared block that is too large")
        _require(bool(np.isin(self.block_codecs, list(NAMES)).all()), "an unknown codec")
        saved, plain = self.block_saved_bytes, self.block_codecs == RAW
        _require(not bool(saved[plain].any()), "a raw block of another length than its chunks")
        _require(bool(((saved >= 1) & (saved < raw))[~plain].all()), "a compressed block that is empty or not smaller")
        self._set(block_raw_bytes=raw, block_stored_bytes=raw - saved)

    def shape(self, entry: int) -> tuple[int, ...]:
        """Global shape of an entry."""
        return tuple(self.entry_shapes[self.shape_starts[entry] : self.shape_starts[entry + 1]].tolist())

    def box(self, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a chunk, in elements."""
        rows = slice(self.box_starts[chunk], self.box_starts[chunk + 1])
        return tuple(self.chunk_offsets[rows].tolist()), tuple(self.chunk_sizes[rows].tolist())

    def chunks(self) -> Iterator[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
        """Name, dtype code, offsets and sizes of each chunk, in order."""
        offsets, sizes, starts = self.chunk_offsets.tolist(), self.chunk_sizes.tolist(), self.box_starts.tolist()
        codes = self.entry_dtypes.tolist()
        for chunk, entry in enumerate(self.chunk_entries.tolist()):
            rows = slice(starts[chunk], starts[chunk + 1])
            yield self.names[entry], codes[entry], tuple(offsets[rows]), tuple(sizes[rows])

    def to_document(self) -> columns.Document:
        """The stored columns, by the names of :data:`TABLE_FIELDS`."""
        names, name_bytes = columns.pack_texts(self.names)
        return {
            "entry_names": names,
            "entry_name_bytes": name_bytes,
            "entry_dtypes": columns.pack_column(self.entry_dtypes, "u1"),
            "entry_dims": columns.pack_column(self.entry_dims, "u1"),
            "entry_shapes": columns.pack_column(self.entry_shapes, "<i8"),
            "chunk_entries": columns.pack_column(self.chunk_entries, "<u4"),
            "chunk_offsets": columns.pack_column(_steps_of_offsets(self), "<i8"),
            "chunk_sizes": columns.pack_column(self.chunk_sizes, "<i8"),
            "chunk_begins": columns.pack_column(self.chunk_begins, "u1"),
            "block_saved": columns.pack_column(self.block_saved_bytes, "<u4"),
            "block_codecs": columns.pack_column(self.block_codecs, "u1"),
            "block_digests": columns.pack_column(self.block_digests, "<u8"),
        }

    @classmethod
    def from_document(cls, document: columns.Document) -> ShardTable:
        """Parse and check the columns of a table.

        Args:
            document: holds at least :data:`TABLE_FIELDS`, all of them bytes.

        Raises:
            MalformedCheckpointError: the columns break a rule of the format. LimitExceededError: too many or too large.
        """
        raw: dict[str, bytes] = {name: value for name in TABLE_FIELDS if isinstance(value := document[name], bytes)}
        codes = columns.unpack_column(raw["entry_dtypes"], "u1", what="entry_dtypes", max_rows=MAX_ENTRIES)
        num_entries = len(codes)
        dims = columns.unpack_column(raw["entry_dims"], "u1", what="entry_dims", num_rows=num_entries, max_rows=MAX_ENTRIES)
        names = columns.unpack_texts(
            raw["entry_names"], raw["entry_name_bytes"], what="entry_names", max_rows=MAX_ENTRIES, max_bytes=MAX_NAME_BYTES
        )
        num_extents = int(dims.sum(dtype=np.int64))
        shapes = columns.unpack_column(raw["entry_shapes"], "<i8", what="entry_shapes", num_rows=num_extents, max_rows=num_extents)
        entries = columns.unpack_column(raw["chunk_entries"], "<u4", what="chunk_entries", max_rows=MAX_CHUNKS).astype(np.int64)
        _require(not len(entries) or int(entries.max()) < num_entries, "a chunk of an entry that does not exist")
        num_extents = int(dims[entries].sum(dtype=np.int64))
        sizes = columns.unpack_column(raw["chunk_sizes"], "<i8", what="chunk_sizes", num_rows=num_extents, max_rows=num_extents)
        steps = columns.unpack_column(raw["chunk_offsets"], "<i8", what="chunk_offsets", num_rows=num_extents, max_rows=num_extents)
        begins = columns.unpack_column(raw["chunk_begins"], "u1", what="chunk_begins", num_rows=len(entries), max_rows=MAX_CHUNKS)
        _require(not len(begins) or int(begins.max()) <= 1, "a mark that is neither 0 nor 1")
        codecs = columns.unpack_column(raw["block_codecs"], "u1", what="block_codecs", max_rows=MAX_BLOCKS)
        saved = columns.unpack_column(raw["block_saved"], "<u4", what="block_saved", num_rows=len(codecs), max_rows=MAX_BLOCKS)
        digests = columns.unpack_column(raw["block_digests"], "<u8", what="block_digests", num_rows=len(codecs), max_rows=MAX_BLOCKS)
        return cls(
            names=names,
            entry_dtypes=codes,
            entry_dims=dims,
            entry_shapes=shapes,
            chunk_entries=entries,
            chunk_offsets=_offsets_of_steps(entries, row_starts(dims[entries]), steps),
            chunk_sizes=sizes,
            chunk_begins=begins.astype(np.bool_),
            block_codecs=codecs,
            block_saved_bytes=saved.astype(np.int64),
            block_digests=digests,
        )

    def to_msgpack(self) -> bytes:
        """The table as a document of its own."""
        return columns.pack_document(self.to_document())

    @classmethod
    def from_msgpack(cls, data: bytes) -> ShardTable:
        """The inverse of :meth:`to_msgpack`.

        Raises:
            MalformedCheckpointError, LimitExceededError
        """
        return cls.from_document(columns.unpack_document(data, TABLE_FIELDS, what="table"))


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise MalformedCheckpointError(f"the table describes {fault}")


def _products(values: _I64, starts: _I64) -> _I64:
    """Product of each group of consecutive values; 1 for an empty one.

    Raises:
        LimitExceededError: a product is above ``MAX_ELEMENTS``.
    """
    result = np.ones(len(starts) - 1, dtype=np.int64)
    filled = np.flatnonzero(starts[1:] > starts[:-1])
    if len(filled):
        begins = starts[filled]
        with np.errstate(over="ignore", invalid="ignore"):
            rough = np.multiply.reduceat(values.astype(np.float64), begins)
        # Written so that a product that is not a number (infinity times zero) fails, too.
        if not bool((rough <= MAX_ELEMENTS).all()):
            raise LimitExceededError(
                "a tensor or chunk has too many elements", expected=f"at most {MAX_ELEMENTS}", found=f"about {np.nanmax(rough):g}"
            )
        result[filled] = np.multiply.reduceat(values, begins)
    return result


def rows_by_dims(starts: _I64) -> Iterator[tuple[_I64, npt.NDArray[Any]]]:
    """Group rows of a flat column by their number of values.

    Args:
        starts: where each row starts, and the last ends.

    Yields:
        The rows of one length d >= 0, and the ``[num_rows, d]`` positions of their values in the flat column.
    """
    counts = np.diff(starts)
    order = np.argsort(counts, kind="stable")
    ordered = counts[order]
    bounds = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    for first, last in itertools.pairwise(bounds):
        if first < last:
            rows = order[first:last]
            yield rows, starts[rows][:, None] + np.arange(ordered[first])


def _steps_of_offsets(table: ShardTable) -> _I64:
    """Offsets of each chunk relative to the chunk of the same entry before it.

    Regular shardings become constants, which compress to next to nothing.
    """
    steps = table.chunk_offsets.copy()
    for rows, places in rows_by_dims(table.box_starts):
        order = np.argsort(table.chunk_entries[rows], kind="stable")
        owners, places = table.chunk_entries[rows][order], places[order]
        again = np.flatnonzero(owners[1:] == owners[:-1])
        steps[places[again + 1]] -= table.chunk_offsets[places[again]]
    return steps


def _offsets_of_steps(entries: _I64, starts: _I64, steps: _I64) -> _I64:
    """The inverse of :func:`_steps_of_offsets`. Hostile steps wrap around; the check of the boxes finds what comes of it."""
    offsets = steps.copy()
    for rows, places in rows_by_dims(starts):
        order = np.argsort(entries[rows], kind="stable")
        owners, places = entries[rows][order], places[order]
        firsts = np.concatenate((np.ones(1, dtype=np.bool_), owners[1:] != owners[:-1]))
        if firsts.all():
            continue
        sums = np.cumsum(steps[places], axis=0)
        begins = np.flatnonzero(firsts)
        base = sums[begins] - steps[places[begins]]
        offsets[places] = sums - base[np.cumsum(firsts) - 1]
    return offsets
