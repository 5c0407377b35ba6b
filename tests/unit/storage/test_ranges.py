"""Row-major ranges against dense arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_engine.storage.ranges import (
    Box,
    blocks_of_box,
    collapse,
    group_adjacent,
    grouped_by_size,
    intersect,
    range_to_boxes,
    row_major_strides,
)

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], *, allow_empty: bool = False) -> Box:
    offsets, sizes = [], []
    for extent in shape:
        begin = draw(st.integers(0, extent - 1))
        offsets.append(begin)
        sizes.append(draw(st.integers(0 if allow_empty else 1, extent - begin)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def shape_and_box(draw: st.DrawFn, *, allow_empty: bool = False) -> tuple[tuple[int, ...], Box]:
    shape = draw(SHAPES)
    return shape, draw(boxes_in(shape, allow_empty=allow_empty))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    dense = np.arange(total).reshape(shape)
    boxes = range_to_boxes(shape, start, stop)
    elements = [value for box in boxes for value in dense[slices(box)].reshape(-1).tolist()]
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_boxes_of_known_ranges() -> None:
    assert range_to_boxes((3, 4), 2, 11) == [Box((0, 2), (1, 2)), Box((1, 0), (1, 4)), Box((2, 0), (1, 3))]
    assert range_to_boxes((3, 4), 0, 12) == [Box((0, 0), (3, 4))]
    assert range_to_boxes((), 0, 1) == [Box((), ())]
    assert range_to_boxes((), 0, 0) == []


def test_strides_are_those_of_numpy() -> None:
    assert row_major_strides((3, 4, 5)) == (20, 5, 1)
    assert row_major_strides(()) == ()


@given(st.data())
def test_intersection_is_that_of_the_dense_masks(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a = data.draw(boxes_in(shape, allow_empty=True))
    b = data.draw(boxes_in(shape, allow_empty=True))
    in_a, in_b = np.zeros(shape, bool), np.zeros(shape, bool)
    in_a[slices(a)] = True
    in_b[slices(b)] = True
    common = np.zeros(shape, bool)
    found = intersect(a, b)
    if found is not None:
        assert 0 not in found.sizes
        common[slices(found)] = True
    assert (common == (in_a & in_b)).all()


@given(shape_and_box(allow_empty=True), st.sampled_from([1, 2, 4]), st.integers(1, 9))
@example(((4, 1, 6), Box((0, 0, 0), (4, 1, 1))), 1, 3)
def test_touched_blocks_are_those_of_the_dense_mask(case: tuple[tuple[int, ...], Box], itemsize: int, block_items: int) -> None:
    shape, box = case
    mask = np.zeros(shape, bool)
    mask[slices(box)] = True
    expected = sorted({int(element) // block_items for element in np.flatnonzero(mask.reshape(-1))})
    assert blocks_of_box(shape, box, itemsize, block_items * itemsize).tolist() == expected


def test_rows_longer_than_a_block_leave_blocks_out() -> None:
    # Two rows of four blocks each; the box is the second block's share of each row.
    assert blocks_of_box((2, 4096), Box((0, 1024), (2, 1024)), 4, 4096).tolist() == [1, 5]


def test_blocks_of_a_column_of_a_huge_chunk_take_no_memory_per_row() -> None:
    assert len(blocks_of_box((2**40, 8), Box((0, 3), (2**40, 1)), 4, 2**32)) == 2**13


@st.composite
def targets(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, np.ndarray]:
    """A box of a chunk and a target for it, which is a box of a larger array, perhaps with its dimensions permuted in memory."""
    shape, box = draw(shape_and_box())
    order = draw(st.permutations(range(len(shape))))
    outer = [size + draw(st.integers(0, 2)) for size in box.sizes]
    memory = np.full([outer[dim] for dim in order], -1, np.int32)
    array = memory.transpose(np.argsort(order)) if shape else memory
    begin = [draw(st.integers(0, big - size)) for big, size in zip(outer, box.sizes, strict=True)]
    return shape, box, array[(..., *slices(Box(tuple(begin), box.sizes)))]


@given(targets())
def test_collapsing_keeps_every_element_in_its_place(case: tuple[tuple[int, ...], Box, np.ndarray]) -> None:
    shape, box, target = case
    chunk = np.arange(math.prod(shape), dtype=np.int32)
    flat = collapse(shape, box, target.strides)
    view = np.lib.stride_tricks.as_strided(target, flat.sizes, flat.strides)
    view[...] = chunk.reshape(flat.chunk_sizes)[slices(Box(flat.offsets, flat.sizes))]
    assert (target == chunk.reshape(shape)[slices(box)]).all()
    assert len(flat.sizes) >= 1


@pytest.mark.parametrize(
    ("shape", "box", "target", "dims"),
    [
        ((4, 5, 6), Box((0, 0, 0), (4, 5, 6)), np.empty((4, 5, 6), np.int32), 1),
        ((4, 5, 6), Box((1, 0, 0), (2, 5, 6)), np.empty((2, 5, 6), np.int32), 1),
        ((4, 5, 6), Box((1, 2, 0), (1, 2, 6)), np.empty((1, 2, 6), np.int32), 1),
        ((4, 5, 6), Box((0, 0, 0), (4, 5, 6)), np.empty((4, 7, 6), np.int32)[:, :5], 2),
        ((4, 5, 6), Box((0, 0, 1), (4, 5, 2)), np.empty((4, 5, 2), np.int32), 2),
        ((4, 1), Box((0, 0), (4, 1)), np.empty((4, 3), np.int32)[:, :1], 1),
        ((), Box((), ()), np.empty((), np.int32), 1),
    ],
)
def test_what_is_contiguous_on_both_sides_is_one_dimension(shape: tuple[int, ...], box: Box, target: np.ndarray, dims: int) -> None:
    assert len(collapse(shape, box, target.strides).sizes) == dims


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=12), st.integers(1, 12))
def test_groups_hold_adjacent_ranges_up_to_the_bound(gaps_and_lengths: list[tuple[int, int]], max_bytes: int) -> None:
    starts, at = [], 0
    for gap, length in gaps_and_lengths:
        starts.append(at + gap)
        at += gap + length
    lengths = [length for _, length in gaps_and_lengths]
    groups = group_adjacent(starts, lengths, max_bytes)
    assert [index for first, last in groups for index in range(first, last)] == list(range(len(starts)))
    for first, last in groups:
        assert sum(lengths[first:last]) == starts[last - 1] + lengths[last - 1] - starts[first]
        assert last - first == 1 or sum(lengths[first:last]) <= max_bytes
    for (first, last), (_, end) in itertools.pairwise(groups):
        adjacent = starts[last] == starts[last - 1] + lengths[last - 1]
        assert not adjacent or sum(lengths[first:last]) + lengths[last] > max_bytes
        assert end > last


def test_small_neighbours_are_grouped_up_to_the_bound_and_large_ones_stay_alone() -> None:
    assert list(grouped_by_size([3, 4, 5, 20, 1, 9, 1], int, 10)) == [[3, 4], [5], [20], [1, 9], [1]]
    assert list(grouped_by_size([], int, 10)) == []
