from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.errors import CorruptCheckpointError, LimitExceededError, MalformedCheckpointError, PlanError
from dcp_engine.storage.columns import pack_column, pack_document
from dcp_engine.storage.envelope import MANIFEST_MAGIC, pack_record
from dcp_engine.storage.limits import BLOCK_BYTES, MAX_NAME_BYTES, PACK_BYTES
from dcp_engine.storage.table import ShardTable, TableBuilder, merge_tables

F32, U8, OBJECT, OPAQUE = 18, 2, 254, 255
COLUMNS = {
    "entry_dtypes": "u1",
    "entry_dims": "u1",
    "entry_shapes": "<i8",
    "chunk_entries": "<u4",
    "chunk_offsets": "<i8",
    "chunk_sizes": "<i8",
    "chunk_begins": "u1",
    "block_saved": "<u4",
    "block_codecs": "u1",
    "block_digests": "<u8",
}


def sample(rank: int = 0, world_size: int = 2) -> ShardTable:
    """A large chunk of three blocks, two packed small ones, and an object of its own."""
    builder = TableBuilder()
    rows = (2 * BLOCK_BYTES + 4096) // 4
    for stored, codec in ((100, 1), (BLOCK_BYTES, 0)):
        builder.add_block(BLOCK_BYTES, stored, codec, 5 + codec)
    builder.add_block(4096, 7, 2, 2**64 - 1)
    builder.add_chunk("w", F32, (rows * world_size,), (rows * rank,), (rows,), 0, 0)
    builder.add_block(28, 28, 0, 1)
    builder.add_chunk("m", F32, (2, 3 * world_size), (0, 3 * rank), (2, 3), 3, 4)
    builder.add_chunk(f"s{rank}", F32, (), (), (), 3, 0)
    builder.add_block(3, 3, 0, 9)
    builder.add_chunk(f"o{rank}", OBJECT, (3,), (0,), (3,), 4, 0)
    return builder.build()


def same(first: ShardTable, second: ShardTable) -> bool:
    return all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ShardTable.__dataclass_fields__ if name != "names"
    ) and (first.names == second.names)


def test_layout_follows_from_sizes() -> None:
    table = sample()
    assert table.names == ["w", "m", "s0", "o0"]
    assert table.block_raw_bytes.tolist() == [BLOCK_BYTES, BLOCK_BYTES, 4096, 28, 3]
    assert table.block_stored_bytes.tolist() == [100, BLOCK_BYTES, 7, 28, 3]
    # The chunks are in the order of their bytes, whatever order they were recorded in.
    assert [name for name, *_ in table.chunks()] == ["w", "s0", "m", "o0"]
    assert table.chunk_first_block.tolist() == [0, 3, 3, 4]
    assert table.chunk_num_blocks.tolist() == [3, 1, 1, 1]
    assert table.chunk_block_offset.tolist() == [0, 0, 4, 0]
    assert table.chunk_bytes.tolist() == [2 * BLOCK_BYTES + 4096, 4, 24, 3]
    assert table.shape(1) == (2, 6)
    assert table.box(2) == ((0, 0), (2, 3))
    assert table.box(1) == ((), ())
    assert list(table.chunks())[2] == ("m", F32, (0, 0), (2, 3))


def test_stored_columns_are_the_documented_ones() -> None:
    document = sample(rank=1).to_document()
    assert list(document) == ["entry_names", "entry_name_bytes", *COLUMNS, "encryption_key_id"]
    assert document["entry_names"] == b"wms1o1"
    assert document["chunk_begins"] == b"\1\1\0\1"
    assert document["block_saved"] == pack_column(np.array([BLOCK_BYTES - 100, 0, 4096 - 7, 0, 0]), "<u4")


def test_offsets_are_stored_relative_to_the_chunk_before() -> None:
    builder = TableBuilder()
    builder.add_block(16, 16, 0, 0)
    for index, offset in enumerate((4, 0, 12, 8)):
        builder.add_chunk("t", U8, (16,), (offset,), (4,), 0, 4 * index)
    table = builder.build()
    assert table.to_document()["chunk_offsets"] == pack_column(np.array([4, -4, 12, -4]), "<i8")
    assert ShardTable.from_msgpack(table.to_msgpack()).chunk_offsets.tolist() == [4, 0, 12, 8]


@pytest.mark.parametrize("table", [sample(), sample(1), TableBuilder().build(), merge_tables([sample(0), sample(1)])[0]])
def test_tables_come_back(table: ShardTable) -> None:
    assert same(ShardTable.from_msgpack(table.to_msgpack()), table)


def test_a_chunk_at_the_packing_limit_has_its_own_blocks() -> None:
    builder = TableBuilder()
    for nbytes in (PACK_BYTES, BLOCK_BYTES, BLOCK_BYTES + 1):
        first = builder.add_block(min(nbytes, BLOCK_BYTES), min(nbytes, BLOCK_BYTES), 0, 0)
        if nbytes > BLOCK_BYTES:
            builder.add_block(1, 1, 0, 0)
        builder.add_chunk(f"t{nbytes}", U8, (nbytes,), (0,), (nbytes,), first, 0)
    table = builder.build()
    assert table.chunk_num_blocks.tolist() == [1, 1, 2]
    assert table.block_raw_bytes.tolist() == [PACK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 1]


def test_entries_without_elements_need_no_chunk() -> None:
    builder = TableBuilder()
    builder.add_entry("empty", F32, (0, 5))
    table = ShardTable.from_msgpack(builder.build().to_msgpack())
    assert (table.names, table.shape(0), len(table.chunk_entries)) == (["empty"], (0, 5), 0)


def test_a_key_with_two_shapes_is_a_plan_error_that_names_it() -> None:
    builder = TableBuilder()
    builder.add_entry("layer.weight", F32, (4, 4))
    for dtype, shape in ((F32, (4, 5)), (U8, (4, 4))):
        with pytest.raises(PlanError) as caught:
            builder.add_entry("layer.weight", dtype, shape)
        assert caught.value.tensor == "layer.weight"


def test_a_key_that_is_too_long_is_refused_when_it_is_written() -> None:
    builder = TableBuilder()
    builder.add_entry("ä" * (MAX_NAME_BYTES // 2), F32, (0,))
    with pytest.raises(LimitExceededError):
        builder.add_entry("ä" * (MAX_NAME_BYTES // 2) + "x", F32, (0,))


def test_merging_unifies_entries_and_appends_the_rest() -> None:
    tables = [sample(rank, 3) for rank in range(3)]
    merged, num_blocks, num_chunks = merge_tables(tables)
    assert merged.names == ["w", "m", "s0", "o0", "s1", "o1", "s2", "o2"]
    assert (num_blocks, num_chunks) == ([5, 5, 5], [4, 4, 4])
    assert merged.shape(1) == (2, 9)
    assert merged.chunk_first_block.tolist() == [0, 3, 3, 4, 5, 8, 8, 9, 10, 13, 13, 14]
    assert list(merged.chunks())[8:] == list(tables[2].chunks())
    assert merged.block_raw_bytes.tolist() == tables[0].block_raw_bytes.tolist() * 3


@pytest.mark.parametrize(
    ("dtype", "shape"), [(U8, (2, 3)), (F32, (3, 2)), (F32, (2, 3, 1)), (F32, ())], ids=["dtype", "shape", "dimensions", "scalar"]
)
def test_merging_tables_that_disagree_names_the_entry(dtype: int, shape: tuple[int, ...]) -> None:
    builders = [TableBuilder(), TableBuilder()]
    builders[0].add_entry("first", F32, (1,))
    builders[0].add_entry("k", F32, (2, 3))
    builders[1].add_entry("k", dtype, shape)
    with pytest.raises(PlanError) as caught:
        merge_tables([builder.build() for builder in builders])
    assert caught.value.tensor == "k"
    assert "(2, 3)" in str(caught.value)


def test_merging_many_files_stays_small() -> None:
    # 64 ranks with 200 sharded tensors each, one block a chunk: no more than 12 bytes a block.
    rng = np.random.default_rng(0)
    tables = []
    for rank in range(64):
        builder = TableBuilder()
        for index in range(200):
            rows = 64 + index
            nbytes = rows * 512 * 4
            block = builder.add_block(nbytes, int(nbytes * rng.uniform(0.80, 0.85)), 2, int(rng.integers(2**63)) * 2 + 1)
            builder.add_chunk(f"model.layers.{index}.weight", F32, (rows * 64, 512), (rows * rank, 0), (rows, 512), block, 0)
        tables.append(builder.build())
    record, stored = pack_record(MANIFEST_MAGIC, merge_tables(tables)[0].to_msgpack())
    assert len(record + stored) <= 12 * 64 * 200


BLOCK = BLOCK_BYTES
CHANGES: dict[str, dict[str, list[int]]] = {
    "unknown dtype": {"entry_dtypes": [F32, F32, 99, OBJECT]},
    "dims beyond the limit": {"entry_dims": [65, 2, 0, 1]},
    "dims that do not add up": {"entry_dims": [1, 1, 0, 1]},
    "negative extent": {"entry_shapes": [-1, 2, 6, 3]},
    "huge extent": {"entry_shapes": [2**62, 2, 6, 3]},
    "huge product": {"entry_shapes": [2**40, 2**40, 2**40, 3]},
    "two-dimensional object": {"entry_dtypes": [F32, OPAQUE, F32, OBJECT]},
    "chunk of no entry": {"chunk_entries": [0, 2, 4, 3]},
    "chunk of another entry": {"chunk_entries": [0, 2, 0, 3]},
    "zero size": {"chunk_sizes": [2**21 + 1024, 2, 0, 3]},
    "negative size": {"chunk_sizes": [2**21 + 1024, 2, -3, 3]},
    "huge size": {"chunk_sizes": [2**62, 2, 3, 3]},
    "huge box": {"chunk_sizes": [2**21 + 1024, 2**55, 2**55, 3]},
    "more blocks needed": {"chunk_sizes": [2**24, 2, 3, 3]},
    "fewer blocks needed": {"chunk_sizes": [2**10, 2, 3, 3]},
    "first chunk begins nothing": {"chunk_begins": [0, 1, 0, 1]},
    "small chunk in a large one's block": {"chunk_begins": [1, 0, 0, 1], "block_codecs": [1, 0, 2, 0], "block_saved": [1, 0, 1, 0]},
    "dtypes mixed in a block": {"chunk_begins": [1, 1, 0, 0]},
    "mark of two": {"chunk_begins": [1, 1, 0, 2]},
    "no chunks for the blocks": {"chunk_entries": [], "chunk_offsets": [], "chunk_sizes": [], "chunk_begins": []},
    "unknown codec": {"block_codecs": [1, 0, 3, 0, 0]},
    "raw block that saves": {"block_saved": [100, 1, 4000, 0, 0]},
    "compressed block that saves nothing": {"block_saved": [0, 0, 4000, 0, 0]},
    "compressed block of nothing": {"block_saved": [BLOCK, 0, 4000, 0, 0]},
    "block that saves more than it has": {"block_saved": [BLOCK + 1, 0, 4000, 0, 0]},
    "too few digests": {"block_digests": [1, 2, 3, 4]},
}


def changed(**columns: list[int]) -> bytes:
    document: dict[str, Any] = sample().to_document()
    for name, values in columns.items():
        document[name] = pack_column(np.array(values, dtype=COLUMNS[name]), COLUMNS[name])
    return pack_document(document)


@pytest.mark.parametrize("name", CHANGES)
def test_columns_that_break_a_rule_are_refused(name: str) -> None:
    with pytest.raises((MalformedCheckpointError, LimitExceededError)):
        ShardTable.from_msgpack(changed(**CHANGES[name]))


def test_two_entries_of_one_name_are_refused() -> None:
    document: dict[str, Any] = sample().to_document()
    document["entry_names"] = b"wws0o0"
    with pytest.raises(MalformedCheckpointError, match="one name"):
        ShardTable.from_msgpack(pack_document(document))


def test_a_shared_block_beyond_the_block_size_is_refused() -> None:
    count = BLOCK // 65_535 + 1
    document: dict[str, Any] = TableBuilder().build().to_document()
    document |= {
        "entry_names": b"t",
        "entry_name_bytes": pack_column(np.array([1]), "<u4"),
        "entry_dtypes": bytes([U8]),
        "entry_dims": b"\1",
        "entry_shapes": pack_column(np.array([65_535 * count]), "<i8"),
        "chunk_entries": bytes(4 * count),
        "chunk_offsets": pack_column(np.array([0] + [65_535] * (count - 1)), "<i8"),
        "chunk_sizes": pack_column(np.full(count, 65_535), "<i8"),
        "chunk_begins": b"\1" + bytes(count - 1),
        "block_saved": bytes(4),
        "block_codecs": b"\0",
        "block_digests": bytes(8),
    }
    with pytest.raises(MalformedCheckpointError, match="too large"):
        ShardTable.from_msgpack(pack_document(document))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_mutated_columns_raise_only_errors_of_ours(data: st.DataObject) -> None:
    document: dict[str, Any] = sample().to_document()
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(list(document)))
        column = bytearray(document[name])
        action = data.draw(st.sampled_from(["set", "insert", "delete", "swap"]))
        if action == "swap":
            document[name] = document[data.draw(st.sampled_from(list(document)))]
            continue
        place = data.draw(st.integers(0, max(len(column) - 1, 0)))
        if action == "insert":
            column[place:place] = data.draw(st.binary(min_size=1, max_size=16))
        elif action == "delete":
            del column[place : place + data.draw(st.integers(1, 8))]
        elif column:
            column[place] = data.draw(st.integers(0, 255))
        document[name] = bytes(column)
    try:
        table = ShardTable.from_msgpack(pack_document(document))
    except CorruptCheckpointError:
        return
    # Whatever passes is consistent: the chunks fill the blocks exactly.
    assert int(table.chunk_bytes.sum()) == int(table.block_raw_bytes.sum())
    assert same(ShardTable.from_msgpack(table.to_msgpack()), table)
