"""``ReshardLoadPlanner`` through DCP's own calls: on simulated ranks against dense tensors, and once with DCP's file system storage."""

from __future__ import annotations

import io
import logging
import math
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense_reader import DenseReader, load_on_ranks
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_engine.errors import (
    CorruptCheckpointError,
    DtypeMismatchError,
    DuplicateKeyError,
    InvalidOptionError,
    KeyMismatchError,
    KindMismatchError,
    MalformedCheckpointError,
    PlanError,
    RankDisagreementError,
    ReplicaMismatchError,
    ShapeMismatchError,
    UnsupportedTensorError,
    UntrustedDataError,
    UsageError,
)
from dcp_engine.planners.load import ReshardLoadPlanner
from dcp_engine.planners.rename import strip
from dcp_engine.planners.skeleton import encode_skeleton
from dcp_engine.planners.tree import flatten
from dcp_engine.types import EngineMetadata, PlannerData

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Boxed(torch.Tensor):
    """A target of several boxes of a global tensor, by DCP's duck protocol."""

    boxes: list[Box]
    parts: list[torch.Tensor]
    whole: tuple[int, ...]

    @staticmethod
    def make(whole: Sequence[int], boxes: Sequence[Box], dtype: torch.dtype = torch.int64) -> Boxed:
        made = torch.full((), -1, dtype=dtype).as_subclass(Boxed)
        made.boxes, made.whole = list(boxes), tuple(whole)
        made.parts = [torch.full(sizes, -1, dtype=dtype) for _, sizes in boxes]
        return made

    def size(self, *args: Any) -> Any:
        return torch.Size(self.whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self.parts[index.index]


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """0, 1, 2, ... so that every element tells its place."""
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def load(reader: DenseReader, state: dict[str, Any], **options: Any) -> ReshardLoadPlanner:
    planner = ReshardLoadPlanner(**options)
    load_on_ranks(reader, [state], [planner])
    return planner


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A random division of a box by planes, some parts perhaps empty."""
    parts: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        parts.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        parts.append(((*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
    return parts


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    wanted = draw(tilings(shape))
    return shape, draw(tilings(shape)), wanted[: draw(st.integers(0, len(wanted)))]


@settings(deadline=None, max_examples=200)
@given(reshardings())
def test_any_stored_tiling_fills_any_wanted_boxes(case: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    shape, stored, wanted = case
    whole = numbers(*shape)
    target = Boxed.make(shape, wanted)
    load(DenseReader({"w": whole}, {"w": stored}), {"w": target})
    dense = whole.numpy()
    for (offsets, sizes), part in zip(wanted, target.parts, strict=True):
        expected = dense[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        np.testing.assert_array_equal(part.numpy(), expected)


@settings(deadline=None, max_examples=100)
@given(reshardings(), st.data())
def test_a_hole_in_the_stored_chunks_never_loads(case: tuple[tuple[int, ...], list[Box], list[Box]], data: st.DataObject) -> None:
    shape, stored, _ = case
    full = [box for box in stored if 0 not in box[1]]
    if not full:
        return
    stored.remove(data.draw(st.sampled_from(full)))
    with pytest.raises(CorruptCheckpointError, match="hole") as caught:
        load(DenseReader({"w": numbers(*shape)}, {"w": stored}), {"w": torch.zeros(shape, dtype=torch.int64)})
    assert caught.value.tensor == "w"


def test_overlapping_chunks_are_refused_and_equal_ones_count_once() -> None:
    whole = numbers(4)
    target = torch.zeros(4, dtype=torch.int64)
    twice = [((0,), (2,)), ((0,), (2,)), ((2,), (2,))]
    load(DenseReader({"w": whole}, {"w": twice}), {"w": target})
    assert target.tolist() == [0, 1, 2, 3]
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        load(DenseReader({"w": whole}, {"w": [((0,), (3,)), ((2,), (2,))]}), {"w": target})


def test_a_chunk_of_other_dimensions_is_refused() -> None:
    reader = DenseReader({"w": numbers(4)})
    reader.metadata.state_dict_metadata["w"].chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((4, 1)))  # type: ignore[union-attr]
    with pytest.raises(CorruptCheckpointError, match="number of dimensions"):
        load(reader, {"w": torch.zeros(4, dtype=torch.int64)})


def test_equal_boxes_become_one_item_each_with_exact_indices() -> None:
    reader = DenseReader({"a.w": numbers(4, 3)}, {"a.w": [((0, 0), (2, 3)), ((2, 0), (2, 3))]})
    planner = ReshardLoadPlanner()
    planner.set_up_planner({"a": {"w": Boxed.make((4, 3), [((2, 0), (2, 3)), ((1, 1), (1, 2))])}}, reader.metadata, True)
    first, second = planner.create_local_plan().items
    assert (first.dest_index, first.dest_index.index) == (MetadataIndex("a.w", (2, 0)), 0)
    assert (first.storage_index, first.storage_index.index) == (MetadataIndex("a.w", (2, 0)), 1)
    assert (first.dest_offsets, first.storage_offsets, first.lengths) == ((0, 0), (0, 0), (2, 3))
    assert (second.dest_index, second.dest_index.index) == (MetadataIndex("a.w", (1, 1)), 1)
    assert (second.storage_index, second.storage_index.index) == (MetadataIndex("a.w", (0, 0)), 0)
    assert (second.dest_offsets, second.storage_offsets, second.lengths) == ((0, 0), (1, 1), (1, 2))


def test_parameters_strided_views_and_scalars_are_written_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    backing = torch.zeros(4, 6)
    view = backing.t()[1:5:2]
    scalar = torch.zeros(())
    empty = torch.zeros(0, 5)
    state = {"p": parameter, "v": view, "s": scalar, "e": empty}
    stored = {"p": numbers(3, dtype=torch.float32), "v": numbers(2, 4, dtype=torch.float32), "s": torch.tensor(7.0), "e": torch.zeros(0, 5)}
    planner = load(DenseReader(stored), state)
    assert parameter.tolist() == [0, 1, 2]
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert backing.t()[1].tolist() == [0, 1, 2, 3]
    assert backing.t()[3].tolist() == [4, 5, 6, 7]
    assert backing.sum() == 28
    assert scalar.item() == 7
    assert state["p"] is parameter
    assert planner.report.num_tensor_bytes == 4 * (3 + 8 + 1)


def test_many_threads_may_resolve_and_commit() -> None:
    values = {f"k{i}": numbers(6, 5) + i for i in range(40)}
    tiles = {key: [((r, 0), (1, 5)) for r in range(6)] for key in values}
    state: dict[str, Any] = {key: torch.zeros(6, 5, dtype=torch.float64) for key in values}
    floats = {key: value.to(torch.float32) for key, value in values.items()}
    planner = ReshardLoadPlanner(dtype="cast")
    load_on_ranks(DenseReader(floats, tiles), [state], [planner], num_threads=8)
    for key, value in values.items():
        assert torch.equal(state[key], value.to(torch.float64))
    assert planner._load.staged == {}


# -- objects and containers ------------------------------------------------------------------------------------------------


def test_objects_are_replaced_whole_with_their_exact_types() -> None:
    inner: dict[Any, Any] = {1: {"step": 0}, "lists": [3], "none": 5}
    state: dict[str, Any] = {"o": inner, "pair": (torch.zeros(2), 0), "od": OrderedDict(x=1)}
    stored = {"o.1.step": 2**70, "o.lists": [1, (2, 3)], "o.none": None, "pair.0": torch.ones(2), "pair.1": 9, "od.x": "y"}
    load(DenseReader(stored), state)
    assert state["o"] is inner
    assert inner == {1: {"step": 2**70}, "lists": [1, (2, 3)], "none": None}
    assert type(state["pair"]) is tuple
    assert state["pair"][0].tolist() == [1, 1]
    assert state["pair"][1] == 9
    assert state["od"] == OrderedDict(x="y")


def test_pickled_objects_of_a_foreign_writer_load_only_when_harmless() -> None:
    state: dict[str, Any] = {"o": None}
    load(DenseReader({"o": {"lr": 0.5, "t": torch.ones(2)}}, encoded=False), state)
    assert state["o"]["lr"] == 0.5
    assert state["o"]["t"].tolist() == [1, 1]
    with pytest.raises(UntrustedDataError, match="weights_only") as caught:
        load(DenseReader({"o": io.StringIO}, encoded=False), {"o": None})
    assert caught.value.tensor == "o"


def test_a_tuple_or_plain_container_stored_as_one_object_is_taken_whole() -> None:
    state: dict[str, Any] = {"a": {"pair": (torch.zeros(2), 1), "plain": {"x": 1, "y": {"z": 2}}}}
    inner = state["a"]
    load(DenseReader({"a.pair": (torch.ones(2), 5, 6), "a.plain": {"x": 3}}, encoded=False), state)
    assert state["a"] is inner
    assert inner["pair"][0].tolist() == [1, 1]
    assert inner["pair"][1:] == (5, 6)
    assert inner["plain"] == {"x": 3}


@pytest.mark.parametrize(
    ("template", "stored", "missing", "unexpected"),
    [
        ({"a": []}, {"a.0": numbers(1), "a.1": numbers(1)}, ("a",), ("a.0", "a.1")),
        ({"a": {}}, {"a.x": 1}, (), ("a.x",)),
        ({"a": [numbers(1), numbers(1), numbers(1)]}, {"a.0": numbers(1)}, ("a.1", "a.2"), ()),
        ({"a": [numbers(1)]}, {"a.0": numbers(1), "a.1": numbers(1)}, (), ("a.1",)),
        ({"a": [numbers(1)]}, {"a": []}, ("a.0",), ("a",)),
        ({"a": {"w": numbers(1)}}, {"a": {"w": 1}}, ("a.w",), ("a",)),
        ({"a": None}, {"a.x": 1}, ("a",), ("a.x",)),
    ],
)
def test_containers_that_grew_or_shrank_are_reported(
    template: dict[str, Any], stored: dict[str, Any], missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> None:
    with pytest.raises(KeyMismatchError) as caught:
        load(DenseReader(stored), template)
    assert (caught.value.missing, caught.value.unexpected) == (missing, unexpected)


@pytest.mark.parametrize(("template", "stored"), [([], [1, 2]), ([1, 2, 3], []), ([1], [1, 2]), (None, [1]), ({}, None)])
def test_lists_of_plain_values_are_restored_whole(template: Any, stored: Any) -> None:
    state = {"a": template} if template != {} else {"a": 0}
    load(DenseReader({"a": stored}), state)
    assert state["a"] == stored


# -- what does not fit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (16, 4), (4, 8), (32,), (8, 4, 1)])
def test_another_shape_is_an_error_with_both_sizes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatchError) as caught:
        load(DenseReader({"w": numbers(8, 4), "ok": numbers(2)}), {"w": numbers(*shape), "ok": numbers(2)})
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("w", "[8, 4]", str(list(shape)))


def test_all_offenders_are_listed_in_one_error() -> None:
    stored = {"a": numbers(2), "b": numbers(3), "c": numbers(1), "d": 5}
    with pytest.raises(
        KindMismatchError, match=r"1 value a tensor.*'d'.*2 values of another shape.*'a'.*'b'.*1 value of another dtype.*'c'"
    ):
        load(DenseReader(stored), {"a": numbers(3), "b": numbers(2), "c": torch.zeros(1), "d": numbers(1)})


@pytest.mark.parametrize(
    ("template", "stored", "remedy"),
    [(1.5, torch.tensor(1.5), "put a tensor of shape []"), (torch.tensor(1.5), 1.5, "put a value there that is not a tensor")],
)
def test_a_tensor_and_an_object_never_stand_for_each_other(template: Any, stored: Any, remedy: str) -> None:
    with pytest.raises(KindMismatchError) as caught:
        load(DenseReader({"step": stored}), {"step": template})
    assert caught.value.tensor == "step"
    assert remedy in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
def test_another_dtype_is_refused_by_default(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeMismatchError) as caught:
        load(DenseReader({"w": torch.ones(2)}), {"w": torch.ones(2, dtype=dtype)})
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("w", "torch.float32", str(dtype))


def test_floats_are_cast_on_request_to_the_nearest_value() -> None:
    state = {"w": torch.zeros(4, dtype=torch.bfloat16), "n": torch.zeros(1, dtype=torch.int64)}
    stored = {"w": torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e39]), "n": torch.tensor([2**53 + 1])}
    planner = load(DenseReader(stored, {"w": [((0,), (1,)), ((1,), (3,))]}), state, dtype="cast")
    assert state["w"].tolist() == [1.0, 1.0, 1 + 2**-6, math.inf]
    assert state["n"].item() == 2**53 + 1
    (cast,) = planner.report.cast
    assert (cast.key, cast.stored, cast.wanted, cast.exact) == ("w", torch.float32, torch.bfloat16, False)
    with pytest.raises(DtypeMismatchError, match="only floats are ever cast"):
        load(DenseReader({"n": torch.ones(1)}), {"n": torch.zeros(1, dtype=torch.int64)}, dtype="cast")


# -- keys ------------------------------------------------------------------------------------------------------------------


def test_both_lists_come_in_one_error_with_a_hint() -> None:
    stored = {f"model.module.w{i:02}": numbers(1) for i in range(12)}
    with pytest.raises(KeyMismatchError) as caught:
        load(DenseReader(stored), {"model": {f"w{i:02}": numbers(1) for i in range(12)}})
    assert caught.value.missing == tuple(f"model.w{i:02}" for i in range(12))
    assert caught.value.unexpected == tuple(f"model.module.w{i:02}" for i in range(12))
    text = str(caught.value)
    assert "12 keys missing" in text
    assert "model.w09, and 2 more" in text
    assert "model.w10" not in text
    assert "strip('module.', '_orig_mod.')" in text


def test_stages_of_a_pipeline_are_no_false_alarm() -> None:
    reader = DenseReader({"a": numbers(2), "b": numbers(2)})
    states = [{"a": torch.zeros(2, dtype=torch.int64)}, {"b": torch.zeros(2, dtype=torch.int64)}, {}]
    planners = [ReshardLoadPlanner() for _ in states]
    load_on_ranks(reader, states, planners)
    assert states[0]["a"].tolist() == states[1]["b"].tolist() == [0, 1]
    assert [planner.report.loaded for planner in planners] == [("a",), ("b",), ()]


def test_what_one_stage_lacks_is_missing_for_all() -> None:
    states = [{"a": numbers(1)}, {"b": numbers(1), "c": numbers(1)}]
    with pytest.raises(KeyMismatchError) as caught:
        load_on_ranks(DenseReader({"a": numbers(1), "b": numbers(1), "d": 1}), states, [ReshardLoadPlanner(), ReshardLoadPlanner()])
    assert (caught.value.missing, caught.value.unexpected) == (("c",), ("d",))


def test_lax_components_are_left_alone_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = DenseReader({"model.w": numbers(2), "optim.lr": 1, "optim.old": 2})
    states: list[dict[str, Any]] = [{"model": {"w": numbers(2)}, "optim": {"lr": 0, "new": 7}} for _ in range(2)]
    planners = [ReshardLoadPlanner(strict={"optimizer": False}) for _ in states]
    with caplog.at_level(logging.WARNING):
        load_on_ranks(reader, states, planners)
    for state, planner in zip(states, planners, strict=True):
        assert state["optim"] == {"lr": 1, "new": 7}
        assert (planner.report.missing, planner.report.unexpected) == (("optim.new",), ("optim.old",))
    assert len(caplog.records) == 1
    assert "optim.new" in caplog.text
    assert "optim.old" in caplog.text
    with pytest.raises(KeyMismatchError) as caught:
        load(DenseReader({"model.w": numbers(2), "optim.old": 2}), {"model": {"v": numbers(2)}}, strict={"optimizer": False})
    assert (caught.value.missing, caught.value.unexpected) == (("model.v",), ("model.w",))


def test_a_fresh_optimizer_is_told_how_to_get_state() -> None:
    stored = {"model.w": numbers(1), "optim.state.w.exp_avg": numbers(1), "optim.param_groups.w.lr": 0.1}
    state = {"model": {"w": numbers(1)}, "optim": {"state": {}, "param_groups": {"w": {"lr": 0.2}}}}
    with pytest.raises(KeyMismatchError, match="get_optimizer_state_dict") as caught:
        load(DenseReader(stored), state)
    assert caught.value.unexpected == ("optim.state.w.exp_avg",)
    planner = load(DenseReader(stored), state, strict={"optimizer": False})
    assert planner.report.unexpected == ("optim.state.w.exp_avg",)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("template", "stored", "missing", "unexpected"),
    [
        (("exp_avg", "exp_avg_sq"), ("exp_avg",), ("optim.state.w.exp_avg_sq",), ()),
        (("exp_avg",), ("exp_avg", "exp_avg_sq"), (), ("optim.state.w.exp_avg_sq",)),
    ],
)
def test_half_absent_optimizer_state_is_always_fatal(
    strict: bool, template: tuple[str, ...], stored: tuple[str, ...], missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> None:
    values = {f"optim.state.{name}.{slot}": numbers(1) for name in ("v", "w") for slot in (stored if name == "w" else template)}
    state = {"optim": {"state": {name: {slot: numbers(1) for slot in template} for name in ("v", "w")}}}
    with pytest.raises(KeyMismatchError, match="only in part") as caught:
        load(DenseReader(values), state, strict=strict)
    assert (caught.value.missing, caught.value.unexpected) == (missing, unexpected)


def test_wholly_absent_optimizer_state_is_left_alone_by_option() -> None:
    state = {"optim": {"state": {name: {"exp_avg": torch.zeros(1), "step": torch.zeros(())} for name in ("v", "w")}}}
    reader = DenseReader({"optim.state.w.exp_avg": torch.ones(1), "optim.state.w.step": torch.ones(())})
    with pytest.raises(KeyMismatchError):
        load(reader, state)
    planner = load(reader, state, strict={"optimizer": False})
    assert planner.report.missing == ("optim.state.v.exp_avg", "optim.state.v.step")
    assert state["optim"]["state"]["w"]["exp_avg"].item() == 1
    assert state["optim"]["state"]["v"]["exp_avg"].item() == 0


def test_rename_turns_the_checkpoints_keys_into_the_states() -> None:
    stored = {"m.module.w": numbers(2), "o.state.module.w.m": numbers(2), "o.param_groups.0.params": ["module.w"]}
    state: dict[str, Any] = {
        "m": {"w": torch.zeros(2, dtype=torch.int64)},
        "o": {"state": {"w": {"m": torch.zeros(2, dtype=torch.int64)}}, "param_groups": [{"params": ["w"]}]},
    }
    planner = load(DenseReader(stored), state, rename=strip())
    assert state["m"]["w"].tolist() == state["o"]["state"]["w"]["m"].tolist() == [0, 1]
    assert state["o"]["param_groups"] == [{"params": ["w"]}]
    assert planner.report.renamed == (("m.module.w", "m.w"), ("o.state.module.w.m", "o.state.w.m"))


def test_a_rename_that_merges_two_keys_names_both() -> None:
    with pytest.raises(DuplicateKeyError, match=r"'a\.w' and 'b\.w'"):
        load(DenseReader({"a.w": 1, "b.w": 2}), {"a": {"w": 0}}, rename={"b": "a"})


def test_a_partial_load_touches_nothing_else() -> None:
    state: dict[str, Any] = {"model": {"a": numbers(2) * 0, "b": numbers(2) * 0, "meta": torch.empty(2, device="meta")}, "lr": 5, "x": 1}
    reader = DenseReader({"model.a": numbers(2), "model.b": numbers(2), "lr": 6, "more": 1})
    planner = load(reader, state, keys=["model.a", "l*"])
    assert state["model"]["a"].tolist() == [0, 1]
    assert state["model"]["b"].tolist() == [0, 0]
    assert state["model"]["meta"].is_meta
    assert (state["lr"], state["x"]) == (6, 1)
    assert planner.report.loaded == ("model.a", "lr")
    assert planner.report.missing == planner.report.unexpected == ()
    with pytest.raises(KeyMismatchError, match="'modle'"):
        load(reader, state, keys=["modle", "lr"])


def test_ranks_that_see_different_keys_are_refused() -> None:
    one, other = DenseReader({"a": 1}), DenseReader({"a": 1, "b": 2})
    planners = [ReshardLoadPlanner(), ReshardLoadPlanner()]
    plans = []
    for planner, reader in zip(planners, (one, other), strict=True):
        planner.set_up_planner({"a": 0}, reader.metadata, True)
        plans.append(planner.create_local_plan())
    with pytest.raises(RankDisagreementError) as caught:
        planners[0].create_global_plan(plans)
    assert caught.value.rank == 1
    with pytest.raises(PlanError, match="same load planner"):
        planners[0].create_global_plan([plans[0], LoadPlan([])])


# -- ties ------------------------------------------------------------------------------------------------------------------


def tied_reader(**values: torch.Tensor) -> DenseReader:
    return DenseReader(values, planner_data=PlannerData({}, ties={"head": "embed"}))


def test_keys_saved_as_a_tie_fill_an_untied_state() -> None:
    state = {"embed": torch.zeros(3, dtype=torch.int64), "head": torch.zeros(3, dtype=torch.int64)}
    load(tied_reader(embed=numbers(3)), state)
    assert state["embed"].tolist() == state["head"].tolist() == [0, 1, 2]


def test_a_tied_state_reads_a_tie_once() -> None:
    shared = torch.zeros(3, dtype=torch.int64)
    reader = tied_reader(embed=numbers(3))
    planner = load(reader, {"embed": shared, "head": shared.detach()})
    assert shared.tolist() == [0, 1, 2]
    assert reader.num_reads == {"embed": 1}
    assert planner.report.loaded == ("embed", "head")


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_tied_state_takes_equal_values_that_were_saved_apart(num_threads: int) -> None:
    shared = torch.zeros(4, dtype=torch.float64)
    values = {"embed": torch.tensor([1.0, math.nan, -0.0, 3.0]), "head": torch.tensor([1.0, math.nan, -0.0, 3.0])}
    reader = DenseReader(values, {"head": [((0,), (1,)), ((1,), (3,))]})
    load_on_ranks(reader, [{"embed": shared, "head": shared.view(4)}], [ReshardLoadPlanner(dtype="cast")], num_threads=num_threads)
    np.testing.assert_array_equal(shared.numpy(), [1.0, math.nan, -0.0, 3.0])


def test_a_tied_state_refuses_different_values() -> None:
    shared = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ReplicaMismatchError, match="one tensor in the state") as caught:
        load(DenseReader({"embed": numbers(3), "head": numbers(3) + 1}), {"embed": shared, "head": shared})
    assert caught.value.keys == ("embed", "head")


def test_a_key_of_a_tied_state_that_the_checkpoint_dropped_is_not_missing() -> None:
    shared = torch.zeros(3, dtype=torch.int64)
    planner = load(DenseReader({"head": numbers(3)}), {"embed": shared, "head": shared})
    assert shared.tolist() == [0, 1, 2]
    assert planner.report.missing == ()


def test_a_tie_that_the_state_lacks_is_unexpected() -> None:
    with pytest.raises(KeyMismatchError) as caught:
        load(tied_reader(embed=numbers(3)), {"embed": numbers(3)})
    assert caught.value.unexpected == ("head",)


def test_a_tie_to_nothing_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpointError, match="tie") as caught:
        load(tied_reader(other=numbers(3)), {"other": numbers(3)})
    assert caught.value.tensor == "head"


# -- targets without memory, states without a template --------------------------------------------------------------------


def test_meta_targets_get_memory_in_the_callers_own_containers() -> None:
    inner: dict[str, Any] = {
        "p": torch.nn.Parameter(torch.empty(2, device="meta")),
        "frozen": torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False),
        "b": torch.nn.Buffer(torch.empty(2, device="meta"), persistent=False),
        "t": torch.empty(2, 3, device="meta").t(),
    }
    inner["tied"] = inner["p"].detach()
    inner["dropped"] = inner["t"].detach()
    outer = {"model": inner}
    stored = {f"model.{key}": torch.arange(2.0) for key in ("p", "frozen", "b", "tied")}
    stored["model.t"] = numbers(3, 2, dtype=torch.float32)
    load(DenseReader(stored), outer)
    assert outer["model"] is inner
    assert all(not value.is_meta for value in inner.values())
    assert type(inner["p"]) is torch.nn.Parameter
    assert inner["p"].requires_grad
    assert type(inner["frozen"]) is torch.nn.Parameter
    assert not inner["frozen"].requires_grad
    assert isinstance(inner["b"], torch.nn.Buffer)
    assert inner["p"].tolist() == [0, 1]
    assert inner["p"].data_ptr() == inner["tied"].data_ptr()
    assert inner["t"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert inner["t"].stride() == (1, 3)
    assert inner["dropped"].data_ptr() == inner["t"].data_ptr()


class Tagged(torch.Tensor):
    """A class of tensors with plain memory."""


def test_meta_targets_keep_their_class_and_their_fields() -> None:
    sharded = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    for name, value in {"global_shape": (4, 3), "global_offsets": ((2, 0),), "local_offsets": ((0, 0),), "local_sizes": ((2, 3),)}.items():
        setattr(sharded, name, value)
    state: dict[str, Any] = {"sharded": sharded, "tagged": torch.empty(2, device="meta").as_subclass(Tagged)}
    load(DenseReader({"sharded": numbers(4, 3, dtype=torch.float32), "tagged": torch.ones(2)}), state)
    assert state["sharded"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert state["sharded"].global_offsets == ((2, 0),)
    assert type(state["sharded"]) is torch.nn.Parameter
    assert type(state["tagged"]) is Tagged
    assert state["tagged"].tolist() == [1, 1]


def test_a_shard_without_memory_is_no_target() -> None:
    target = Boxed.make((2,), [((0,), (2,))])
    target.parts = [torch.empty(2, dtype=torch.int64, device="meta")]
    with pytest.raises(UnsupportedTensorError, match="meta"):
        load(DenseReader({"w": numbers(2)}), {"w": target})


def saved_state() -> dict[str, Any]:
    shared = numbers(3)
    return {
        "model": OrderedDict([("w", numbers(2, 2)), ("embed", shared), ("head", shared)]),
        "optim": {"state": {0: {"m": numbers(2)}, 1: {"m": numbers(2) + 1}}, "groups": [{"lr": 0.1, "t": (numbers(1), 5)}]},
        "empty": {},
        "none": None,
    }


def our_reader(state: dict[str, Any]) -> DenseReader:
    flat = flatten(state)
    leaves = {key: value for key, value in flat.leaves.items() if key != "model.head"}
    planner_data = PlannerData(dict(flat.paths), skeleton=encode_skeleton(flat.skeleton), ties={"model.head": "model.embed"})
    return DenseReader(leaves, planner_data=planner_data, metadata_type=EngineMetadata)


def test_a_whole_state_is_built_with_exact_containers() -> None:
    state: dict[str, Any] = {}
    planner = load(our_reader(saved_state()), state, build_from_metadata=True)
    assert planner.built is state
    assert type(state["model"]) is OrderedDict
    assert state["model"]["w"].tolist() == [[0, 1], [2, 3]]
    assert state["model"]["head"].data_ptr() == state["model"]["embed"].data_ptr()
    assert list(state["optim"]["state"]) == [0, 1]
    assert state["optim"]["state"][1]["m"].tolist() == [1, 2]
    assert state["optim"]["groups"][0]["lr"] == 0.1
    assert type(state["optim"]["groups"][0]["t"]) is tuple
    assert state["optim"]["groups"][0]["t"][1] == 5
    assert state["empty"] == {}
    assert state["none"] is None


def test_part_of_a_state_is_built() -> None:
    state: dict[str, Any] = {}
    load(our_reader(saved_state()), state, build_from_metadata=True, keys=["model.w", "optim.state.1"])
    assert set(state) == {"model", "optim"}
    assert list(state["model"]) == ["w"]
    assert state["optim"]["state"][1]["m"].tolist() == [1, 2]


def test_a_state_is_built_under_new_names() -> None:
    state: dict[str, Any] = {}
    flat = flatten({"model": {"module.w": numbers(2)}, "l": [numbers(1), numbers(1)]})
    load(DenseReader(flat.leaves, planner_data=dict(flat.paths)), state, build_from_metadata=True, rename=strip())
    assert state["model"]["w"].tolist() == [0, 1]
    assert [element.tolist() for element in state["l"]] == [[0], [0]]


@pytest.mark.parametrize(
    "planner_data",
    [{"a": (), "b": ("b",)}, {"a": ("x", 10**12), "b": ("b",)}, {"a": ("b",), "b": ("b", "c")}, {"a": ("x", 0), "b": ("x", "y")}, {"a": 7}],
)
def test_hostile_paths_are_refused(planner_data: Any) -> None:
    with pytest.raises(MalformedCheckpointError):
        load(DenseReader({"a": numbers(1), "b": 1}, planner_data=planner_data), {}, build_from_metadata=True)


def test_only_an_empty_state_can_be_built() -> None:
    with pytest.raises(InvalidOptionError, match="empty dict"):
        load(DenseReader({"a": 1}), {"a": 0}, build_from_metadata=True)
    with pytest.raises(UsageError, match="no state was built"):
        _ = ReshardLoadPlanner().built


# -- contracts with DCP and readers ----------------------------------------------------------------------------------------


def test_items_stay_at_home_where_the_reader_is_ours() -> None:
    planner = ReshardLoadPlanner()
    state = {"w": torch.zeros(4, dtype=torch.int64)}
    planner.set_up_planner(state, DenseReader({"w": numbers(4)}, metadata_type=EngineMetadata).metadata, True)
    plan = planner.create_local_plan()
    assert len(plan.items) == 1
    sent = pickle.loads(pickle.dumps(plan))
    assert sent.items == []
    received = pickle.loads(pickle.dumps(planner.create_global_plan([sent])[0]))
    assert planner.finish_plan(received).items == plan.items
    planner.set_up_planner(state, DenseReader({"w": numbers(4)}).metadata, True)
    assert len(pickle.loads(pickle.dumps(planner.create_local_plan())).items) == 1


def test_a_plan_that_no_planner_of_ours_judged_is_refused() -> None:
    planner = ReshardLoadPlanner()
    planner.set_up_planner({"w": numbers(2), "absent": 1}, DenseReader({"w": numbers(2)}).metadata, False)
    plan = planner.create_local_plan()
    with pytest.raises(PlanError, match="missing and unexpected"):
        planner.finish_plan(DefaultLoadPlanner().create_global_plan([plan])[0])


def test_errors_of_the_readers_metadata_come_through_untouched() -> None:
    class Poisoned(Metadata):
        def __init__(self) -> None:
            pass

        def __getattribute__(self, name: str) -> Any:
            if name in ("state_dict_metadata", "planner_data"):
                raise CorruptCheckpointError("bad manifest", path="/x")
            return super().__getattribute__(name)

    planner = ReshardLoadPlanner()
    planner.set_up_planner({"w": numbers(1)}, Poisoned(), True)
    with pytest.raises(CorruptCheckpointError, match="bad manifest"):
        planner.create_local_plan()


def test_lookup_and_transform_keep_their_meaning_in_subclasses() -> None:
    class Doubling(ReshardLoadPlanner):
        """Loads through temporaries of its own."""

        def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
            self.into = super().transform_tensor(read_item, tensor)
            return torch.empty_like(self.into)

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            self.into.copy_(2 * tensor)
            super().commit_tensor(read_item, tensor)

    assert issubclass(ReshardLoadPlanner, DefaultLoadPlanner)
    state = {"w": torch.zeros(4, dtype=torch.int64)}
    load_on_ranks(DenseReader({"w": numbers(4)}), [state], [Doubling()])
    assert state["w"].tolist() == [0, 2, 4, 6]


def test_a_subclass_may_set_up_the_state_itself() -> None:
    class Renaming(ReshardLoadPlanner):
        """As in the docstring of DCP's LoadPlanner."""

        def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
            self.original_state_dict = state_dict
            self.state_dict = {f"foo_{key}": value for key, value in state_dict.items()}
            self.mappings = {f"foo_{key}": (key,) for key in state_dict}
            self.metadata = metadata
            self.is_coordinator = is_coordinator

    state: dict[str, Any] = {"w": torch.zeros(2, dtype=torch.int64), "o": 0}
    load_on_ranks(DenseReader({"foo_w": numbers(2), "foo_o": 3}), [state], [Renaming()])
    assert state["w"].tolist() == [0, 1]
    assert state["o"] == 3


def test_one_planner_loads_again_and_again() -> None:
    planner = ReshardLoadPlanner()
    with pytest.raises(UsageError, match="no report"):
        _ = planner.report
    for start in range(3):
        state = {"w": torch.zeros(2, dtype=torch.int64)}
        load_on_ranks(DenseReader({"w": numbers(2) + start}), [state], [planner])
        assert state["w"].tolist() == [start, start + 1]


def test_a_box_that_this_rank_does_not_hold_is_not_found() -> None:
    planner = load(DenseReader({"w": numbers(4)}), {"w": numbers(4)})
    assert planner.lookup_tensor(MetadataIndex("w")).tolist() == [0, 1, 2, 3]
    assert planner.lookup_tensor(MetadataIndex("w", (0,), 7)).tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="no box there"):
        planner.lookup_tensor(MetadataIndex("w", (2,)))


def test_no_metadata_is_a_usage_error() -> None:
    planner = ReshardLoadPlanner()
    planner.set_up_planner({"w": numbers(1)})
    with pytest.raises(UsageError, match="metadata"):
        planner.create_local_plan()
    with pytest.raises(UsageError, match="metadata"):
        ReshardLoadPlanner().create_local_plan()


@pytest.mark.parametrize("options", [{"dtype": "up"}, {"strict": 1}, {"keys": "model"}, {"rename": 3}, {"strict": {"modle": False}}])
def test_bad_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        ReshardLoadPlanner(**options)


@pytest.fixture
def stock_checkpoint(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved_state() | {"od": {"tensors": (numbers(2), 3)}}, checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


def dcp_load(state: dict[str, Any], path: Path, planner: ReshardLoadPlanner) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's own, about the process group that is not there
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=planner)


def test_a_stock_checkpoint_loads_into_a_template(stock_checkpoint: Path) -> None:
    state = saved_state() | {"od": {"tensors": (numbers(2) * 0, 0)}, "none": 1}
    for value in (state["model"]["w"], state["model"]["embed"], state["optim"]["state"][1]["m"]):
        value.zero_()
    dcp_load(state, stock_checkpoint, ReshardLoadPlanner())
    assert state["model"]["w"].tolist() == [[0, 1], [2, 3]]
    assert state["model"]["head"].tolist() == [0, 1, 2]
    assert state["optim"]["state"][1]["m"].tolist() == [1, 2]
    assert state["optim"]["groups"][0]["t"][1] == 5
    assert state["od"]["tensors"][0].tolist() == [0, 1]
    assert state["none"] is None


def test_a_stock_checkpoint_is_built_from_its_metadata(stock_checkpoint: Path) -> None:
    planner = ReshardLoadPlanner(build_from_metadata=True)
    dcp_load({}, stock_checkpoint, planner)
    assert planner.built["model"]["w"].tolist() == [[0, 1], [2, 3]]
    assert planner.built["optim"]["state"]["1"]["m"].tolist() == [1, 2]
    assert planner.built["od"]["tensors"][1] == 3


def test_a_stock_checkpoint_says_what_is_missing_through_dcp(stock_checkpoint: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp_load(saved_state() | {"more": numbers(1)}, stock_checkpoint, ReshardLoadPlanner())
    error = caught.value.failures[0][0]
    assert isinstance(error, KeyMismatchError)
    assert (error.missing, error.unexpected) == (("more",), ("od.tensors",))
