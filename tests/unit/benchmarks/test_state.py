"""States cut from values, and their comparison bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.harness import MismatchError
from benchmarks.parts import Part
from benchmarks.state import State, Values, check_same, scramble


def make_state(*values: float) -> State:
    tensor = torch.tensor(values)
    return State({"model": {"weight": tensor}}, {"model.weight": tensor})


def test_values_are_consecutive_and_begin_again_at_the_end() -> None:
    values = Values(np.arange(5, dtype=np.float32))
    assert values.take(3).tolist() == [0.0, 1.0, 2.0]
    assert values.take(9).tolist() == [3.0, 4.0, 0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 1.0]


def test_pieces_do_not_share_memory() -> None:
    values = Values(np.arange(4, dtype=np.float32))
    first = values.take(4)
    first.zero_()
    assert values.take(4).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_equal_bits_are_the_same_even_of_nan_and_zero_is_not_minus_zero() -> None:
    check_same(make_state(float("nan"), 1.0), make_state(float("nan"), 1.0))
    with pytest.raises(MismatchError, match=r"model\.weight"):
        check_same(make_state(0.0), make_state(-0.0))


def test_other_shapes_and_dtypes_differ() -> None:
    with pytest.raises(MismatchError):
        check_same(make_state(1.0), make_state(1.0, 1.0))
    tensor = torch.tensor([1.0], dtype=torch.float64)
    with pytest.raises(MismatchError):
        check_same(State({}, {"model.weight": tensor}), make_state(1.0))


def test_a_scrambled_state_differs_from_what_it_was_and_from_zeros() -> None:
    state, zeros = make_state(1.0, 2.0), make_state(0.0, 0.0)
    scramble(state)
    for other in (make_state(1.0, 2.0), zeros):
        with pytest.raises(MismatchError):
            check_same(state, other)


def test_a_part_has_the_size_of_the_whole_and_the_content_of_its_box() -> None:
    local = torch.arange(6.0).reshape(2, 3)
    part = Part.of(local, whole=torch.Size([8, 3]), offsets=torch.Size([4, 0]))
    (chunk,) = part.__create_chunk_list__()
    (item,) = part.__create_write_items__("key", part)
    assert part.size() == torch.Size([8, 3])
    assert (chunk.offsets, chunk.sizes) == (torch.Size([4, 0]), torch.Size([2, 3]))
    assert item.tensor_data is not None
    assert (item.index.fqn, item.tensor_data.size, item.tensor_data.chunk) == ("key", torch.Size([8, 3]), chunk)
    assert part.__get_tensor_shard__(item.index) is local
