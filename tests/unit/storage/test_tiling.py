from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.storage.tiling import tiled

Box = tuple[tuple[int, ...], tuple[int, ...]]


def check(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    dims = len(shape)
    offsets = np.array([box[0] for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
    sizes = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
    shapes = np.array([shape], dtype=np.int64).reshape(1, dims)
    return bool(tiled(shapes, np.zeros(len(boxes), dtype=np.int64), offsets, sizes)[0])


def dense(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """The reference: count how often each element is covered."""
    cover = np.zeros(shape, dtype=np.int64)
    for offsets, sizes in boxes:
        if any(o < 0 or s < 1 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return False
        cover[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((cover == 1).all()) and (bool(boxes) or cover.size == 0)


@st.composite
def split_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it, made by cutting again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[index]
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, sizes[dim] - 1))
        boxes[index] = (offsets, (*sizes[:dim], cut, *sizes[dim + 1 :]))
        boxes.append(
            ((*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :]), (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])),
        )
    return shape, draw(st.permutations(boxes))


@settings(max_examples=100, deadline=None)
@given(split_boxes())
def test_every_cutting_is_a_tiling(case: tuple[tuple[int, ...], list[Box]]) -> None:
    assert check(*case)


@settings(max_examples=300, deadline=None)
@given(split_boxes(), st.data())
def test_changed_tilings_agree_with_the_dense_reference(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = case[0], list(case[1])
    for _ in range(data.draw(st.integers(1, 2))):
        if not boxes:
            break
        index = data.draw(st.integers(0, len(boxes) - 1))
        action = data.draw(st.sampled_from(["drop", "repeat", "move", "resize"]))
        offsets, sizes = boxes[index]
        if action == "drop":
            del boxes[index]
        elif action == "repeat" or not shape:
            boxes.append(boxes[index])
        else:
            dim, by = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.sampled_from([-1, 1]))
            moved = [*(offsets if action == "move" else sizes)]
            moved[dim] += by
            boxes[index] = (tuple(moved), sizes) if action == "move" else (offsets, tuple(moved))
    assert check(shape, boxes) == dense(shape, boxes)


def test_an_overlap_and_a_hole_of_one_volume_are_found() -> None:
    assert not check((4,), [((0,), (2,)), ((1,), (2,))])
    assert not check((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 1), (2, 2))])


def test_tilings_that_no_cut_makes_are_accepted() -> None:
    # The pinwheel: no line crosses it from side to side.
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert check((3, 3), pinwheel)
    assert not check((3, 3), pinwheel[:-1])


def test_shapes_without_elements_have_no_boxes() -> None:
    assert check((0,), [])
    assert check((3, 0), [])
    assert not check((3, 0), [((0, 0), (3, 0))])
    assert not check((3,), [])


def test_scalars_have_one_box() -> None:
    assert check((), [((), ())])
    assert not check((), [])
    assert not check((), [((), ()), ((), ())])


@pytest.mark.parametrize("offset", [-1, 1, 2**62, -(2**63), 2**63 - 1])
def test_extreme_offsets_do_not_overflow(offset: int) -> None:
    assert not check((8,), [((offset,), (4,)), ((4,), (4,))])
    assert not check((2**62,), [((0,), (2**62,)), ((offset,), (2**63 - 1,))])


def test_each_shape_is_judged_by_its_own_boxes() -> None:
    shapes = np.array([[4], [4], [6], [0], [2]], dtype=np.int64)
    owners = np.array([2, 0, 2, 1, 1, 0])
    offsets = np.array([[3], [2], [0], [0], [1], [0]], dtype=np.int64)
    sizes = np.array([[3], [2], [3], [2], [2], [2]], dtype=np.int64)
    assert tiled(shapes, owners, offsets, sizes).tolist() == [True, False, True, True, False]


def test_a_million_boxes_of_one_shape_in_any_order() -> None:
    grid = np.array(list(itertools.product(range(100), range(100), range(100))), dtype=np.int64) * [2, 3, 4]
    sizes = np.broadcast_to(np.array([2, 3, 4], dtype=np.int64), grid.shape)
    shapes = np.array([[200, 300, 400]], dtype=np.int64)
    owners = np.zeros(len(grid), dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(grid))
    assert tiled(shapes, owners, grid[order], sizes).all()
    grid[123_456, 2] += 1
    assert not tiled(shapes, owners, grid, sizes).any()


ROWS: list[Box] = [((0, 0), (2, 4)), ((2, 0), (3, 4)), ((5, 0), (1, 4))]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rows_tile_in_any_order(order: tuple[int, ...]) -> None:
    assert check((6, 4), [ROWS[place] for place in order])
    assert check((4, 6), [(box[0][::-1], box[1][::-1]) for box in (ROWS[place] for place in order)])


@pytest.mark.parametrize(
    "boxes",
    [
        ROWS[:2],
        ROWS[1:],
        [ROWS[0], ROWS[2]],
        [*ROWS, ROWS[1]],
        [*ROWS, ((0, 0), (6, 4))],
        [((0, 0), (6, 4)), ((0, 0), (6, 4))],
        [((0, 0), (3, 4)), ((2, 0), (4, 4))],
        # Half of it cut in one dimension, half in the other, each half as long as the shape.
        [((0, 0), (3, 4)), ((0, 2), (6, 2))],
        # Sums that wrap around 64 bits on their way to the right end.
        [((0, 0), (2**62, 4)), ((2**62, 0), (2**62, 4)), ((-(2**63), 0), (2**62, 4)), ((-(2**62), 0), (2**62, 4)), ((0, 0), (6, 4))],
        [((0, 0), (-6, 4)), ((-6, 0), (12, 4))],
    ],
    ids=["no end", "no begin", "hole", "twice", "and all", "all twice", "overlap", "across", "wrapping", "negative"],
)
def test_rows_that_do_not_follow_each_other_are_refused(boxes: list[Box]) -> None:
    assert not check((6, 4), boxes)


def test_shapes_are_judged_apart_whatever_the_order_of_their_boxes() -> None:
    shapes = np.array([[4, 2], [4, 2], [0, 2], [4, 4], [4, 2]])
    boxes = [
        (3, (0, 0), (2, 2)), (1, (2, 0), (2, 2)), (0, (0, 0), (2, 2)), (3, (2, 2), (2, 2)), (0, (2, 0), (2, 2)),
        (1, (0, 0), (1, 2)), (3, (0, 2), (2, 2)), (3, (2, 0), (2, 2)),
    ]  # fmt: skip
    owners, offsets, sizes = (np.array(column, dtype=np.int64) for column in zip(*boxes, strict=True))
    assert tiled(shapes, owners, offsets, sizes).tolist() == [True, False, True, True, False]
