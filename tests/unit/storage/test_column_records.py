"""What was delivered against what was planned, by columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manifests import manifest_of, receipt_of

from dcp_engine.errors import PlanError
from dcp_engine.plan_columns import KeyTable, PlanColumns
from dcp_engine.storage.column_records import is_delivered
from dcp_engine.storage.dcp_records import check_delivered
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.table import TableBuilder
from dcp_engine.types import EngineMetadata, PlannerData

F32, U8, OBJECT = 18, 2, 254
KINDS: dict[int, torch.dtype | None] = {F32: torch.float32, U8: torch.uint8, OBJECT: None}

Box = tuple[tuple[int, ...], tuple[int, ...]]
State = Mapping[str, tuple[int, tuple[int, ...], Sequence[Box]]]
"""Key -> dtype code, shape, boxes. Those of an object are ``((), ())``."""

SAMPLE: State = {
    "w": (F32, (4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 6))]),
    "v": (U8, (6,), [((0,), (3,)), ((3,), (3,))]),
    "scalar": (F32, (), [((), ())]),
    "object": (OBJECT, (), [((), ())]),
    "m": (F32, (4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]),
}


def planned(state: State, order: Sequence[int] | None = None) -> PlanColumns:
    width = max(len(shape) for _, shape, _ in state.values())
    palette = (None, torch.float32, torch.uint8)
    kinds = [palette.index(KINDS[code]) for code, _, _ in state.values()]
    keys = KeyTable(
        list(state),
        palette,
        np.array(kinds, dtype=np.uint8),
        np.array([len(shape) for _, shape, _ in state.values()], dtype=np.uint8),
        np.array([[*shape, *[1] * (width - len(shape))] for _, shape, _ in state.values()], dtype=np.int64).reshape(len(state), width),
    )
    rows = [(number, box) for number, (_, _, boxes) in enumerate(state.values()) for box in boxes]
    rows = [rows[place] for place in (range(len(rows)) if order is None else order)]
    offsets = [[*box[0], *[0] * (width - len(box[0]))] for _, box in rows]
    sizes = [[*box[1], *[1] * (width - len(box[1]))] for _, box in rows]
    columns = (np.array(column, dtype=np.int64).reshape(len(rows), width) for column in (offsets, sizes))
    return PlanColumns(keys, np.array([number for number, _ in rows], dtype=np.int64), *columns)


def written(state: State, order: Sequence[int] | None = None, *, num_files: int = 2) -> Manifest:
    """Files that hold the boxes in turn, each in a block of its own."""
    rows = [(key, code, shape, box) for key, (code, shape, boxes) in state.items() for box in boxes if 0 not in box[1]]
    rows = [rows[place] for place in (range(len(rows)) if order is None else order)]
    builders = [TableBuilder() for _ in range(num_files)]
    for number, (key, code, shape, (offsets, sizes)) in enumerate(rows):
        builder = builders[number % num_files]
        nbytes = 5 if code == OBJECT else int(np.prod(sizes)) * (4 if code == F32 else 1)
        block = builder.add_block(nbytes, nbytes, 0, 0)
        boxes = ((5,), (0,), (5,)) if code == OBJECT else (shape, offsets, sizes)
        builder.add_chunk(key, code, *boxes, block, 0)
    empty = [(key, code, shape) for key, (code, shape, _) in state.items() if 0 in shape]
    receipts = [receipt_of(builder.build(), rank, num_files) for rank, builder in enumerate(builders)]
    return manifest_of(receipts, world_size=num_files, empty_entries=empty)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(10)), st.permutations(range(10)), st.integers(1, 3))
def test_what_was_planned_is_delivered_whatever_the_order(one: list[int], other: list[int], num_files: int) -> None:
    assert is_delivered(planned(SAMPLE, one), {}, written(SAMPLE, other, num_files=num_files))


def test_only_objects_or_only_scalars_are_delivered() -> None:
    for key in ("object", "scalar"):
        state = {key: SAMPLE[key]}
        assert is_delivered(planned(state), {}, written(state))


def test_empty_boxes_and_aliases_are_stored_nowhere() -> None:
    state = {**SAMPLE, "empty": (F32, (0, 3), [((0, 0), (0, 3))]), "alias": SAMPLE["w"]}
    manifest = written({key: state[key] for key in state if key != "alias"})
    assert is_delivered(planned(state), {"alias": "w"}, manifest)
    assert not is_delivered(planned(state), {}, manifest)


OTHER_ROWS = [((0, 0), (1, 6)), ((1, 0), (3, 6))]


@pytest.mark.parametrize(
    "change",
    [
        {"w": (F32, (4, 6), OTHER_ROWS)},
        {"w": (F32, (4, 6), [((0, 0), (4, 6))])},
        {"w": (F32, (4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 3))])},
        {"v": (U8, (6,), [((0,), (2,)), ((2,), (4,))])},
        {"v": (U8, (3, 2), [((0, 0), (2, 2)), ((2, 0), (1, 2))])},
        {"object": (F32, (), [((), ())])},
        {"scalar": (OBJECT, (), [((), ())])},
        {"more": (F32, (2,), [((0,), (2,))])},
        {"m": (F32, (4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (1, 2)), ((3, 2), (1, 2))])},
    ],
    ids=["rows", "whole", "columns", "uneven", "dimensions", "no object", "an object", "more", "no grid"],
)
def test_anything_else_is_not_delivered(change: State) -> None:
    for plan, files in ((SAMPLE, {**SAMPLE, **change}), ({**SAMPLE, **change}, SAMPLE)):
        assert not is_delivered(planned(plan), {}, written(files))


def test_a_key_that_was_not_written_is_missed_though_the_numbers_agree() -> None:
    state = {**SAMPLE, "other": SAMPLE["scalar"]}
    del state["scalar"]
    assert not is_delivered(planned(SAMPLE), {}, written(state))


def plan_of_w(*boxes: tuple[int, int]) -> EngineMetadata:
    """One tensor ``w`` of four elements, to be written as these boxes: offset and size."""
    keys = KeyTable(["w"], (None, torch.float32), np.array([1], np.uint8), np.array([1], np.uint8), np.array([[4]]))
    rows = np.array(boxes, dtype=np.int64)
    columns = PlanColumns(keys, np.zeros(len(boxes), dtype=np.int64), rows[:, :1], rows[:, 1:])
    return EngineMetadata(columns, planner_data=PlannerData())  # type: ignore[arg-type]


def w_written(*, beside: tuple[int, ...] | None = None) -> Manifest:
    """The tensor ``w`` as one chunk, and perhaps another tensor of this shape."""
    builder = TableBuilder()
    builder.add_block(16 if beside is None else 20, 16 if beside is None else 20, 0, 1)
    builder.add_chunk("w", F32, (4,), (0,), (4,), 0, 0)
    if beside is not None:
        builder.add_chunk("b", F32, beside, (0,) * len(beside), beside, 0, 16)
    return manifest_of([receipt_of(builder.build(), 0, 1)], world_size=1)


def test_what_was_planned_and_written_is_accepted() -> None:
    check_delivered(plan_of_w((0, 4)), w_written())


@pytest.mark.parametrize("beside", [(), (1,), (1, 1, 1)])
def test_as_many_chunks_of_another_tensor_are_not_what_was_planned(beside: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="exactly what was planned") as caught:
        check_delivered(plan_of_w((0, 2), (2, 2)), w_written(beside=beside))
    assert (caught.value.tensor, caught.value.found) == ("b", "2 missing, 2 not planned")
