"""Making tables: collecting what one file holds as it is written, and putting the tables of several files together."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import PlanError
from dcp_engine.storage.digest import XXH3, DigestKind, DigestValue, digest_of_column
from dcp_engine.storage.shard_table import ShardTable
from dcp_engine.storage.table_columns import TableColumns, check_name, require, row_starts

if TYPE_CHECKING:
    from dcp_engine.storage.packed_chunks import PackedChunks

__all__ = ["ShardTable", "TableBuilder", "merge_tables"]

_I64 = npt.NDArray[np.int64]
_Chunk = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
"""Block, offset in it, entry, offsets and sizes of the box."""


class TableBuilder:
    """Collects what is written to one shard file.

    Args:
        digest: kind of the blocks' digests.
        encryption_key_id: of the key that all blocks are encrypted with; empty: none.

    Thread-safety: none.
    """

    def __init__(self, digest: DigestKind = XXH3, encryption_key_id: bytes = b"") -> None:
        self._digest = digest
        self._encryption_key_id = encryption_key_id
        self._index: dict[str, int] = {}
        self._entries: list[tuple[int, tuple[int, ...]]] = []
        self._chunks: list[_Chunk] = []
        self._packed: list[tuple[int, int, PackedChunks]] = []
        self._blocks: list[tuple[int, int, int, DigestValue]] = []

    def add_entry(self, name: str, dtype_code: int, shape: tuple[int, ...]) -> int:
        """Make an entry known; needed by itself only for entries without elements, which have no chunks.

        Returns:
            Its index.

        Raises:
            PlanError: known already, with another dtype or shape.
            LimitExceededError: its name is too long.
        """
        known = self._index.get(name)
        if known is None:
            check_name(name)
            known = self._index[name] = len(self._entries)
            self._entries.append((dtype_code, shape))
        elif self._entries[known] != (dtype_code, shape):
            _refuse_entry(name, self._entries[known], (dtype_code, shape))
        return known

    def add_block(self, raw_bytes: int, encoded_bytes: int, codec: int, digest: DigestValue) -> int:
        """Record the next block of the file.

        Args:
            raw_bytes: length before encoding.
            encoded_bytes: length after it, without padding and before encryption.
            codec: code of the codec.
            digest: of the stored bytes.

        Returns:
            Its index in the file.
        """
        self._blocks.append((raw_bytes, encoded_bytes, codec, digest))
        return len(self._blocks) - 1

    def add_chunk(
        self,
        name: str,
        dtype_code: int,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        block: int,
        block_offset: int,
    ) -> None:
        """Record a chunk, in any order. Chunks without elements must be left out.

        Args:
            name: of the entry.
            dtype_code: of the entry.
            shape: global shape of the entry.
            offsets: where the chunk begins, in elements.
            sizes: its extents, in elements.
            block: index of the block that holds its first byte; it may be added later.
            block_offset: where it begins in the raw bytes of that block.

        Raises:
            PlanError: the entry is known with another dtype or shape.
        """
        self._chunks.append((block, block_offset, self.add_entry(name, dtype_code, tuple(shape)), tuple(offsets), tuple(sizes)))

    def add_chunks(self, chunks: PackedChunks, block: int, block_offset: int) -> None:
        """Record many chunks that lie back to back in one block, as :meth:`add_chunk` does one.

        Args:
            chunks: not looked at before :meth:`build`, which raises as ``add_chunk`` would.
            block: index of the block that holds them.
            block_offset: where the first begins in the raw bytes of that block.
        """
        self._packed.append((block, block_offset, chunks))

    def build(self) -> ShardTable:
        """The table. The blocks must be just those that the chunks need.

        Raises:
            PlanError, LimitExceededError: as of :meth:`add_entry`.
        """
        names = self._names()
        packed = [chunks for _, _, chunks in self._packed]
        blocks, block_offsets, entries, offsets, sizes = self._chunk_columns()
        raw, encoded, codecs, digests = zip(*self._blocks, strict=True) if self._blocks else ((), (), (), ())
        table = ShardTable(
            names=names,
            entry_dtypes=np.repeat(
                np.array([*(code for code, _ in self._entries), *(chunks.dtype.code for chunks in packed)], dtype=np.uint8),
                [*[1] * len(self._entries), *(len(chunks.names) for chunks in packed)],
            ),
            entry_dims=np.concatenate(
                [np.array([len(shape) for _, shape in self._entries], dtype=np.uint8), *(chunks.num_dims for chunks in packed)]
            ),
            entry_shapes=np.concatenate([_flat([shape for _, shape in self._entries]), *(chunks.flat(chunks.shapes) for chunks in packed)]),
            chunk_entries=entries,
            chunk_offsets=offsets,
            chunk_sizes=sizes,
            chunk_begins=block_offsets == 0,
            block_codecs=np.array(codecs, dtype=np.uint8),
            block_saved_bytes=np.array(raw, dtype=np.int64) - np.array(encoded, dtype=np.int64),
            block_digests=self._digest.column(digests),
            encryption_key_id=self._encryption_key_id,
        )
        assert table.block_raw_bytes.tolist() == list(raw), "blocks were recorded with other lengths than their chunks have"
        assert np.array_equal(table.chunk_first_block, blocks), "chunks were recorded in other blocks"
        assert np.array_equal(table.chunk_block_offset, block_offsets), "chunks were recorded at other offsets"
        return table

    def _names(self) -> list[str]:
        """All entries: those that were added one by one, and then those of packed chunks, whose names are looked at only here."""
        names = [*self._index, *itertools.chain.from_iterable(chunks.names for _, _, chunks in self._packed)]
        if self._packed and len(set(names)) < len(names):
            # An entry in several chunks of one file: each has to be looked up by its name.
            for chunk in itertools.chain.from_iterable(chunks.one_by_one(block, start) for block, start, chunks in self._packed):
                self.add_chunk(*chunk)
            self._packed.clear()
            return list(self._index)
        for name in itertools.islice(names, len(self._index), None):
            check_name(name)
        return names

    def _chunk_columns(self) -> list[_I64]:
        """Block, offset in it and entry of each chunk, in the order of the file; offsets and sizes of their boxes, flat."""
        loose = sorted(self._chunks)
        packed = []
        first = len(self._entries)
        for block, start, chunks in self._packed:
            entries = np.arange(first, first + len(chunks.names))
            columns = (np.full(len(entries), block), start + chunks.starts, entries, chunks.flat(chunks.offsets), chunks.flat(chunks.sizes))
            packed.append(((block, start), columns))
            first += len(entries)
        parts: list[Sequence[_I64]] = []
        done = 0
        for place, columns in sorted(packed, key=itemgetter(0)):
            stop = bisect_left(loose, place)
            parts += [_columns_of(loose[done:stop]), columns]
            done = stop
        parts.append(_columns_of(loose[done:]))
        return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _columns_of(chunks: Sequence[_Chunk]) -> Sequence[_I64]:
    blocks, block_offsets, entries, offsets, sizes = zip(*chunks, strict=True) if chunks else ((), (), (), (), ())
    return (*(np.array(column, dtype=np.int64) for column in (blocks, block_offsets, entries)), _flat(offsets), _flat(sizes))


def _flat(rows: Sequence[Sequence[int]]) -> _I64:
    return np.array([value for row in rows for value in row], dtype=np.int64)


def _refuse_entry(name: str, known: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]]) -> None:
    raise PlanError(
        "a key was written with two dtypes or shapes",
        tensor=name,
        expected=f"dtype code {known[0]}, shape {known[1]}",
        found=f"dtype code {other[0]}, shape {other[1]}",
        remedy="all ranks must hold the same global tensor under one key",
    )


def merge_tables(tables: Sequence[TableColumns]) -> tuple[ShardTable, list[int], list[int]]:
    """Put the tables of several files together: entries by name, chunks and blocks one file after the other.

    Args:
        tables: of the files. Those that share their columns of entries, or of ``chunk_entries``, with others are looked at once.

    Returns:
        The table of all files, the number of blocks of each file, and the number of chunks of each.

    Raises:
        PlanError: files disagree about an entry's dtype or shape.
        MalformedCheckpointError, LimitExceededError: the tables are not of files, or not of one checkpoint; where they are of
            :class:`ShardTable`, only the latter.
    """
    if not tables:
        return TableBuilder().build(), [], []
    distinct = {_entries_of(table): table for table in tables}
    index: dict[str, int] = {}
    ids: dict[tuple[int, ...], _I64] = {}
    for key, table in distinct.items():
        ids[key] = np.array([index.setdefault(name, len(index)) for name in table.names], dtype=np.int64)
        require(len(np.unique(ids[key])) == len(ids[key]), "two entries of one name")
    owners: dict[tuple[int, ...], _I64] = {}
    for table in tables:
        if (place := (*_entries_of(table), id(table.chunk_entries))) not in owners:
            owners[place] = ids[_entries_of(table)][table.chunk_entries]
    digests, key_id = _united_protection(tables)
    merged = ShardTable(
        names=list(index),
        **_united_entries(list(index), list(distinct.values()), np.concatenate(list(ids.values()))),
        chunk_entries=np.concatenate([owners[(*_entries_of(table), id(table.chunk_entries))] for table in tables]),
        chunk_offsets=np.concatenate([table.chunk_offsets for table in tables]),
        chunk_sizes=np.concatenate([table.chunk_sizes for table in tables]),
        chunk_begins=np.concatenate([table.chunk_begins for table in tables]),
        block_codecs=np.concatenate([table.block_codecs for table in tables]),
        block_saved_bytes=np.concatenate([table.block_saved_bytes for table in tables]),
        block_digests=digests,
        encryption_key_id=key_id,
    )
    return merged, [len(table.block_codecs) for table in tables], [len(table.chunk_entries) for table in tables]


def _united_protection(tables: Sequence[TableColumns]) -> tuple[npt.NDArray[Any], bytes]:
    """The digests of all blocks, and the key that they are encrypted with; tables without blocks have no say.

    Raises:
        PlanError: ranks were given different kinds of digests, or different keys.
    """
    filled = [table for table in tables if len(table.block_codecs)] or tables[:1]
    found = {(digest_of_column(table.block_digests).name, table.encryption_key_id) for table in filled}
    if len(found) > 1:
        described = [f"{name} digests, {f'encryption key {key_id.hex()}' if key_id else 'not encrypted'}" for name, key_id in sorted(found)]
        raise PlanError(
            "ranks protect their blocks in different ways",
            expected="one kind of digest and one encryption key",
            found="; ".join(described),
            remedy="pass the same digest, signing_key and encryption_key on every rank",
        )
    return np.concatenate([table.block_digests for table in filled]), filled[0].encryption_key_id


def _entries_of(table: TableColumns) -> tuple[int, ...]:
    """Tells whether two tables share all that they say of entries. Good as long as both tables are there."""
    return id(table.names), id(table.entry_dtypes), id(table.entry_dims), id(table.entry_shapes)


def _united_entries(names: Sequence[str], tables: Sequence[TableColumns], owners: _I64) -> dict[str, npt.NDArray[Any]]:
    """What the tables say of entries, each entry once.

    Args:
        names: of all entries.
        tables: each with columns of its own.
        owners: index in ``names`` of each entry of the first table, then of the second, and so on.
    """
    dtypes = np.concatenate([table.entry_dtypes for table in tables])
    dims = np.concatenate([table.entry_dims for table in tables])
    shapes = np.concatenate([table.entry_shapes for table in tables])
    starts = row_starts(dims)
    firsts = np.empty(len(names), dtype=np.int64)
    # Of repeated indices the last assignment stays, so go backwards.
    firsts[owners[::-1]] = np.arange(len(owners))[::-1]
    model = firsts[owners]
    same = (dtypes == dtypes[model]) & (dims == dims[model])
    if same.all():
        within = np.arange(len(shapes)) - np.repeat(starts[:-1], dims)
        differs = shapes != shapes[np.repeat(starts[model], dims) + within]
        same[np.repeat(np.arange(len(owners)), dims)[differs]] = False
    if not same.all():
        row = int(np.flatnonzero(~same)[0])
        first = int(model[row])
        described = [(int(dtypes[at]), tuple(shapes[starts[at] : starts[at + 1]].tolist())) for at in (first, row)]
        _refuse_entry(names[owners[row]], described[0], described[1])
    is_first = np.zeros(len(owners), dtype=np.bool_)
    is_first[firsts] = True
    return {"entry_dtypes": dtypes[firsts], "entry_dims": dims[firsts], "entry_shapes": shapes[np.repeat(is_first, dims)]}
