"""A table: which entries, chunks and blocks a shard file holds, or all files of a checkpoint together, as columns.

What follows from other columns is not stored, so that it cannot contradict them: the chunks of a file come in the order of their bytes, a
bit says which of them begins a block, and from that and the sizes of the chunks follow the blocks of each chunk, its offset in them, and
the raw length of every block. Gaps, overlaps and blocks without an owner cannot be written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import LimitExceededError
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
    PACK_BYTES,
    TAG_BYTES,
)
from dcp_engine.storage.table_columns import (
    TABLE_FIELDS,
    Boxes,
    TableColumns,
    block_columns,
    block_document,
    boxes_by_dims,
    check_count,
    entry_columns,
    entry_document,
    layout_columns,
    layout_document,
    offsets_column,
    require,
    row_starts,
)

__all__ = ["ShardTable"]

_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable(TableColumns):
    """Entries, chunks and blocks as columns, checked. Arrays are not to be written to.

    Attributes: those of :class:`TableColumns`.

    The rest is derived:
        shape_starts, box_starts: where the extents of an entry, or of a chunk, start in the flat columns; one more than there are rows.
        chunk_order: ids of the chunks by their entries; those of one entry ascend.
        chunk_bytes: raw bytes of each chunk.
        chunk_first_block: block that holds the chunk's first byte.
        chunk_num_blocks: blocks that the chunk spans, at least 1.
        chunk_block_offset: where the chunk begins in the raw bytes of its first block.
        block_raw_bytes: raw bytes of each block.
        block_stored_bytes: bytes of each block as stored, without padding; with the tag, where it is encrypted.

    Raises:
        MalformedCheckpointError: the columns contradict each other or the format. LimitExceededError: a size beyond the limits.

    Thread-safety: immutable.
    """

    shape_starts: _I64 = field(init=False)
    box_starts: _I64 = field(init=False)
    chunk_order: _I64 = field(init=False)
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
        self._set(box_starts=row_starts(chunk_dims), chunk_order=np.argsort(self.chunk_entries, kind="stable"))
        require(len(self.chunk_offsets) == self.box_starts[-1] == len(self.chunk_sizes), "boxes of another number of dimensions")
        require(not len(self.chunk_sizes) or int(self.chunk_sizes.min()) >= 1, "a chunk without elements")
        elements = _products(self.chunk_sizes, self.box_starts)
        self._set(chunk_bytes=elements * ITEMSIZE_OF_CODE[self.entry_dtypes[self.chunk_entries]])
        self._lay_out()

    def _set(self, **derived: _I64) -> None:
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check_entries(self) -> None:
        require(len(self.entry_dims) == len(self.entry_dtypes) == len(self.names), "entry columns of different lengths")
        require(len(set(self.names)) == len(self.names), "two entries of one name")
        require(bool(ITEMSIZE_OF_CODE[self.entry_dtypes].all()), "an unknown dtype code")
        require(not len(self.entry_dims) or int(self.entry_dims.max()) <= MAX_DIMS, f"more than {MAX_DIMS} dimensions")
        require(len(self.entry_shapes) == self.shape_starts[-1], "shapes of another number of dimensions")
        if len(self.entry_shapes):
            require(int(self.entry_shapes.min()) >= 0 and int(self.entry_shapes.max()) <= MAX_ELEMENTS, "an extent beyond the limits")
        _products(self.entry_shapes, self.shape_starts)
        objects = (self.entry_dtypes == OBJECT.code) | (self.entry_dtypes == OPAQUE.code)
        require(bool((self.entry_dims[objects] == 1).all()), "an object that is not one-dimensional")

    def _lay_out(self) -> None:
        """Derive where every chunk lies, and check that the blocks are just those that the chunks need."""
        begins, nbytes = self.chunk_begins, self.chunk_bytes
        num_blocks = len(self.block_codecs)
        require(len(begins) == len(self.chunk_entries), "chunk columns of different lengths")
        require(num_blocks == len(self.block_saved_bytes) == len(self.block_digests), "block columns of different lengths")
        large = nbytes >= PACK_BYTES
        require(bool(begins[large].all()) and bool(begins[:1].all()), "a chunk that does not begin its own block")
        spans = -(-nbytes // BLOCK_BYTES)
        owned = np.where(begins, spans, 0)
        require(float(owned.sum(dtype=np.float64)) == num_blocks, "more or fewer blocks than the chunks need")
        ends = np.cumsum(owned)
        leaders = np.flatnonzero(begins)
        leader = leaders[np.cumsum(begins) - 1] if len(begins) else leaders
        shared = ~begins
        require(not bool(large[leader[shared]].any()), "a chunk that shares the block of a large one")
        codes = self.entry_dtypes[self.chunk_entries]
        require(bool((codes == codes[leader]).all()), "chunks of different dtypes in one block")
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
        require(not num_blocks or int(raw.max()) <= BLOCK_BYTES, "a shared block that is too large")
        require(bool(np.isin(self.block_codecs, list(NAMES)).all()), "an unknown codec")
        saved, plain = self.block_saved_bytes, self.block_codecs == RAW
        require(not bool(saved[plain].any()), "a raw block of another length than its chunks")
        require(bool(((saved >= 1) & (saved < raw))[~plain].all()), "a compressed block that is empty or not smaller")
        self._set(block_raw_bytes=raw, block_stored_bytes=raw - saved + (TAG_BYTES if self.encryption_key_id else 0))

    def shape(self, entry: int) -> tuple[int, ...]:
        """Global shape of an entry."""
        return tuple(self.entry_shapes[self.shape_starts[entry] : self.shape_starts[entry + 1]].tolist())

    def box(self, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a chunk, in elements."""
        rows = slice(self.box_starts[chunk], self.box_starts[chunk + 1])
        return tuple(self.chunk_offsets[rows].tolist()), tuple(self.chunk_sizes[rows].tolist())

    def boxes(self) -> Iterator[Boxes]:
        """All chunks, by number of dimensions."""
        yield from boxes_by_dims(self.chunk_entries, self.chunk_order, self.box_starts, self.entry_dims)

    def chunks(self) -> Iterator[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
        """Name, dtype code, offsets and sizes of each chunk, in order."""
        offsets, sizes, starts = self.chunk_offsets.tolist(), self.chunk_sizes.tolist(), self.box_starts.tolist()
        codes = self.entry_dtypes.tolist()
        for chunk, entry in enumerate(self.chunk_entries.tolist()):
            rows = slice(starts[chunk], starts[chunk + 1])
            yield self.names[entry], codes[entry], tuple(offsets[rows]), tuple(sizes[rows])

    def to_document(self) -> columns.Document:
        """The stored columns, by the names of :data:`TABLE_FIELDS`."""
        layout = layout_document(self)
        steps = columns.pack_column(_steps_of_offsets(self), "<i8")
        of = {**entry_document(self), **layout, "chunk_offsets": steps, **block_document(self)}
        return {name: of[name] for name in TABLE_FIELDS}

    @classmethod
    def from_document(cls, document: columns.Document) -> ShardTable:
        """Parse and check the columns of a table.

        Args:
            document: holds at least :data:`TABLE_FIELDS`, all of them bytes.

        Raises:
            MalformedCheckpointError: the columns break a rule of the format. LimitExceededError: too many or too large.
        """
        entries = entry_columns(document)
        layout = layout_columns(document, entries["entry_dims"])
        steps = offsets_column(document, len(layout["chunk_sizes"]))
        offsets = _offsets_of_steps(layout["chunk_entries"], entries["entry_dims"], steps)
        return cls(**entries, **layout, chunk_offsets=offsets, **block_columns(document))

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


def _steps_of_offsets(table: ShardTable) -> _I64:
    """Offsets of each chunk relative to the chunk of the same entry before it.

    Regular shardings become constants, which compress to next to nothing.
    """
    steps = table.chunk_offsets.copy()
    for boxes in table.boxes():
        offsets = boxes.of(table.chunk_offsets)
        again = boxes.owners[1:] == boxes.owners[:-1]
        offsets[1:] -= np.where(again[:, None], offsets[:-1], 0)
        boxes.put(offsets, steps)
    return steps


def _offsets_of_steps(entries: _I64, dims: npt.NDArray[np.uint8], steps: _I64) -> _I64:
    """The inverse of :func:`_steps_of_offsets`. Hostile steps wrap around; the check of the boxes finds what comes of it."""
    offsets = steps.copy()
    order = np.argsort(entries, kind="stable")
    for boxes in boxes_by_dims(entries, order, row_starts(dims[entries]), dims):
        firsts = np.append(True, boxes.owners[1:] != boxes.owners[:-1])
        if firsts.all():
            continue
        own = boxes.of(steps)
        sums = np.cumsum(own, axis=0)
        begins = np.flatnonzero(firsts)
        base = sums[begins] - own[begins]
        sums -= np.repeat(base, np.diff(np.append(begins, len(sums))), axis=0)
        boxes.put(sums, offsets)
    return offsets
