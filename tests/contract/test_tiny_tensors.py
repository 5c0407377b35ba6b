"""Tiny tensors are planned and read by columns: with the values, errors and extension points that all tensors have."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.engine import load, refused, save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_engine import ReshardLoadPlanner, ShardReader
from dcp_engine.errors import (
    DigestMismatchError,
    DtypeMismatchError,
    KeyMismatchError,
    ReplicaMismatchError,
    ShapeMismatchError,
    UnsupportedTensorError,
)
from dcp_engine.storage import dtypes
from dcp_engine.storage.limits import HEADER_BYTES, PACK_BYTES
from dcp_engine.stored_tensors import ColumnItems

DTYPES = [info.torch_dtype for info in (dtypes.of_code(code) for code in (*range(1, 10), *range(16, 20), *range(24, 29), 32, 33, 34))]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tiny_state(num: int = 60) -> dict[str, Any]:
    """Scalars, vectors and matrices of every dtype, an object, an empty tensor, and one that is too large to share a block."""
    generator = np.random.default_rng(7)
    tensors: dict[str, Any] = {}
    for number in range(num):
        dtype = DTYPES[number % len(DTYPES)]
        shape = ((), (1,), (3,), (2, 5), (4, 1, 2))[number % 5]
        patterns = torch.from_numpy(generator.integers(0, 2, 16 * 16, dtype=np.uint8))
        tensors[f"layer.{number}"] = patterns.view(dtype)[: max(1, int(np.prod(shape)))].reshape(shape).clone()
    return {
        "model": {**tensors, "empty": torch.zeros(0, 3), "large": torch.arange(PACK_BYTES // 4, dtype=torch.float32)},
        "steps": [1, 2, 3],
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}, "steps": None}


def planned(state: dict[str, Any], path: Path, planner: ReshardLoadPlanner | None = None) -> tuple[ReshardLoadPlanner, LoadPlan]:
    """A planner and its local plan."""
    planner = planner or ReshardLoadPlanner()
    planner.set_up_planner(state, ShardReader(path).read_metadata(), is_coordinator=True)
    return planner, planner.create_local_plan()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path, state = tmp_path_factory.mktemp("tiny") / "a", tiny_state()
    save(state, path)
    return path, state


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
def test_columns_and_single_items_load_the_same_bits(tmp_path: Path, codec: str) -> None:
    state = tiny_state()
    save(state, tmp_path / "a", codec=codec)
    columns, single = blank(state), blank(state)
    load(columns, tmp_path / "a")
    load(single, tmp_path / "a", planner=Committing())
    for key, value in state["model"].items():
        assert torch.equal(bits(columns["model"][key]), bits(value)), key
        assert torch.equal(bits(single["model"][key]), bits(value)), key
    assert columns["steps"] == single["steps"] == [1, 2, 3]


def test_all_tensors_with_elements_are_planned_by_columns(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    _, plan = planned(blank(state), path)
    assert isinstance(plan.items, ColumnItems)
    assert len(plan.items.whole.tensors) == 61
    assert [item.dest_index.fqn for item in plan.items.rest] == ["steps"]


def test_columns_read_as_the_items_that_they_stand_for(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    _, columns = planned(blank(state), path)
    _, single = planned(blank(state), path, Committing())
    assert type(single.items) is list
    assert len(columns.items) == len(single.items) == 62
    assert sorted(columns.items, key=repr) == sorted(single.items, key=repr)
    by_key = {item.dest_index.fqn: item for item in single.items}
    assert columns.items[3] == by_key["model.layer.3"]
    assert columns.items[-1] == by_key["steps"]
    assert columns.items[1:3] == [columns.items[1], columns.items[2]]


def test_columns_stay_at_home_when_a_plan_travels(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    planner, plan = planned(blank(state), path)
    travelled = pickle.loads(pickle.dumps(planner.create_global_plan([pickle.loads(pickle.dumps(plan))])[0]))
    assert list(travelled.items) == []
    assert planner.finish_plan(travelled).items is plan.items


def test_the_report_counts_columns(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    planner = ReshardLoadPlanner()
    load(blank(state), path, planner=planner)
    assert planner.report.loaded == (*(f"model.{key}" for key in state["model"]), "steps")
    assert planner.report.num_tensor_bytes == sum(value.nbytes for value in state["model"].values())


class Committing(ReshardLoadPlanner):
    """Notes what is committed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.committed: list[str] = []

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)
        super().commit_tensor(read_item, tensor)


class Elsewhere(ReshardLoadPlanner):
    """Fills tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, torch.Tensor] = {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.own.setdefault(index.fqn, torch.zeros_like(super().lookup_tensor(index)))


class Transforming(ReshardLoadPlanner):
    """Looks at what it is asked to transform."""

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        self.seen = read_item.dest_index.fqn
        return super().transform_tensor(read_item, tensor)


class Reordering(ReshardLoadPlanner):
    """Sorts the items of the final plan."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        plan.items.sort(key=lambda item: item.dest_index.fqn, reverse=True)
        return plan


def test_a_subclass_that_commits_is_asked_for_every_tensor(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    planner = Committing()
    load(blank(state), path, planner=planner)
    assert sorted(planner.committed) == sorted(f"model.{key}" for key in state["model"] if key != "empty")


def test_a_subclass_that_looks_tensors_up_decides_where_they_go(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    planner, target = Elsewhere(), blank(state)
    load(target, path, planner=planner)
    assert torch.equal(bits(planner.own["model.layer.7"]), bits(state["model"]["layer.7"]))
    assert not bits(target["model"]["layer.7"]).any()


@pytest.mark.parametrize("planner", [Transforming, Reordering])
def test_subclasses_that_transform_or_finish_get_their_items(saved: tuple[Path, dict[str, Any]], planner: Any) -> None:
    path, state = saved
    target = blank(state)
    load(target, path, planner=planner())
    assert all(torch.equal(bits(target["model"][key]), bits(value)) for key, value in state["model"].items())


def test_a_method_patched_into_a_planner_is_called(saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    path, state = saved
    planner, committed = ReshardLoadPlanner(), []
    monkeypatch.setattr(planner, "commit_tensor", lambda item, tensor: committed.append(item.dest_index.fqn))
    load(blank(state), path, planner=planner)
    assert len(committed) == 61


def test_a_stock_planner_reads_the_same_values(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    target = blank(state)
    dcp.load(target, storage_reader=ShardReader(path))
    assert all(torch.equal(bits(target["model"][key]), bits(value)) for key, value in state["model"].items())


def test_targets_in_any_layout_are_filled(tmp_path: Path) -> None:
    save(
        {"row": torch.arange(3.0), "z": torch.tensor([1 + 2j, 3 - 4j]), "n": torch.tensor([5.0]), "p": torch.tensor([7.0])}, tmp_path / "a"
    )
    strided = torch.zeros(6)[::2]
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    negative = torch.zeros(1, dtype=torch.complex64).conj().imag
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert negative.is_neg()
    load({"row": strided, "z": conjugate, "n": negative, "p": parameter}, tmp_path / "a")
    assert strided.tolist() == [0, 1, 2]
    assert conjugate.tolist() == [1 + 2j, 3 - 4j]
    assert negative.tolist() == [5]
    assert parameter.tolist() == [7]


def test_autograd_knows_that_a_tensor_was_filled(tmp_path: Path) -> None:
    save({"w": torch.tensor([2.0])}, tmp_path / "a")
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    loss = (weight * weight).sum()
    load({"w": weight}, tmp_path / "a")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_meta_tensors_get_memory_beside_columns(tmp_path: Path) -> None:
    save({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}, tmp_path / "a")
    state = load({"a": torch.zeros(()), "b": torch.zeros((), device="meta")}, tmp_path / "a", device="cpu")
    assert (state["a"].item(), state["b"].item()) == (1, 2)


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    save({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "d": torch.zeros(())}, tmp_path / "a")
    error = refused(load, {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(4), "d": torch.zeros(1)}, tmp_path / "a")
    assert isinstance(error, ShapeMismatchError)
    assert all(f"'{key}'" in error.message for key in "acd")
    assert "'b'" not in error.message
    error = refused(load, {key: torch.zeros(2 if key != "d" else (), dtype=torch.float64) for key in "abcd"}, tmp_path / "a")
    assert isinstance(error, DtypeMismatchError)
    assert error.tensor == "a"
    error = refused(load, {**{key: torch.zeros(2) for key in "abc"}, "d": torch.zeros(()).to_sparse()}, tmp_path / "a")
    assert isinstance(error, UnsupportedTensorError)
    assert error.tensor == "d"


def test_tied_targets_with_two_stored_values_are_refused(tmp_path: Path) -> None:
    save({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "a")
    shared = torch.zeros(2)
    error = refused(load, {"a": shared, "b": shared, "c": torch.zeros(2)}, tmp_path / "a")
    assert isinstance(error, ReplicaMismatchError)
    assert error.keys == ("a", "b")


def test_a_small_tensor_tied_to_one_that_is_planned_apart_is_compared(tmp_path: Path) -> None:
    """``b`` is cast, so it is not read by columns, and its memory begins where that of ``a`` does."""
    save({"a": torch.zeros(2), "b": torch.ones(2, dtype=torch.float64)}, tmp_path / "a")
    shared = torch.full((2,), 9.0)
    error = refused(load, {"a": shared, "b": shared}, tmp_path / "a", dtype="cast")
    assert isinstance(error, ReplicaMismatchError)


def test_ties_of_the_checkpoint_fill_both_tensors(tmp_path: Path) -> None:
    shared = torch.tensor([1.0, 2.0])
    save({"embed": shared, "head": shared, "other": torch.tensor(3.0)}, tmp_path / "a")
    apart = load({"embed": torch.zeros(2), "head": torch.zeros(2), "other": torch.zeros(())}, tmp_path / "a")
    assert (apart["embed"].tolist(), apart["head"].tolist(), apart["other"].item()) == ([1, 2], [1, 2], 3)
    memory = torch.zeros(2)
    load({"embed": memory, "head": memory, "other": torch.zeros(())}, tmp_path / "a")
    assert memory.tolist() == [1, 2]


def test_missing_keys_are_named_and_ties_of_loaded_ones_are_not_missing(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path / "a")
    shared = torch.zeros(2)
    planner = ReshardLoadPlanner()
    load({"a": shared, "tied": shared}, tmp_path / "a", planner=planner)
    assert (planner.report.missing, shared.tolist()) == ((), [1, 1])
    error = refused(load, {"a": shared, "new": torch.zeros(2)}, tmp_path / "a")
    assert isinstance(error, KeyMismatchError)
    assert error.missing == ("new",)


def test_selection_and_lookup_after_the_plan_know_the_columns(tmp_path: Path) -> None:
    save({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}, tmp_path / "a")
    state = {"a": torch.nn.Parameter(torch.zeros(())), "b": torch.zeros(())}
    planner, plan = planned(state, tmp_path / "a", ReshardLoadPlanner(keys=["a"]))
    assert [item.dest_index.fqn for item in plan.items] == ["a"]
    found = planner.resolve_tensor(plan.items[0])
    assert found.data_ptr() == state["a"].data_ptr()
    assert not found.requires_grad


def test_damage_to_a_shared_block_names_file_tensor_and_block(tmp_path: Path) -> None:
    save({f"t{number}": torch.full((4,), float(number)) for number in range(10)}, tmp_path / "a", codec="raw")
    shard = tmp_path / "a" / "model-00000.shard"
    data = bytearray(shard.read_bytes())
    data[HEADER_BYTES + 50] ^= 1
    shard.write_bytes(data)
    error = refused(load, {f"t{number}": torch.zeros(4) for number in range(10)}, tmp_path / "a")
    assert isinstance(error, DigestMismatchError)
    assert (error.file, error.tensor) == ("model-00000.shard", "t0")
    assert "block 0 (of this tensor and 9 more requests)" in error.message
    assert error.path == str(tmp_path / "a")


def test_columns_of_another_reader_are_read_as_items(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    target = blank(state)
    planner, plan = planned(target, path)
    final = planner.finish_plan(planner.create_global_plan([plan])[0])
    ShardReader(path).read_data(final, planner)
    assert all(torch.equal(bits(target["model"][key]), bits(value)) for key, value in state["model"].items())
