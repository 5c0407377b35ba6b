"""DCP's contracts over several ranks: who runs what, sub-groups, errors that reach every rank, nothing published after a failure."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RankPool
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DcpEngineError,
    RankDisagreementError,
    ReplicaMismatchError,
    UnencodableObjectError,
    UnsupportedTensorError,
)

Outcome = tuple[str, str | None, int | None]


def outcome_of(error: CheckpointException) -> list[Outcome]:
    """Kind, tensor and rank of every failure that reached this rank."""
    found = []
    for rank, (failure, _) in sorted(error.failures.items()):
        assert isinstance(failure, DcpEngineError), failure
        found.append((failure.kind, failure.tensor, rank))
    return found


def save_and_report(state: dict[str, Any], path: str, **options: Any) -> list[Outcome]:
    try:
        dcp.save(state, storage_writer=ShardWriter(path, **options), planner=BalancedSavePlanner())
    except CheckpointException as error:
        return outcome_of(error)
    return []


class CallsWriter(ShardWriter):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.calls: list[str] = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"set_up_storage_writer rank={kwargs['rank']} coordinator={is_coordinator}")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        self.calls.append("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        self.calls.append("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.calls.append("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self.calls.append("finish")
        super().finish(metadata, results)


def record_calls(path: str) -> tuple[list[str], list[str]]:
    writer = CallsWriter(path)
    metadata = dcp.save({"x": torch.arange(4.0)}, storage_writer=writer, planner=BalancedSavePlanner())
    return writer.calls, [location.file for location in metadata.storage_data.values()]


def test_each_rank_runs_the_calls_that_are_documented_for_it(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(3, record_calls, str(tmp_path / "a"))
    for rank, (calls, _) in enumerate(results):
        first = f"set_up_storage_writer rank={rank} coordinator={rank == 0}"
        middle = ["prepare_local_plan", "prepare_global_plan"] if rank == 0 else ["prepare_local_plan"]
        assert calls == [first, *middle, "write_data", *(["finish"] if rank == 0 else [])]
    # The metadata that finish() filled on the coordinator reaches every rank.
    assert len({tuple(files) for _, files in results}) == 1
    assert results[0][1] == ["model-00000.shard"]


def save_on_subgroup(path: str) -> tuple[bool, float | None]:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return False, None
    tensor = distribute_tensor(torch.arange(10.0), DeviceMesh("cpu", [1, 2]), [Shard(0)])
    dcp.save({"x": tensor}, storage_writer=ShardWriter(path, process_group=group), planner=BalancedSavePlanner(), process_group=group)
    found = {"x": torch.zeros(10)}
    reader = ShardReader(path, process_group=group)
    dcp.load(found, storage_reader=reader, planner=ReshardLoadPlanner(), process_group=group)
    return True, float(found["x"].sum())


def test_a_subgroup_saves_and_loads_by_its_own_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, save_on_subgroup, str(tmp_path / "a")) == [(False, None), (True, 45.0), (True, 45.0)]
    assert sorted(file.name for file in (tmp_path / "a").glob("*.shard")) == ["model-00000.shard", "model-00001.shard"]


def save_with_other_group(path: str) -> list[Outcome]:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        group = None
    return save_and_report({"x": torch.zeros(2)}, path, process_group=group)


def test_a_writer_given_another_group_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, save_with_other_group, str(tmp_path / "a")) == [[("rank_disagreement", None, 0)]] * 3
    assert list(tmp_path.iterdir()) == []


def save_to_own_path(path: str) -> list[Outcome]:
    return save_and_report({"x": torch.zeros(2)}, f"{path}-{dist.get_rank()}")


def test_ranks_with_different_paths_are_told(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(2, save_to_own_path, str(tmp_path / "a"))
    assert results == [[("rank_disagreement", None, 1)]] * 2
    assert not (tmp_path / "a-0").exists()
    assert not (tmp_path / "a-1").exists()


def load_from_own_path(path: str) -> list[Outcome]:
    try:
        dcp.load({"x": torch.zeros(2)}, storage_reader=ShardReader(f"{path}-{dist.get_rank()}"), planner=ReshardLoadPlanner())
    except CheckpointException as error:
        return outcome_of(error)
    return []


def test_ranks_that_open_different_checkpoints_are_told(ranks: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        dcp.save({"x": torch.zeros(2)}, storage_writer=ShardWriter(tmp_path / f"a-{rank}"), planner=BalancedSavePlanner())
    assert ranks.run(2, load_from_own_path, str(tmp_path / "a")) == [[(RankDisagreementError.kind, None, 0)]] * 2


def load_missing(path: str, with_group: bool) -> list[Outcome]:
    group = dist.new_group([0, 1]) if with_group else None
    try:
        reader = ShardReader(path, process_group=group)
        dcp.load({"x": torch.zeros(2)}, storage_reader=reader, planner=ReshardLoadPlanner(), process_group=group)
    except CheckpointException as error:
        return outcome_of(error)
    return []


@pytest.mark.parametrize("with_group", [False, True])
def test_a_missing_checkpoint_is_our_error_on_every_rank(ranks: RankPool, tmp_path: Path, with_group: bool) -> None:
    expected = [(CheckpointNotFoundError.kind, None, 0), (CheckpointNotFoundError.kind, None, 1)]
    assert ranks.run(2, load_missing, str(tmp_path / "none"), with_group) == [expected] * 2


def save_one_bad_object(path: str) -> list[Outcome]:
    value: Any = threading.Lock() if dist.get_rank() == 1 else 5
    return save_and_report({"x": torch.zeros(2), "value": value}, path)


def test_an_object_that_cannot_be_stored_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(3, save_one_bad_object, str(tmp_path / "a"))
    assert results == [[(UnencodableObjectError.kind, "value", 1)]] * 3
    assert list(tmp_path.iterdir()) == []


def save_partial(path: str) -> list[Outcome]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return save_and_report({"ok": torch.zeros(2), "p": DTensor.from_local(torch.ones(3), mesh, [Partial()])}, path)


def test_a_partial_dtensor_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(3, save_partial, str(tmp_path / "a"))
    assert results == [[(UnsupportedTensorError.kind, "p", rank) for rank in range(3)]] * 3
    assert list(tmp_path.iterdir()) == []


def save_unequal(path: str, what: str) -> tuple[list[Outcome], Any, str]:
    rank = dist.get_rank()
    value: Any = {
        "content": lambda: torch.full((4,), float(rank == 2)),
        "shape": lambda: torch.zeros(4 + (rank == 2)),
        "dtype": lambda: torch.zeros(4, dtype=torch.float64 if rank == 2 else torch.float32),
        "kind": lambda: 0.0 if rank == 2 else torch.zeros(()),
        "object": lambda: {"seed": int(rank == 2)},
    }[what]()
    key = "value.seed" if what == "object" else "value"
    try:
        dcp.save({"value": value}, storage_writer=ShardWriter(path), planner=BalancedSavePlanner())
    except CheckpointException as error:
        failure = error.failures[0][0]
        assert isinstance(failure, ReplicaMismatchError), failure
        assert failure.keys == (key,)
        return outcome_of(error), failure.ranks, str(failure)
    return [], None, ""


@pytest.mark.parametrize("what", ["content", "shape", "dtype", "kind", "object"])
def test_unequal_replicas_are_an_error_that_names_key_and_ranks(ranks: RankPool, tmp_path: Path, what: str) -> None:
    results = ranks.run(3, save_unequal, str(tmp_path / "a"), what)
    assert [outcomes[0][0] for outcomes, _, _ in results] == [ReplicaMismatchError.kind] * 3
    assert {found for _, found, _ in results} == {(((0, 1), (2,)),)}
    assert "replica_policy" in results[0][2]
    assert list(tmp_path.iterdir()) == []


def save_unequal_by_policy(path: str) -> float:
    state = {"bn.running_mean": torch.full((4,), 1.0 + dist.get_rank()), "w": torch.zeros(3)}
    planner = BalancedSavePlanner(replica_policy={"*.running_mean": "lowest_rank"})
    dcp.save(state, storage_writer=ShardWriter(path), planner=planner)
    found = {"bn.running_mean": torch.zeros(4), "w": torch.ones(3)}
    dcp.load(found, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    return float(found["bn.running_mean"].sum())


def test_what_may_differ_is_taken_from_the_lowest_rank(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, save_unequal_by_policy, str(tmp_path / "a")) == [4.0, 4.0, 4.0]


def bytes_by_rank(path: str) -> list[int]:
    state = {"big": torch.arange(2_000_000.0), **{f"small.{i}": torch.full((1000,), float(i)) for i in range(40)}}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state["replicated"] = distribute_tensor(torch.arange(500_000.0), mesh, [Replicate()])
    metadata = dcp.save(state, storage_writer=ShardWriter(path, codec="raw"), planner=BalancedSavePlanner())
    written = [0] * dist.get_world_size()
    for location in metadata.storage_data.values():
        written[int(location.file.rpartition("-")[2].removesuffix(".shard"))] += location.nbytes
    return written


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_share_the_writing(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    total = 4 * (2_000_000 + 40 * 1000 + 500_000)
    written = ranks.run(world_size, bytes_by_rank, str(tmp_path / "a"))[0]
    assert sum(written) == total
    assert max(written) <= 1.05 * total / world_size


def save_twice(path: str) -> list[Outcome]:
    assert save_and_report({"x": torch.ones(2)}, path) == []
    return save_and_report({"x": torch.zeros(2)}, path)


def test_an_existing_step_stays_and_every_rank_is_told(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, save_twice, str(tmp_path / "step-00000001")) == [[(CheckpointExistsError.kind, None, 0)]] * 2
    found = {"x": torch.zeros(2)}
    dcp.load(found, storage_reader=ShardReader(tmp_path / "step-00000001"), planner=ReshardLoadPlanner())
    assert torch.equal(found["x"], torch.ones(2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def save_async(path: str) -> list[float]:
    group = dist.new_group(backend="gloo")
    tensor = torch.zeros(1000)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for step in range(3):
        tensor.fill_(float(step))
        state = {"x": tensor, "s": distribute_tensor(torch.full((7,), float(step)), mesh, [Shard(0)])}
        writer = ShardWriter(f"{path}/step-{step:08d}")
        future = dcp.async_save(state, storage_writer=writer, planner=BalancedSavePlanner(), process_group=group)
        tensor.fill_(-1.0)
        dist.barrier()
        future.result()  # type: ignore[union-attr]
    sums = []
    for step in range(3):
        found = {"x": torch.zeros(1000), "s": torch.zeros(7)}
        dcp.load(found, storage_reader=ShardReader(f"{path}/step-{step:08d}"), planner=ReshardLoadPlanner())
        sums.append(float(found["x"].sum() + found["s"].sum()))
    return sums


def test_async_saves_hold_what_was_there_when_they_were_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, save_async, str(tmp_path)) == [[0.0, 1007.0, 2014.0]] * 3


def save_with_stock_planner(path: str) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"r": torch.arange(9.0), "s": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]), "o": {"k": [1, 2]}}
    metadata = dcp.save(state, storage_writer=ShardWriter(path), planner=DefaultSavePlanner())
    assert metadata.storage_data[MetadataIndex("r", (0,))].nbytes == 36
    found: dict[str, Any] = {"r": torch.zeros(9), "s": torch.zeros(10), "o": {"k": []}}
    dcp.load(found, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    assert found["o"]["k"] == [1, 2]
    return [float(found["r"].sum()), float(found["s"].sum())]


def test_stock_planner_with_our_writer_over_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, save_with_stock_planner, str(tmp_path / "a")) == [[36.0, 45.0]] * 3
