"""The save planner on simulated ranks: local plans, the global plan and what is resolved, without processes."""

from __future__ import annotations

import gc
import io
import math
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_engine.errors import (
    DuplicateKeyError,
    InvalidOptionError,
    PlanError,
    ReplicaMismatchError,
    UnencodableObjectError,
    UnsupportedTensorError,
)
from dcp_engine.objects import decode_object
from dcp_engine.planners import BalancedSavePlanner
from dcp_engine.planners import save as save_module
from dcp_engine.planners.save_cache import ReusedPlan
from dcp_engine.types import EncodedObject, EngineMetadata, EngineStorageMeta, PlannerData

State = dict[str, Any]


class Saves:
    """One planner a rank, and saves of one state a rank."""

    def __init__(self, planners: Sequence[BalancedSavePlanner], *, engine: bool = True) -> None:
        self.planners = planners
        self.meta = EngineStorageMeta() if engine else StorageMeta()
        self.local: list[SavePlan] = []
        self.final: list[SavePlan] = []
        self.sent: list[SavePlan] = []
        self.metadata = Metadata({})

    def plan(self, states: Sequence[State]) -> Saves:
        self.local = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            planner.set_up_planner(state, self.meta, rank == 0)
            self.local.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
        plans, self.metadata = self.planners[0].create_global_plan(self.local)
        self.sent = pickle.loads(pickle.dumps(plans))
        self.final = [planner.finish_plan(plan) for planner, plan in zip(self.planners, self.sent, strict=True)]
        return self

    def written(self) -> list[list[str]]:
        return [[item.index.fqn for item in plan.items] for plan in self.final]

    def content(self) -> dict[str, Any]:
        """What all ranks write, put together: tensors from their boxes, objects decoded."""
        whole: dict[str, Any] = {}
        for planner, plan in zip(self.planners, self.final, strict=True):
            for item in plan.items:
                value = planner.resolve_data(item)
                if isinstance(value, io.BytesIO):
                    assert isinstance(value, EncodedObject)
                    assert item.index.fqn not in whole
                    whole[item.index.fqn] = decode_object(value.getvalue(), key=item.index.fqn)
                    continue
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                assert value.shape == chunk.sizes
                target, seen = whole.setdefault(
                    item.index.fqn,
                    (torch.zeros(item.tensor_data.size, dtype=value.dtype), torch.zeros(item.tensor_data.size, dtype=torch.int)),
                )
                region = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
                target[region] = value
                seen[region] += 1
        for key, value in whole.items():
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.Tensor):
                assert bool((value[1] == 1).all()), key
                whole[key] = value[0]
        return whole


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Saves]]:
    def make(num_ranks: int, *, engine: bool = True, **options: Any) -> Saves:
        monkeypatch.setattr(save_module, "_num_ranks", lambda: num_ranks)
        return Saves([BalancedSavePlanner(**options) for _ in range(num_ranks)], engine=engine)

    return make


def model(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(600, 500, generator=generator), "b": torch.randn(7, generator=generator)}, "lr": 0.5, "step": 3}


def part(global_shape: tuple[int, ...], offsets: tuple[int, ...], local: torch.Tensor) -> torch.Tensor:
    """One rank's box of a sharded tensor, by the fields of ``CheckpointableTensor``."""
    fields = (("global_shape", global_shape), ("global_offsets", (offsets,)), ("local_offsets", ((0,) * local.ndim,)))
    for name, value in (*fields, ("local_sizes", (tuple(local.shape),))):
        setattr(local, name, value)
    return local


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_replicas_are_written_once_and_in_equal_shares(saves: Callable[..., Saves], num_ranks: int) -> None:
    run = saves(num_ranks).plan([model() for _ in range(num_ranks)])
    content = run.content()
    assert torch.equal(content["model.w"], model()["model"]["w"])
    assert torch.equal(content["model.b"], model()["model"]["b"])
    assert (content["lr"], content["step"]) == (0.5, 3)
    shares = [sum(math.prod(item.tensor_data.chunk.sizes) for item in plan.items if item.tensor_data) for plan in run.final]
    assert max(shares) <= 1.05 * (600 * 500 + 7) / num_ranks
    assert all(len(keys) == len(set(keys)) for keys in run.written())


def test_metadata_describes_just_what_is_written(saves: Callable[..., Saves]) -> None:
    run = saves(3).plan([model() for _ in range(3)])
    assert isinstance(run.metadata, EngineMetadata)
    written: dict[str, set[Any]] = {}
    for plan in run.final:
        for item in plan.items:
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                assert item.index.offset == chunk.offsets
                written.setdefault(item.index.fqn, set()).add((chunk.offsets, chunk.sizes))
    for key, boxes in written.items():
        entry = run.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        assert {(chunk.offsets, chunk.sizes) for chunk in entry.chunks} == boxes
        assert len(entry.chunks) == len(boxes)
    assert isinstance(run.metadata.state_dict_metadata["lr"], BytesStorageMetadata)
    assert isinstance(run.metadata.planner_data, PlannerData)
    assert run.metadata.planner_data == {"model.w": ("model", "w"), "model.b": ("model", "b"), "lr": ("lr",), "step": ("step",)}
    assert run.metadata.planner_data.skeleton


def test_unequal_replicas_name_keys_ranks_and_remedy(saves: Callable[..., Saves]) -> None:
    states = [model() for _ in range(4)]
    states[2]["model"]["b"][3] += 1
    states[1]["lr"] = 0.25
    with pytest.raises(ReplicaMismatchError) as caught:
        saves(4).plan(states)
    assert caught.value.keys == ("lr", "model.b")
    assert caught.value.ranks == (((0, 2, 3), (1,)), ((0, 1, 3), (2,)))
    assert "lowest_rank" in str(caught.value)


@pytest.mark.parametrize(
    "other", [torch.zeros(8), torch.zeros(7, dtype=torch.float64), [1.0], torch.zeros(7, 1)], ids=["shape", "dtype", "object", "dims"]
)
def test_replicas_of_another_kind_are_unequal(saves: Callable[..., Saves], other: Any) -> None:
    states = [{"v": torch.zeros(7)}, {"v": other}, {"v": torch.zeros(7)}]
    with pytest.raises(ReplicaMismatchError) as caught:
        saves(3).plan(states)
    assert (caught.value.keys, caught.value.ranks) == (("v",), (((0, 2), (1,)),))


def test_policy_takes_the_lowest_rank_and_splits_over_its_equals(saves: Callable[..., Saves]) -> None:
    states: list[State] = [{"v": torch.full((400, 400), float(rank == 1)), "o": rank} for rank in range(3)]
    run = saves(3, replica_policy={"*": "lowest_rank"}).plan(states)
    assert run.written() == [["v", "o"], [], ["v"]]
    assert run.content()["o"] == 0
    assert not run.content()["v"].any()


def test_policy_covers_other_kinds(saves: Callable[..., Saves]) -> None:
    run = saves(2, replica_policy={"v": "lowest_rank"}).plan([{"v": torch.ones(2)}, {"v": torch.ones(3)}])
    assert run.content()["v"].tolist() == [1, 1]


def test_each_shard_is_written_by_the_rank_that_has_it(saves: Callable[..., Saves]) -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    run = saves(3).plan([{"w": part((6, 2), (2 * rank, 0), rows[2 * rank : 2 * rank + 2].clone())} for rank in range(3)])
    assert run.written() == [["w"], ["w"], ["w"]]
    assert torch.equal(run.content()["w"], rows)


def test_a_hole_names_tensor_and_place(saves: Callable[..., Saves]) -> None:
    with pytest.raises(PlanError, match=r"'w'.*hole at offsets \(2,\), sizes \(2,\)"):
        saves(2).plan([{"w": part((6,), (0,), torch.zeros(2))}, {"w": part((6,), (4,), torch.zeros(2))}])


def test_a_tensor_of_which_no_rank_holds_anything_is_not_left_out_silently(saves: Callable[..., Saves]) -> None:
    empty = part((4,), (4,), torch.zeros(0))
    with pytest.raises(PlanError, match="no rank that takes part") as caught:
        saves(2).plan([{"w": empty, "x": 1}, {"w": empty, "x": 1}])
    assert caught.value.tensor == "w"


def test_a_box_that_one_rank_gives_twice_is_refused(saves: Callable[..., Saves]) -> None:
    twice = part((4,), (0,), torch.zeros(4))
    twice.global_offsets = twice.local_offsets = ((0,), (0,))  # type: ignore[attr-defined]
    twice.local_sizes = ((4,), (4,))  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=r"twice.*'w'.*box at \(0,\) of sizes \(4,\)") as caught:
        saves(1).plan([{"w": twice}])
    assert caught.value.rank == 0


def test_an_overlap_names_tensor_and_ranks(saves: Callable[..., Saves]) -> None:
    with pytest.raises(PlanError, match=r"'w'.*overlap at offsets \(2,\), sizes \(1,\), held by ranks 0 and by ranks 1"):
        saves(2).plan([{"w": part((6,), (0,), torch.zeros(3))}, {"w": part((6,), (2,), torch.zeros(4))}])


def test_empty_shards_beside_full_ones_at_one_offset(saves: Callable[..., Saves]) -> None:
    states = [{"w": part((2,), (0,), torch.zeros(0))}, {"w": part((2,), (0,), torch.ones(2))}, {"w": part((2,), (2,), torch.zeros(0))}]
    run = saves(3).plan(states)
    assert run.written() == [[], ["w"], []]
    assert run.content()["w"].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_tensors_without_elements_stay_in_the_metadata(saves: Callable[..., Saves], shape: tuple[int, ...]) -> None:
    run = saves(2).plan([{"e": torch.zeros(shape, dtype=torch.bfloat16)} for _ in range(2)])
    assert run.written() == [[], []]
    entry = run.metadata.state_dict_metadata["e"]
    assert isinstance(entry, TensorStorageMetadata)
    assert (entry.size, entry.chunks, entry.properties.dtype) == (torch.Size(shape), [], torch.bfloat16)


def test_scalars_round_trip(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([{"s": torch.tensor(5, dtype=torch.uint16)} for _ in range(2)])
    assert run.content()["s"].item() == 5


def test_keys_of_some_ranks_only_are_united(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([{"stage": {"0": torch.ones(2)}}, {"stage": {"1": torch.ones(3)}, "note": "x"}])
    assert run.written() == [["stage.0"], ["stage.1", "note"]]
    assert run.metadata.planner_data == {"stage.0": ("stage", "0"), "stage.1": ("stage", "1"), "note": ("note",)}


def test_one_name_for_two_paths_of_different_ranks_is_refused(saves: Callable[..., Saves]) -> None:
    with pytest.raises(DuplicateKeyError) as caught:
        saves(2).plan([{"a": {"b": torch.ones(2)}}, {"a.b": torch.ones(2)}])
    assert caught.value.tensor == "a.b"


def test_containers_that_differ_name_the_rank(saves: Callable[..., Saves]) -> None:
    same = [{"o": {"x": torch.ones(2)}} for _ in range(3)]
    with pytest.raises(PlanError, match="different containers") as caught:
        saves(4).plan([*same, {"o": OrderedDict(x=torch.ones(2))}])
    assert (caught.value.tensor, caught.value.rank) == ("o", 3)


def test_ranks_that_flatten_and_ranks_that_do_not_are_told(saves: Callable[..., Saves]) -> None:
    run = saves(2)
    run.planners = [BalancedSavePlanner(), BalancedSavePlanner(flatten_state_dict=False)]
    with pytest.raises(PlanError, match="flatten_state_dict=True") as caught:
        run.plan([{"o": {"x": 1}}, {"o": {"x": 1}}])
    assert caught.value.rank == 1


def tied() -> State:
    weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))
    return {"embed": weight, "head": weight}


def test_ties_are_written_once_and_described_twice(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([tied(), tied()])
    assert [key for keys in run.written() for key in keys] == ["embed"]
    assert run.metadata.planner_data.ties == {"head": "embed"}
    assert run.metadata.state_dict_metadata["head"] == run.metadata.state_dict_metadata["embed"]


def test_a_tie_that_a_rank_does_not_have_is_written_twice(saves: Callable[..., Saves]) -> None:
    apart = {key: value.clone() for key, value in tied().items()}
    run = saves(2).plan([tied(), apart])
    assert sorted(key for keys in run.written() for key in keys) == ["embed", "head"]
    assert run.metadata.planner_data.ties == {}
    assert torch.equal(run.content()["head"], apart["head"])


def test_foreign_writers_get_stock_records_only(saves: Callable[..., Saves]) -> None:
    run = saves(2, engine=False).plan([{**model(), **tied(), "e": torch.zeros(0, 2)} for _ in range(2)])
    assert type(run.metadata) is Metadata
    assert type(run.metadata.planner_data) is dict
    assert b"dcp_engine" not in pickle.dumps(run.metadata)
    keys = [key for keys in run.written() for key in keys]
    assert sorted(keys) == ["e", "embed", "head", "lr", "model.b", "model.w", "model.w", "step"]
    for planner, plan in zip(run.planners, run.final, strict=True):
        for item in plan.items:
            if item.index.fqn == "lr":
                stream = planner.resolve_data(item)
                assert type(stream) is io.BytesIO
                stream.seek(0)
                assert torch.load(stream, weights_only=True) == 0.5


def test_resolve_data_gives_views_and_can_be_repeated(saves: Callable[..., Saves]) -> None:
    state = model()
    run = saves(1).plan([state])
    (item,) = (item for item in run.final[0].items if item.index.fqn == "model.w")
    first, second = (run.planners[0].resolve_data(item) for _ in range(2))
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert first.data_ptr() == second.data_ptr() == state["model"]["w"].data_ptr()
    (item,) = (item for item in run.final[0].items if item.index.fqn == "lr")
    encoded = [run.planners[0].resolve_data(item) for _ in range(2)]
    assert encoded[0].getvalue() == encoded[1].getvalue()  # type: ignore[union-attr]


def test_encoded_objects_do_not_outlive_the_save(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([{"blob": b"x" * 1000, "other": b"y" * 1000} for _ in range(2)])
    run.content()
    assert [planner._local.encoded for planner in run.planners] == [{}, {}]


def test_conjugate_views_are_resolved(saves: Callable[..., Saves]) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    run = saves(2).plan([{"c": value.conj(), "n": value.conj().imag} for _ in range(2)])
    assert run.content()["c"].tolist() == [1 - 2j, 3 + 4j]
    assert run.content()["n"].tolist() == [-2, 4]


def test_a_plan_for_what_the_rank_does_not_hold_is_refused(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([{"w": part((4,), (2 * rank,), torch.zeros(2))} for rank in range(2)])
    with pytest.raises(PlanError, match="does not hold"):
        run.planners[0].resolve_data(run.final[1].items[0])
    with pytest.raises(PlanError, match="does not hold"):
        run.planners[0].lookup_object(MetadataIndex("absent"))


class Poison:
    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        raise ConnectionError("staging failed on this rank")


def test_errors_of_values_reach_the_caller(saves: Callable[..., Saves]) -> None:
    with pytest.raises(ConnectionError, match="staging failed"):
        saves(1).plan([{"nested": {"x": Poison()}}])


def test_what_cannot_be_stored_is_refused_while_planning(saves: Callable[..., Saves]) -> None:
    with pytest.raises(UnencodableObjectError) as caught:
        saves(1).plan([{"fn": lambda: 0}])
    assert caught.value.tensor == "fn"
    with pytest.raises(UnsupportedTensorError):
        saves(1).plan([{"m": torch.empty(2, device="meta")}])


def test_unflattened_state_keeps_its_top_level_keys(saves: Callable[..., Saves]) -> None:
    run = saves(1, flatten_state_dict=False).plan([{"a.b": torch.ones(2), "o": {"c": [1]}}])
    assert run.content()["o"] == {"c": [1]}
    assert run.content()["a.b"].tolist() == [1, 1]


# -- subclasses, as DCP documents them -------------------------------------------------------------------------------------


class Renamed(BalancedSavePlanner):
    def set_up_planner(self, state_dict: State, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class Halved(BalancedSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        return value if write_item.type == WriteItemType.BYTE_IO else value.to(torch.float16)  # type: ignore[union-attr]


class Looked(BalancedSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return value + 100 if isinstance(value, torch.Tensor) else [value]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value * 2 if isinstance(value, torch.Tensor) else value


def test_a_rewritten_state_is_saved_under_its_new_names(saves: Callable[..., Saves]) -> None:
    assert sorted(Saves([Renamed()]).plan([model()]).content()) == ["foo_lr", "foo_model.b", "foo_model.w", "foo_step"]


def test_items_and_data_may_be_changed_in_tandem(saves: Callable[..., Saves]) -> None:
    run = saves(2)
    run.planners = [Halved(), Halved()]
    for _ in range(2):
        assert run.plan([model(), model()]).content()["model.w"].dtype == torch.float16
        entry = run.metadata.state_dict_metadata["model.w"]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.properties.dtype == torch.float16


def test_lookup_comes_before_narrowing_and_transform_after(saves: Callable[..., Saves]) -> None:
    run = saves(2)
    run.planners = [Looked(), Looked()]
    whole = run.plan([{"w": torch.ones(400, 400), "o": 1, "tie": None} for _ in range(2)]).content()
    assert set(whole["w"].flatten().tolist()) == {202.0}
    assert whole["o"] == [1]


# -- plan cache ------------------------------------------------------------------------------------------------------------


def test_an_unchanged_state_is_not_planned_again(saves: Callable[..., Saves]) -> None:
    run = saves(3).plan([model() for _ in range(3)])
    first = [plan.items for plan in run.final]
    run.plan([model(seed=1) for _ in range(3)])
    assert [len(plan.items) for plan in run.local] == [0, 0, 0]
    assert all(isinstance(plan, ReusedPlan) and not plan.items for plan in run.sent)
    assert [plan.items for plan in run.final] == first
    assert torch.equal(run.content()["model.w"], model(seed=1)["model"]["w"])


def test_replicas_are_compared_at_every_save(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([model(), model()])
    with pytest.raises(ReplicaMismatchError) as caught:
        run.plan([model(), model(seed=1)])
    assert caught.value.keys == ("model.b", "model.w")
    run.plan([model(), model()])
    assert [len(plan.items) for plan in run.local] == [4, 4]  # planned afresh after the error


def test_a_choice_by_policy_is_made_at_every_save(saves: Callable[..., Saves]) -> None:
    run = saves(2, replica_policy={"v": "lowest_rank"}).plan([{"v": torch.zeros(400, 400)}, {"v": torch.ones(400, 400)}])
    assert run.written() == [["v"], []]
    run.plan([{"v": torch.ones(400, 400)}, {"v": torch.ones(400, 400)}])
    assert run.written() == [["v"], ["v"]]
    run.plan([{"v": torch.ones(400, 400)}, {"v": torch.zeros(400, 400)}])
    assert run.written() == [["v"], []]
    assert run.content()["v"].all()


def test_a_change_on_one_rank_is_planned_with_the_cached_rest(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    run.plan([{"a": torch.ones(2)}, {"b": torch.ones(3), "c": 1}])
    assert [len(plan.items) for plan in run.local] == [0, 2]
    assert run.written() == [["a"], ["b", "c"]]
    assert run.content()["b"].tolist() == [1, 1, 1]
    run.plan([{"a": torch.zeros(2)}, {"b": torch.ones(3), "c": 2}])
    assert [len(plan.items) for plan in run.local] == [0, 0]
    assert run.content()["c"] == 2
    assert set(run.metadata.state_dict_metadata) == {"a", "b", "c"}


def test_a_rank_that_missed_a_plan_still_fits_in(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    behind = run.planners[1]._cache
    run.plan([{"a": torch.ones(3)}, {"b": torch.ones(2)}])
    run.planners[1]._cache = behind
    run.plan([{"a": torch.ones(3)}, {"b": torch.ones(2)}])
    assert run.written() == [["a"], ["b"]]
    assert run.content()["a"].tolist() == [1, 1, 1]


def test_a_plan_that_the_coordinator_never_made_is_refused_and_then_forgotten(saves: Callable[..., Saves]) -> None:
    run = saves(2).plan([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    run.planners = [BalancedSavePlanner(), run.planners[1]]
    with pytest.raises(PlanError) as caught:
        run.plan([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
    assert caught.value.rank == 1
    assert run.plan([{"a": torch.ones(2)}, {"b": torch.ones(2)}]).written() == [["a"], ["b"]]


@pytest.mark.parametrize("odd", ["options", "subclass"])
def test_a_coordinator_that_keeps_no_plans_gets_them_at_every_save(saves: Callable[..., Saves], odd: str) -> None:
    class Looks(BalancedSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            return super().create_global_plan(all_plans)

    run = saves(2)
    run.planners = [BalancedSavePlanner(cache_plans=False) if odd == "options" else Looks(), BalancedSavePlanner()]
    for value in (1, 2, 3):
        run.plan([{"a": torch.full((2,), value)}, {"b": torch.full((2,), value)}])
        assert [len(plan.items) for plan in run.local] == [1, 1]
        assert {key: tensor.tolist() for key, tensor in run.content().items()} == {"a": [value] * 2, "b": [value] * 2}


def test_cached_plans_hold_no_value_of_an_earlier_save(saves: Callable[..., Saves]) -> None:
    first = model()
    gone = weakref.ref(first["model"]["w"])
    run = saves(2).plan([first, first])
    run.content()
    del first
    run.plan([model(), model()])
    assert [len(plan.items) for plan in run.local] == [0, 0]
    gc.collect()
    assert gone() is None


def test_two_planners_share_nothing(saves: Callable[..., Saves]) -> None:
    saves(1).plan([model()])
    run = saves(1).plan([model()])
    assert len(run.local[0].items) == 4


def test_a_planner_keeps_its_part_of_a_plan_in_a_smaller_group(saves: Callable[..., Saves]) -> None:
    """The middle rank sits out: the last one moves up, and must not get the middle one's items."""
    run = saves(3)
    states = [{f"stage{rank}": torch.full((2,), float(rank))} for rank in range(3)]
    run.plan(states)
    two = saves(2)
    two.planners = [run.planners[0], run.planners[2]]
    two.plan([states[0], states[2]])
    assert two.written() == [["stage0"], ["stage2"]]
    assert two.content()["stage2"].tolist() == [2, 2]
    run.plan(states)
    assert run.written() == [["stage0"], ["stage1"], ["stage2"]]


def test_foreign_writers_see_every_item_at_every_save(saves: Callable[..., Saves]) -> None:
    run = saves(2, engine=False).plan([model(), model()]).plan([model(), model()])
    assert [len(plan.items) for plan in run.local] == [4, 4]
    assert sum(len(plan.items) for plan in run.sent) == 5


class HalvedFrom(Halved):
    """Changes its mind after the first save."""

    dtype = torch.float32

    def create_local_plan(self) -> SavePlan:
        plan = BalancedSavePlanner.create_local_plan(self)
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = self.dtype
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = BalancedSavePlanner.resolve_data(self, write_item)
        return value.to(self.dtype) if isinstance(value, torch.Tensor) else value


def test_a_subclass_may_plan_otherwise_at_each_save(saves: Callable[..., Saves]) -> None:
    planner = HalvedFrom()
    run = saves(1)
    run.planners = [planner]
    for dtype in (torch.float32, torch.float16):
        planner.dtype = dtype
        assert run.plan([model()]).content()["model.w"].dtype == dtype
        entry = run.metadata.state_dict_metadata["model.w"]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.properties.dtype == dtype


def test_a_method_that_was_patched_in_counts_as_one_of_a_subclass(saves: Callable[..., Saves]) -> None:
    run = saves(1)
    planner = run.planners[0]
    genuine = planner.transform_object

    def doubled(write_item: WriteItem, value: Any) -> Any:
        return genuine(write_item, value) * (2 if write_item.index.fqn == "b" else 1)

    planner.transform_object = doubled  # type: ignore[method-assign]
    tied = torch.ones(3)
    content = run.plan([{"a": tied, "b": tied}]).content()
    assert {key: value.tolist() for key, value in content.items()} == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_caching_can_be_switched_off(saves: Callable[..., Saves]) -> None:
    run = saves(1, cache_plans=False).plan([model()]).plan([model()])
    assert len(run.local[0].items) == 4


def test_a_planner_is_pickled_without_the_state(saves: Callable[..., Saves]) -> None:
    run = saves(1, replica_policy={"x": "lowest_rank"}).plan([{"big": torch.zeros(100_000)}])
    data = pickle.dumps(run.planners[0])
    assert len(data) < 5_000
    run.planners = [pickle.loads(data)]
    assert run.plan([model()]).content()["lr"] == 0.5


def test_another_planner_on_some_rank_is_noticed(saves: Callable[..., Saves]) -> None:
    planner = saves(2).planners[0]
    planner.set_up_planner(model(), EngineStorageMeta(), True)
    other = dcp.DefaultSavePlanner()
    other.set_up_planner(model())
    with pytest.raises(PlanError) as caught:
        planner.create_global_plan([planner.create_local_plan(), other.create_local_plan()])
    assert caught.value.rank == 1
    with pytest.raises(PlanError, match="coordinator"):
        planner.finish_plan(SavePlan([]))


def test_items_left_out_of_a_plan_are_noticed(saves: Callable[..., Saves]) -> None:
    planner = saves(1).planners[0]
    planner.set_up_planner(model(), EngineStorageMeta(), True)
    plan = planner.create_local_plan()
    with pytest.raises(PlanError, match="state dict"):
        planner.create_global_plan([SavePlan(plan.items[1:], planner_data=plan.planner_data)])


@pytest.mark.parametrize("options", [{"split_bytes": 0}, {"split_bytes": True}, {"replica_policy": {"*": "mean"}}])
def test_invalid_options_say_what_is_valid(options: Any) -> None:
    with pytest.raises(InvalidOptionError, match="expected"):
        BalancedSavePlanner(**options)


def test_many_shards_of_many_tensors_are_planned(saves: Callable[..., Saves]) -> None:
    num_ranks, num_tensors = 64, 256
    run = saves(num_ranks)
    states = [{f"t{i}": part((num_ranks, 4), (rank, 0), torch.ones(1, 4)) for i in range(num_tensors)} for rank in range(num_ranks)]
    run.plan(states)
    assert all(len(plan.items) == num_tensors for plan in run.final)
