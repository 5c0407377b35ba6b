from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dcp_engine.errors import LimitExceededError, PlanError
from dcp_engine.storage import dtypes
from dcp_engine.storage.packed_chunks import PackedChunks
from dcp_engine.storage.table import TableBuilder

FLOATS = dtypes.of_tensor_dtype(torch.float32)


def packed(names: list[str], boxes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], **changes: Any) -> PackedChunks:
    """Chunks of floats by shape, offsets and sizes, without any memory behind them."""
    width = max(len(shape) for shape, _, _ in boxes)

    def column(which: int) -> np.ndarray:
        return np.array([[*box[which], *[1] * (width - len(box[which]))] for box in boxes], dtype=np.int64).reshape(len(boxes), width)

    num_bytes = np.array([4 * int(np.prod(sizes)) for _, _, sizes in boxes])
    dims = np.array([len(shape) for shape, _, _ in boxes], dtype=np.uint8)
    return PackedChunks(names, FLOATS, dims, column(0), column(1), column(2), num_bytes, np.zeros(len(boxes), dtype=np.int64), ())


SCALAR: Any = ((), (), ())
PAIR: Any = ((2,), (0,), (2,))
MATRIX: Any = ((2, 3), (0, 0), (2, 3))


def test_columns_give_the_table_that_single_chunks_give() -> None:
    columns, single = TableBuilder(), TableBuilder()
    chunks = packed(["a", "b", "c"], [SCALAR, MATRIX, PAIR])
    for builder in (columns, single):
        builder.add_block(4 + 8 + 4 + 24 + 8, 48, 0, 17)
        builder.add_chunk("first", FLOATS.code, (1,), (0,), (1,), 0, 0)
    chunks.record(columns, 0, 4)
    for name, box, start in (("a", SCALAR, 4), ("b", MATRIX, 8), ("c", PAIR, 32)):
        single.add_chunk(name, FLOATS.code, *box, 0, start)
    for builder in (columns, single):
        builder.add_chunk("last", FLOATS.code, (2,), (0,), (2,), 0, 40)
    found = columns.build()
    assert sorted(found.chunks()) == sorted(single.build().chunks())
    assert [name for name, *_ in found.chunks()] == ["first", "a", "b", "c", "last"]
    assert found.chunk_block_offset.tolist() == [0, 4, 8, 32, 40]
    assert found.shape(found.names.index("b")) == (2, 3)


def test_an_entry_in_several_chunks_of_a_file_is_one_entry() -> None:
    builder = TableBuilder()
    builder.add_block(16, 16, 0, 1)
    packed(["a", "a"], [((4,), (0,), (2,)), ((4,), (2,), (2,))]).record(builder, 0, 0)
    table = builder.build()
    assert table.names == ["a"]
    assert list(table.chunks()) == [("a", FLOATS.code, (0,), (2,)), ("a", FLOATS.code, (2,), (2,))]


def test_an_entry_of_two_shapes_is_refused() -> None:
    builder = TableBuilder()
    builder.add_block(16, 16, 0, 1)
    packed(["a", "a"], [((4,), (0,), (2,)), ((5,), (2,), (2,))]).record(builder, 0, 0)
    with pytest.raises(PlanError) as caught:
        builder.build()
    assert caught.value.tensor == "a"


def test_a_name_that_is_too_long_is_refused() -> None:
    builder = TableBuilder()
    builder.add_block(4, 4, 0, 1)
    packed(["a" * 5000], [SCALAR]).record(builder, 0, 0)
    with pytest.raises(LimitExceededError):
        builder.build()


def test_the_bytes_of_all_are_back_to_back() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.tensor([[4.0, 5.0, 6.0]])]
    chunks = PackedChunks(
        ["a", "b", "c"],
        FLOATS,
        np.array([1, 0, 2], dtype=np.uint8),
        *(np.ones((3, 2), dtype=np.int64) for _ in range(3)),
        np.array([8, 4, 12]),
        np.array([value.data_ptr() for value in values]),
        values,
    )
    assert chunks.nbytes == 24
    assert chunks.name == "a"
    assert chunks.load().view(np.float32).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
