"""Items of many tensors at once, against those made tensor by tensor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_engine.errors import CorruptCheckpointError
from dcp_engine.planners import load_chunks
from dcp_engine.planners.catalogue import Entry
from dcp_engine.planners.load_chunks import items_of_tensors
from dcp_engine.planners.local_shards import LocalShard, LocalTensor
from dcp_engine.stored_chunks import StoredChunks

Box = tuple[tuple[int, ...], tuple[int, ...]]
Layout = Mapping[str, tuple[tuple[int, ...], Sequence[Box]]]
"""Key -> shape, boxes that tile it."""


def cells(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The grid that a shape is cut into at these places."""
    spans = []
    for extent, places in zip(shape, cuts, strict=True):
        bounds = sorted({0, extent, *(place for place in places if 0 < place < extent)})
        spans.append(list(itertools.pairwise(bounds)))
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]


def stored(layout: Layout, order: Sequence[int] | None = None) -> tuple[StoredChunks, dict[str, Entry]]:
    """The chunks in some order, and what the metadata says of them."""
    all_boxes = [(row, box) for row, (_, boxes) in enumerate(layout.values()) for box in boxes]
    all_boxes = [all_boxes[place] for place in (range(len(all_boxes)) if order is None else order)]
    rows = np.array([row for row, _ in all_boxes], dtype=np.int64)
    places = np.cumsum([0, *(len(box[0]) for _, box in all_boxes)])
    starts = np.cumsum([0, *np.bincount(rows, minlength=len(layout)).tolist()])
    offsets, sizes = (np.array([value for _, box in all_boxes for value in box[side]], dtype=np.int64) for side in (0, 1))
    chunks = StoredChunks({key: row for row, key in enumerate(layout)}, np.argsort(rows, kind="stable"), starts, places, offsets, sizes)
    entries = {}
    for row, (key, (shape, _)) in enumerate(layout.items()):
        own = [ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1])) for other, box in all_boxes if other == row]
        entries[key] = Entry(key, key, TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), own))
    return chunks, entries


def wanted(key: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> LocalTensor:
    shards = tuple(LocalShard(offsets, sizes, torch.empty(0)) for offsets, sizes in boxes)
    return LocalTensor(key, torch.float32, shape, shards, may_be_replicated=False, kind="duck")


def described(items: Sequence[ReadItem]) -> list[tuple[object, ...]]:
    found = []
    for item in items:
        dest, source = item.dest_index, item.storage_index
        found.append((dest.index, dest, tuple(item.dest_offsets), source.index, source, tuple(item.storage_offsets), tuple(item.lengths)))
    return found


def test_a_box_is_read_from_the_chunks_that_it_meets() -> None:
    chunks, entries = stored({"a": ((8,), cells((8,), [[4]])), "w": ((6, 4), cells((6, 4), [[2, 4], []]))})
    (items,) = items_of_tensors([(wanted("w", (6, 4), [((1, 2), (3, 2))]), entries["w"])], chunks)
    assert [(item.storage_index.index, item.storage_index.offset) for item in items] == [(0, (0, 0)), (1, (2, 0))]
    assert [(item.dest_offsets, item.storage_offsets, item.lengths) for item in items] == [
        ((0, 0), (1, 2), (1, 2)),
        ((1, 0), (0, 2), (2, 2)),
    ]
    assert {(item.dest_index.fqn, item.dest_index.offset, item.dest_index.index) for item in items} == {("w", (1, 2), 0)}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, dict[str, list[Box]], list[int]]:
    layout: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    boxes: dict[str, list[Box]] = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        grids = [cells(shape, [draw(st.lists(st.integers(1, 7), max_size=2)) for _ in shape]) for _ in range(2)]
        layout[f"t{number}"] = shape, grids[0]
        boxes[f"t{number}"] = draw(st.lists(st.sampled_from(grids[1]), unique=True, max_size=4))
    order = list(range(sum(len(own) for _, own in layout.values())))
    return layout, boxes, draw(st.permutations(order))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 4))
def test_items_are_those_made_tensor_by_tensor(case: tuple[Layout, dict[str, list[Box]], list[int]], pairs_at_once: int) -> None:
    layout, boxes, order = case
    chunks, entries = stored(layout, order)
    reads = [(wanted(key, layout[key][0], own), entries[key]) for key, own in boxes.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_chunks, "_PAIRS_AT_ONCE", pairs_at_once)
        found = items_of_tensors(reads, chunks)
    expected = items_of_tensors(reads, None)
    assert [sorted(described(items), key=repr) for items in found] == [sorted(described(items), key=repr) for items in expected]


def test_a_box_beyond_the_tensor_is_refused() -> None:
    chunks, entries = stored({"w": ((6, 4), cells((6, 4), [[2], []]))})
    with pytest.raises(CorruptCheckpointError, match="have a hole") as caught:
        items_of_tensors([(wanted("w", (6, 4), [((4, 0), (3, 4))]), entries["w"])], chunks)
    assert caught.value.tensor == "w"


def test_records_of_chunks_are_not_looked_at() -> None:
    chunks, entries = stored({"w": ((6, 4), cells((6, 4), [[2], []]))})
    blank = Entry("w", "w", TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((6, 4)), []))
    local = wanted("w", (6, 4), [((0, 0), (2, 4))])
    assert described(items_of_tensors([(local, blank)], chunks)[0]) == described(items_of_tensors([(local, entries["w"])], None)[0])


def test_a_tensor_of_many_boxes_is_planned_alone() -> None:
    shape = (200,)
    chunks, entries = stored({"w": (shape, cells(shape, [range(0, 200, 2)]))})
    local = wanted("w", shape, cells(shape, [range(200)]))
    (items,) = items_of_tensors([(local, entries["w"])], chunks)
    assert [int(item.dest_index.offset[0]) for item in items] == list(range(200))
    assert [item.storage_index.index for item in items] == [place // 2 for place in range(200)]
