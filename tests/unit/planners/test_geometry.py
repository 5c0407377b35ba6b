"""Boxes: overlaps and tilings, against dense arrays."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.planners import geometry
from dcp_engine.planners.geometry import TilingFault, as_boxes, check_tiling, intersect, run_boxes

Boxes = tuple[list[list[int]], list[list[int]]]


@st.composite
def shapes(draw: st.DrawFn, low: int = 0) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(low, 5), min_size=0, max_size=3)))


def some_boxes(draw: st.DrawFn, shape: tuple[int, ...], at_most: int = 6) -> Boxes:
    offsets, sizes = [], []
    for _ in range(draw(st.integers(0, at_most))):
        begins = [draw(st.integers(0, size)) for size in shape]
        offsets.append(begins)
        sizes.append([draw(st.integers(0, size - begin)) for size, begin in zip(shape, begins, strict=True)])
    return offsets, sizes


def cut_apart(rng: random.Random, offsets: list[int], sizes: list[int], depth: int) -> list[tuple[list[int], list[int]]]:
    """A random tiling of a box, guillotine fashion: as irregular as such can be."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if depth == 0 or not dims:
        return [(offsets, sizes)]
    dim = rng.choice(dims)
    at = rng.randrange(1, sizes[dim])
    first, second, rest = list(sizes), list(sizes), list(offsets)
    first[dim], second[dim], rest[dim] = at, sizes[dim] - at, offsets[dim] + at
    return cut_apart(rng, offsets, first, depth - 1) + cut_apart(rng, rest, second, depth - 1)


def cover(shape: tuple[int, ...], offsets: list[list[int]], sizes: list[list[int]]) -> np.ndarray[Any, Any]:
    count = np.zeros(shape, dtype=int)
    for begin, extent in zip(offsets, sizes, strict=True):
        count[tuple(slice(b, b + e) for b, e in zip(begin, extent, strict=True))] += 1
    return count


def fault_of(shape: tuple[int, ...], offsets: list[list[int]], sizes: list[list[int]]) -> TilingFault | None:
    return check_tiling(shape, as_boxes(offsets, len(shape)), as_boxes(sizes, len(shape)))


@settings(deadline=None)
@given(st.data())
def test_tiling_is_what_a_dense_count_says(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    offsets, sizes = some_boxes(data.draw, shape)
    count = cover(shape, offsets, sizes)
    fault = fault_of(shape, offsets, sizes)
    assert (fault is None) == bool((count == 1).all())
    if fault is not None:
        place = count[tuple(slice(b, b + e) for b, e in zip(fault.offsets, fault.sizes, strict=True))]
        assert place.size > 0
        assert (place == 0).all() if fault.kind == "hole" else (place >= 2).all()
        for number in fault.boxes:
            for dim in range(len(shape)):
                assert offsets[number][dim] <= fault.offsets[dim]
                assert fault.offsets[dim] + fault.sizes[dim] <= offsets[number][dim] + sizes[number][dim]


@settings(deadline=None)
@given(shapes(low=1), st.integers(0, 2**32), st.integers(0, 6))
def test_irregular_tilings_pass_and_their_faults_do_not(shape: tuple[int, ...], seed: int, depth: int) -> None:
    rng = random.Random(seed)
    boxes = cut_apart(rng, [0] * len(shape), list(shape), depth)
    rng.shuffle(boxes)
    offsets, sizes = [box[0] for box in boxes], [box[1] for box in boxes]
    assert fault_of(shape, offsets, sizes) is None
    lost = rng.randrange(len(boxes))
    hole = fault_of(shape, offsets[:lost] + offsets[lost + 1 :], sizes[:lost] + sizes[lost + 1 :])
    assert hole is not None
    assert hole.kind == "hole"
    twice = fault_of(shape, [*offsets, offsets[lost]], [*sizes, sizes[lost]])
    assert twice is not None
    assert (twice.kind, set(twice.boxes)) == ("overlap", {lost, len(boxes)})


def test_a_hole_and_an_overlap_of_one_size_are_not_taken_for_a_tiling() -> None:
    fault = check_tiling((4,), [[0], [1]], [[2], [2]])
    assert fault == TilingFault("overlap", (1,), (1,), (0, 1))


def test_boxes_outside_are_named() -> None:
    assert check_tiling((4, 4), [[0, 0], [2, 0]], [[2, 4], [3, 4]]) == TilingFault("out_of_bounds", (2, 0), (3, 4), (1,))
    assert check_tiling((4,), [[-1]], [[5]]) == TilingFault("out_of_bounds", (-1,), (5,), (0,))
    assert check_tiling((4,), [[2]], [[-2]]) == TilingFault("out_of_bounds", (2,), (-2,), (0,))


def test_empty_boxes_are_ignored_wherever_they_lie() -> None:
    assert check_tiling((4,), [[0], [0], [2], [4], [99]], [[2], [0], [2], [0], [0]]) is None
    assert check_tiling((0, 5), [[0, 0]], [[0, 5]]) is None
    assert check_tiling((0, 5), np.zeros((0, 2)), np.zeros((0, 2))) is None


def test_a_tensor_without_dimensions_is_one_element() -> None:
    none, one, two = (np.zeros((number, 0)) for number in range(3))
    assert check_tiling((), one, one) is None
    assert check_tiling((), none, none) == TilingFault("hole", (), (), ())
    assert check_tiling((), two, two) == TilingFault("overlap", (), (), (0, 1))
    assert intersect(one, one, two, two).stored.tolist() == [0, 1]


def test_more_cut_dimensions_than_corners_are_counted_for() -> None:
    shape = (2,) * 10
    offsets = np.stack(np.meshgrid(*[[0, 1]] * 10, indexing="ij"), axis=-1).reshape(-1, 10)
    sizes = np.ones_like(offsets)
    assert check_tiling(shape, offsets, sizes) is None
    assert check_tiling(shape, offsets[1:], sizes[1:]) == TilingFault("hole", (0,) * 10, (1,) * 10, ())


def test_sizes_beyond_64_bits_do_not_overflow() -> None:
    huge = 2**40
    assert check_tiling((huge, huge), [[0, 0], [huge // 2, 0]], [[huge // 2, huge], [huge // 2, huge]]) is None


def test_1024_tensors_of_1024_shards_are_checked_exactly() -> None:
    offsets = np.stack(np.meshgrid(np.arange(32) * 4, np.arange(32) * 8, indexing="ij"), axis=-1).reshape(-1, 2)
    sizes = np.tile([4, 8], (1024, 1))
    for _ in range(1023):
        assert check_tiling((128, 256), offsets, sizes) is None
    sizes[517, 1] = 7
    assert check_tiling((128, 256), offsets, sizes) == TilingFault("hole", (64, 47), (4, 1), ())


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 4))
def test_overlaps_are_those_of_all_pairs(data: st.DataObject, few: int, at_once: int) -> None:
    shape = data.draw(shapes(low=1))
    wanted, stored = some_boxes(data.draw, shape), some_boxes(data.draw, shape)
    expected = []
    for i, (begin, extent) in enumerate(zip(*wanted, strict=True)):
        for j, (other, length) in enumerate(zip(*stored, strict=True)):
            first = [max(pair) for pair in zip(begin, other, strict=True)]
            last = [min(b + e, o + n) for b, e, o, n in zip(begin, extent, other, length, strict=True)]
            if all(f < e for f, e in zip(first, last, strict=True)):
                expected.append((i, j, first, [e - f for f, e in zip(first, last, strict=True)]))
    with pytest.MonkeyPatch.context() as patch:
        # Small limits, so that small inputs take every way through the search.
        patch.setattr(geometry, "_FEW_CANDIDATES", few)
        patch.setattr(geometry, "_CANDIDATES_PER_BOX", 0)
        patch.setattr(geometry, "_CANDIDATES_AT_ONCE", at_once)
        found = intersect(*(as_boxes(rows, len(shape)) for rows in (*wanted, *stored)))
    columns = (found.wanted, found.stored, found.offsets, found.sizes)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_resharding_200_000_rows_finds_each_neighbour_once() -> None:
    rows = np.arange(200_000)[:, None]
    found = intersect(rows * 3, np.full_like(rows, 3), rows * 2, np.full_like(rows, 2))
    assert int(found.sizes.sum()) == 400_000
    assert found.wanted.max() == 133_333


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), max_size=3), max_size=3))
def test_products_of_runs_cover_the_local_tensor_in_order(lengths: list[list[int]]) -> None:
    runs = []
    for axis in lengths:
        starts = np.cumsum([0, *axis])[:-1] * 2  # gaps between runs
        runs.append([(int(start), length) for start, length in zip(starts, axis, strict=True)])
    offsets, sizes, local = run_boxes(runs)
    assert len(offsets) == math.prod(len(axis) for axis in lengths)
    local_shape = tuple(sum(axis) for axis in lengths)
    if len(offsets):
        assert check_tiling(local_shape, local, sizes) is None
    indices = [[start + i for start, length in axis for i in range(length)] for axis in runs]
    for begin, extent, place in zip(offsets.tolist(), sizes.tolist(), local.tolist(), strict=True):
        for dim, (b, e, p) in enumerate(zip(begin, extent, place, strict=True)):
            assert indices[dim][p : p + e] == list(range(b, b + e))
