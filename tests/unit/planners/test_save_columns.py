"""Plans made on columns are those made item by item, and what travels is small."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_engine.errors import PlanError
from dcp_engine.plan_columns import PlanColumns, PlanItems
from dcp_engine.planners.column_builder import ColumnBuilder
from dcp_engine.planners.local_shards import LocalShard, LocalTensor
from dcp_engine.planners.replicas import ReplicaPolicy
from dcp_engine.planners.save_choice import ChosenItems
from dcp_engine.planners.save_columns import ColumnPlan, plan_columns
from dcp_engine.planners.save_global import GlobalPlan, RankPlan, plan_globally
from dcp_engine.planners.save_local import LocalPlanData

Box = tuple[tuple[int, ...], tuple[int, ...]]
Held = dict[str, tuple[tuple[int, ...], list[Box]] | int]
"""What a rank holds: a tensor's global shape and boxes, or an object's size."""

SPLIT_BYTES = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def columns_of(held: Held) -> PlanColumns:
    builder = ColumnBuilder()
    for key, value in held.items():
        if isinstance(value, int):
            builder.add_object(key)
            continue
        shape, boxes = value
        shards = tuple(LocalShard(offsets, sizes, torch.empty(0)) for offsets, sizes in boxes)
        builder.add_tensor(LocalTensor(key, DTYPES[len(key) % 3], shape, shards, True, "plain"))
    columns = builder.build()
    assert columns is not None
    return columns


def data_of(held: Held, contents: Callable[[str, Box | None], int], ties: dict[str, str] | None = None) -> LocalPlanData:
    digests, sizes = [], []
    for key, value in held.items():
        boxes: Sequence[Box | None] = [None] if isinstance(value, int) else value[1]
        digests += [contents(key, box) for box in boxes]
        sizes += [value if isinstance(value, int) else 0 for _ in boxes]
    return LocalPlanData(np.array(digests, dtype=np.uint64), np.array(sizes, dtype=np.int64), ties=ties or {})


def equal_content(key: str, box: Box | None) -> int:
    return hash((key, box)) % (1 << 63) | 1


def both(ranks: Sequence[Held], ties: dict[str, str] | None = None) -> tuple[ColumnPlan | None, GlobalPlan]:
    columns = [columns_of(held) for held in ranks]
    data = [data_of(held, equal_content, ties) for held in ranks]
    plans = [RankPlan(own.items(), of) for own, of in zip(columns, data, strict=True)]
    by_items = plan_globally(plans, policy=ReplicaPolicy(), split_bytes=SPLIT_BYTES, keep_empty=False)
    return plan_columns(columns, data, split_bytes=SPLIT_BYTES), by_items


def assert_same(ranks: Sequence[Held], made: ColumnPlan | None, by_items: GlobalPlan) -> None:
    assert made is not None
    for held, choice, items in zip(ranks, made.choices, by_items.items, strict=True):
        travelled = pickle.loads(pickle.dumps(choice))
        assert travelled.of(columns_of(held)).items() == items
    described = made.described.described()
    assert isinstance(by_items.metadata, dict)
    assert set(described) == set(by_items.metadata)
    for key, entry in by_items.metadata.items():
        found = described[key]
        assert type(found) is type(entry)
        if isinstance(entry, TensorStorageMetadata) and isinstance(found, TensorStorageMetadata):
            assert (found.size, found.properties) == (entry.size, entry.properties)
            assert sorted((c.offsets, c.sizes) for c in found.chunks) == sorted((c.offsets, c.sizes) for c in entry.chunks)
    assert made.ties == by_items.ties


def cells(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    boxes: list[Box] = [((), ())]
    for extent, inner in zip(shape, cuts, strict=True):
        edges = [0, *sorted({cut for cut in inner if 0 < cut < extent}), extent]
        spans = list(itertools.pairwise(edges))
        boxes = [((*offsets, first), (*sizes, last - first)) for offsets, sizes in boxes for first, last in spans]
    return boxes


@st.composite
def clusters(draw: st.DrawFn) -> list[Held]:
    """Tensors cut into grids, some of whose cells are cut once more, each box on some ranks; objects on some ranks."""
    num_ranks = draw(st.integers(1, 5))
    ranks: list[Held] = [{} for _ in range(num_ranks)]
    holders = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    for number in range(draw(st.integers(1, 6))):
        key = "k" * (number % 3) + str(number)
        if draw(st.booleans()) and number % 3 == 0:
            for rank in draw(holders):
                ranks[rank][key] = number + 1
            continue
        shape = tuple(draw(st.lists(st.integers(0, 24), max_size=3)))
        boxes = (
            cells(shape, [draw(st.lists(st.integers(1, 23), max_size=2)) for _ in shape])
            if 0 not in shape
            else [((0,) * len(shape), shape)]
        )
        if shape and 0 not in shape and boxes[0][1][0] > 1 and draw(st.booleans()):
            offsets, sizes = boxes.pop(0)
            rest = (sizes[0] - 1, *sizes[1:])
            boxes += [(offsets, (1, *sizes[1:])), ((offsets[0] + 1, *offsets[1:]), rest)]
        for box in boxes:
            for rank in draw(holders):
                value = ranks[rank].setdefault(key, (shape, []))
                assert not isinstance(value, int)
                value[1].append(box)
    return ranks


@given(clusters())
@settings(max_examples=100, deadline=None)
def test_columns_and_items_give_one_plan(ranks: list[Held]) -> None:
    assert_same(ranks, *both(ranks))


def replicated(num_ranks: int, **tensors: tuple[int, ...]) -> list[Held]:
    return [{key: (shape, [((0,) * len(shape), shape)]) for key, shape in tensors.items()} for _ in range(num_ranks)]


def test_large_replicas_are_cut_alike() -> None:
    ranks = replicated(3, w=(400, 7), wide=(2, 900), small=(3,), scalar=(), none=(0, 4))
    made, by_items = both(ranks)
    assert_same(ranks, made, by_items)
    assert made is not None
    assert sum(len(choice.cut) for choice in made.choices) > 3


def test_ties_are_settled_alike() -> None:
    ranks = replicated(2, embed=(6, 2), heads=(6, 2), other=(6, 2))
    made, by_items = both(ranks, {"heads": "embed"})
    assert_same(ranks, made, by_items)
    assert made is not None
    assert made.ties == {"heads": "embed"}


W = (4, 4)
FAULTS: dict[str, list[Held]] = {
    "hole": [{"w": (W, [((0, 0), (2, 4))])}, {"w": (W, [((3, 0), (1, 4))])}],
    "overlap": [{"w": (W, [((0, 0), (2, 4))])}, {"w": (W, [((1, 0), (3, 4))])}],
    "one offset": [{"w": (W, [((0, 0), (2, 4))])}, {"w": (W, [((0, 0), (4, 4))])}],
    "outside": [{"w": (W, [((0, 0), (4, 4)), ((4, 0), (1, 4))])}],
    "negative": [{"w": (W, [((-1, 0), (5, 4))])}],
    "a cell missing": [{"w": (W, [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2))])}],
    "crossing": [{"w": (W, [((0, 0), (1, 4)), ((0, 1), (4, 1)), ((1, 0), (3, 1)), ((1, 2), (3, 2))])}],
    "shape": [{"w": (W, [((0, 0), W)])}, {"w": ((4, 4, 1), [((0, 0, 0), (4, 4, 1))])}],
    "kind": [{"w": (W, [((0, 0), W)])}, {"w": 7}],
    "twice on a rank": [{"w": (W, [((0, 0), W), ((0, 0), W)])}],
}


@pytest.mark.parametrize("ranks", FAULTS.values(), ids=FAULTS)
def test_whatever_is_odd_is_left_to_the_plan_by_items(ranks: list[Held]) -> None:
    assert plan_columns([columns_of(held) for held in ranks], [data_of(held, equal_content) for held in ranks], split_bytes=4) is None


def test_replicas_that_differ_or_are_none_are_left_to_the_plan_by_items() -> None:
    ranks = replicated(2, w=(3,))
    for contents in ([1, 3], [0, 0]):
        data = [data_of(held, lambda _key, _box, content=content: content) for held, content in zip(ranks, contents, strict=True)]
        assert plan_columns([columns_of(held) for held in ranks], data, split_bytes=4) is None


def test_tilings_that_are_no_grid_are_accepted() -> None:
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    ranks: list[Held] = [{"w": ((3, 3), [box])} for box in pinwheel]
    assert_same(ranks, *both(ranks))


def test_boxes_whose_first_elements_have_one_number_modulo_64_bits_are_kept_apart() -> None:
    extent = 1 << 40
    ranks: list[Held] = [{"w": ((extent, extent), [((rank * extent // 4, 0), (extent // 4, extent))])} for rank in range(4)]
    assert plan_columns([columns_of(held) for held in ranks], [data_of(held, equal_content) for held in ranks], split_bytes=4) is None


# -- what travels ----------------------------------------------------------------------------------------------------------


def test_columns_travel_unchanged_and_equal_parts_are_decoded_once() -> None:
    ranks: list[Held] = [{"ä\ud800": ((8, 3), [((2 * rank, 0), (2, 3))]), "o": 5, "s": ((), [((), ())])} for rank in range(4)]
    sent = [pickle.loads(pickle.dumps(PlanItems(columns_of(held)))) for held in ranks]
    known: dict[Any, Any] = {}
    columns = [items.columns(known) for items in sent]
    for items, own, held in zip(sent, columns, ranks, strict=True):
        assert own.same_as(columns_of(held))
        assert own.keys is columns[0].keys
        assert list(items) == columns_of(held).items()
    assert not columns[0].same_as(columns[1])


def test_items_that_somebody_changed_travel_as_they_are() -> None:
    items = PlanItems(columns_of({"w": ((2,), [((0,), (2,))])}))
    data = items[0].tensor_data
    assert data is not None
    data.properties.dtype = torch.float16
    assert items.columns() is None
    sent = pickle.loads(pickle.dumps(items))
    assert sent[0].tensor_data.properties.dtype == torch.float16
    assert sent == items


def test_a_choice_cannot_be_looked_at_before_it_meets_its_columns() -> None:
    columns = columns_of({"a": ((2,), [((0,), (2,))]), "b": 1})
    made = plan_columns([columns], [data_of({"a": ((2,), [((0,), (2,))]), "b": 1}, equal_content)], split_bytes=4)
    assert made is not None
    assert list(ChosenItems(made.choices[0], columns)) == columns.items()
    sent = pickle.loads(pickle.dumps(ChosenItems(made.choices[0], columns)))
    assert len(sent) == 2
    with pytest.raises(PlanError, match="finish_plan"):
        sent[0]
    with pytest.raises(PlanError, match="not made for"):
        sent.choice.of(columns_of({"a": 1}))


def test_a_chunk_of_a_large_plan_takes_few_bytes_and_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    num_ranks, num_tensors = 64, 500
    monkeypatch.setattr(PlanColumns, "items", lambda *_: pytest.fail("a record was made"))
    monkeypatch.setattr(PlanColumns, "described", lambda *_: pytest.fail("a record was made"))
    ranks: list[Held] = [
        {f"model.layers.{number // 10}.weight_{number % 10}": ((num_ranks, 8), [((rank, 0), (1, 8))]) for number in range(num_tensors)}
        for rank in range(num_ranks)
    ]
    sent = [pickle.dumps((PlanItems(columns_of(held)), data_of(held, lambda *_: 0))) for held in ranks]
    assert sum(map(len, sent)) <= 8 * num_ranks * num_tensors
    known: dict[Any, Any] = {}
    received = [pickle.loads(message) for message in sent]
    columns = [items.columns(known) for items, _ in received]
    assert len({id(own.keys) for own in columns}) == 1
    made = plan_columns(columns, [data for _, data in received], split_bytes=4)
    assert made is not None
    assert len(pickle.dumps(made.choices)) <= num_ranks * 400
    assert len(made.described) == num_ranks * num_tensors
    assert len(pickle.dumps(made.described)) <= 2 * num_ranks * num_tensors
