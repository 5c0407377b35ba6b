"""Tables between ranks."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcp_engine.errors import CorruptCheckpointError, MalformedCheckpointError
from dcp_engine.plan_columns import compress, decompress
from dcp_engine.storage.columns import pack_column, pack_document
from dcp_engine.storage.packed_table import PackedTable
from dcp_engine.storage.table import ShardTable, TableBuilder, merge_tables
from dcp_engine.storage.table_columns import entry_document

F32, U8, OBJECT = 18, 2, 254
NUM_TENSORS = 200


def table_of(rank: int, *, last: str = "z") -> ShardTable:
    """Two chunks of one tensor, one of another, a scalar that only this rank has, and an entry without elements."""
    builder = TableBuilder()
    for number in range(3):
        builder.add_block(1 << 16, (1 << 16) - 100 - number, 2, 2**64 - 1 - 3 * rank - number)
    builder.add_chunk("w", F32, (512, 128), (256 * rank + 128, 0), (128, 128), 0, 0)
    builder.add_chunk("w", F32, (512, 128), (256 * rank, 0), (128, 128), 1, 0)
    builder.add_chunk("v", F32, (32768,), (16384 * rank,), (16384,), 2, 0)
    builder.add_block(4, 4, 0, rank)
    builder.add_chunk(f"scalar of {rank}", F32, (), (), (), 3, 0)
    builder.add_entry(last, U8, (0, 3))
    return builder.build()


def test_tables_come_back() -> None:
    for rank in range(2):
        table = table_of(rank)
        found = merge_tables([pickle.loads(pickle.dumps(PackedTable.of(table))).unpack()])[0]
        assert found.to_document() == table.to_document()
        assert found.chunk_offsets.tolist() == [256 * rank + 128, 0, 256 * rank, 0, 16384 * rank]
        assert found.block_digests.tolist() == [2**64 - 1 - 3 * rank - number for number in range(3)] + [rank]


def test_what_equal_tables_have_in_common_is_unpacked_once() -> None:
    def shard(rank: int) -> ShardTable:
        builder = TableBuilder()
        block = builder.add_block(1 << 16, 1 << 16, 0, rank)
        builder.add_chunk("w", U8, (1 << 18,), (rank << 16,), (1 << 16,), block, 0)
        return builder.build()

    known: dict[Any, Any] = {}
    first, second = (PackedTable.of(shard(rank)).unpack(known) for rank in (0, 3))
    assert first.names is second.names
    assert first.chunk_entries is second.chunk_entries
    assert (first.chunk_offsets.tolist(), second.chunk_offsets.tolist()) == ([0], [3 << 16])
    other = PackedTable.of(table_of(0)).unpack(known)
    assert other.names == ["w", "v", "scalar of 0", "z"]


def test_merging_packed_tables_is_merging_tables() -> None:
    tables = [table_of(0), table_of(1, last="y"), table_of(0, last="x")]
    known: dict[Any, Any] = {}
    merged, num_blocks, num_chunks = merge_tables([PackedTable.of(table).unpack(known) for table in tables])
    expected = merge_tables(tables)
    assert merged.names == ["w", "v", "scalar of 0", "z", "scalar of 1", "y", "x"]
    assert (num_blocks, num_chunks) == ([4, 4, 4], [4, 4, 4]) == expected[1:]
    assert merged.chunk_entries.tolist() == [0, 0, 1, 2, 0, 0, 1, 4, 0, 0, 1, 2]
    assert merged.to_document() == expected[0].to_document()


def test_a_sharded_state_takes_few_bytes_a_chunk() -> None:
    rng = random.Random(0)
    builder = TableBuilder()
    for number in range(2_000):
        block = builder.add_block(1 << 17, (1 << 17) * 5 // 6 - rng.randrange(2048), 2, rng.getrandbits(64))
        builder.add_chunk(f"model.layers.{number // 20}.projection_{number % 20}.weight", F32, (512, 512), (64, 0), (64, 512), block, 0)
    # 8 of the digest, about 1.5 of the stored length, and next to nothing of the rest.
    assert len(pickle.dumps(PackedTable.of(builder.build()))) < 14 * 2_000


def test_two_entries_of_one_name_are_refused() -> None:
    table = table_of(0)
    names = {**entry_document(table), "entry_names": b"wwscalar of 0z"}
    packed = replace(PackedTable.of(table), entries=compress(pack_document(names)))
    with pytest.raises(MalformedCheckpointError, match="two entries of one name"):
        merge_tables([packed.unpack()])


@pytest.mark.parametrize("length", [-1, 1])
def test_offsets_of_another_number_are_refused_file_by_file(length: int) -> None:
    # One file has too many, the next as many too few: together they would fit.
    packed = PackedTable.of(table_of(0))
    offsets = pack_column(np.zeros(5 + length, dtype=np.int64), "<i8")
    blocks = {"block_saved": bytes(16), "block_codecs": bytes(4), "block_digests": bytes(32)}
    own = compress(pack_document({"chunk_offsets": offsets, **blocks}))
    with pytest.raises(MalformedCheckpointError, match="chunk_offsets"):
        replace(packed, own=own).unpack()


def test_the_layout_of_another_table_is_refused() -> None:
    one, other = PackedTable.of(table_of(0)), PackedTable.of(TableBuilder().build())
    with pytest.raises(MalformedCheckpointError, match="an entry that does not exist"):
        replace(other, layout=one.layout).unpack()


@pytest.mark.parametrize("part", ["entries", "layout", "own"])
def test_damaged_parts_raise_only_errors_of_ours(part: str) -> None:
    packed = PackedTable.of(table_of(0))
    body = decompress(getattr(packed, part))
    rng = random.Random(1)
    for _ in range(300):
        damaged = bytearray(body)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            table = merge_tables([replace(packed, **{part: compress(bytes(damaged))}).unpack()])[0]
        except CorruptCheckpointError:
            continue
        assert int(table.chunk_bytes.sum()) == int(table.block_raw_bytes.sum())
    with pytest.raises(MalformedCheckpointError, match="cannot be decompressed"):
        replace(packed, **{part: b"no frame"}).unpack()
