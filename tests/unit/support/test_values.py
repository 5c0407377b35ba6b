"""The reference values themselves: a fault in them would hide faults everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.values import DTYPES, assert_same, box, full, same

IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_a_box_is_the_slice_of_the_whole(dtype: torch.dtype) -> None:
    whole = full("layer.weight", (7, 5, 3), dtype)
    assert same(box("layer.weight", (7, 5, 3), (2, 0, 1), (4, 5, 2), dtype), whole[2:6, :, 1:3])
    assert_same(box("layer.weight", (7, 5, 3), (2, 0, 1), (4, 5, 2), dtype), whole[2:6, :, 1:3])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=4))
def test_any_box_is_the_slice_of_the_whole(dims: list[tuple[int, int, int]]) -> None:
    shape = [sum(dim) for dim in dims]
    offsets, sizes = [before for before, _, _ in dims], [length for _, length, _ in dims]
    slices = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    assert same(box("k", shape, offsets, sizes), full("k", shape)[slices])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3, 0), (1,)], ids=str)
def test_small_and_empty_shapes_are_kept(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = full("k", shape, dtype)
    assert (value.dtype, value.shape, value.is_contiguous()) == (dtype, torch.Size(shape), True)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_keys_and_neighbours_differ(dtype: torch.dtype) -> None:
    first = full("a", (64, 64), dtype)
    assert not same(first, full("b", (64, 64), dtype))
    for step in (1, 64, 256):
        flat = first.flatten()
        assert not same(flat[:-step], flat[step:])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str)
def test_floats_are_finite(dtype: torch.dtype) -> None:
    value = full("k", (1 << 16,), dtype)
    wide = value.to(torch.complex128) if dtype.is_complex else value.to(torch.float64)
    assert bool(torch.isfinite(wide).all())


def test_values_of_wide_integers_are_unique() -> None:
    value = full("k", (1000, 1000), torch.int64)
    assert value.unique().numel() == 1_000_000


def test_one_changed_bit_is_found_and_its_index_named() -> None:
    changed = full("k", (4, 5), torch.int32)
    changed[2, 3] ^= 1
    assert not same(changed, full("k", (4, 5), torch.int32))
    with pytest.raises(AssertionError, match=r"weight: 1 of 20 elements differ, first at \(2, 3\)"):
        assert_same(changed, full("k", (4, 5), torch.int32), "weight")
