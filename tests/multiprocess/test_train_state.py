"""``TrainState`` on real ranks: DDP, FSDP2 and tensor parallelism, other layouts, other numbers of ranks, values of each rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailure, RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_engine import PerRank, ReshardLoadPlanner, ShardReader, ShardWriter, TrainState
from dcp_engine.errors import KeyMismatchError
from dcp_engine.train_state import TrainStateReport, differences

LAYOUTS = ["plain", "ddp", "fsdp", "tp"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)
        self.never = nn.Parameter(torch.ones(5))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


class Run:
    """A model in some layout. Every rank draws noise of its own, and the mean over the ranks goes into the loss of all."""

    def __init__(self, layout: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        model: nn.Module = Net()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if layout == "fsdp":
            model = fully_shard(model, mesh=mesh)
        elif layout == "tp":
            model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif layout == "ddp":
            model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        self.model = model
        net = model.module if layout == "ddp" else model
        groups = [
            {"params": list(net.up.parameters()), "lr": torch.tensor(0.02)},
            {"params": []},
            {"params": [*net.down.parameters(), net.never]},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.mine = PerRank([dist.get_rank()])
        torch.manual_seed(seed * 100 + dist.get_rank())
        random.seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        self.state = TrainState(model, self.optimizer, schedulers=self.scheduler, extras={"mine": self.mine})
        self.trace: list[float] = []

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            noise = torch.randn(6) + random.random() + float(np.random.rand())
            dist.all_reduce(noise)
            loss = self.model(noise.expand(4, 6)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.state.counters.update(loss=loss.item())
            self.mine.value = [*self.mine.value, self.state.counters.step]
            self.trace.append(loss.item())


def train_and_save(layout: str, path: str, steps: int) -> list[float]:
    run = Run(layout, seed=0)
    run.train(steps)
    save({"state": run.state}, storage_writer=ShardWriter(path))
    return run.trace


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Model and optimizer slots as plain tensors."""
    parts = {**{f"model.{name}": value for name, value in state["model"].items()}}
    for name, slots in state["optimizer"]["state"].items():
        parts |= {f"{name}.{slot}": value for slot, value in slots.items() if state["optimizer"]["membership"][name][1]}
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone() for name, value in parts.items()}


def resume_equals_unbroken(layout: str, path: str) -> tuple[TrainStateReport, list[str]]:
    unbroken = Run(layout, seed=0)
    unbroken.train(5)
    end = copy.deepcopy(unbroken.state.state_dict())
    train_and_save(layout, path, 3)
    resumed = Run(layout, seed=1)
    report = resumed.state.load(ShardReader(path))
    resumed.train(2)
    assert resumed.trace == unbroken.trace[3:]
    assert resumed.mine.value == [dist.get_rank(), 1, 2, 3, 4, 5]
    return report, [str(one) for one in differences(end, resumed.state.state_dict())]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_ranks_are_those_that_never_stopped(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    for report, found in ranks.run(2, resume_equals_unbroken, layout, str(tmp_path / "it")):
        assert found == []
        assert report.unstarted == ("never",)
        assert report.resized == ()


def load_whole(layout: str, path: str) -> tuple[TrainStateReport, dict[str, Any], dict[str, Any]]:
    run = Run(layout, seed=1)
    report = run.state.load(ShardReader(path))
    return report, whole(run.state.state_dict()), {"mine": run.mine.value, "draw": torch.rand(1).item(), "python": random.random()}


def save_whole(layout: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    run = Run(layout, seed=0)
    run.train(3)
    save({"state": run.state}, storage_writer=ShardWriter(path))
    return whole(run.state.state_dict()), {"mine": run.mine.value, "draw": torch.rand(1).item(), "python": random.random()}


@pytest.mark.parametrize(("source", "target"), [("fsdp", "ddp"), ("ddp", "tp"), ("tp", "fsdp")])
def test_any_layout_loads_any_other(ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    saved, _ = ranks.run(4, save_whole, source, str(tmp_path / "it"))[0]
    for report, loaded, _ in ranks.run(2, load_whole, target, str(tmp_path / "it")):
        assert loaded.keys() == saved.keys()
        assert [name for name, value in saved.items() if not torch.equal(value, loaded[name])] == []
        assert report.moved == ()


def resave(path: str, target: str) -> list[TrainStateReport]:
    run = Run("ddp", seed=1)
    report = run.state.load(ShardReader(path))
    save({"state": run.state}, storage_writer=ShardWriter(target))
    return [report]


def test_values_of_each_rank_over_four_two_and_four_ranks(ranks: RankPool, tmp_path: Path) -> None:
    four, two = str(tmp_path / "four"), str(tmp_path / "two")
    saved = [values for _, values in ranks.run(4, save_whole, "ddp", four)]
    assert len({values["draw"] for values in saved}) == 4
    same = ranks.run(4, load_whole, "ddp", four)
    assert [values for _, _, values in same] == saved
    reports = [report for (report,) in ranks.run(2, resave, four, two)]
    assert [[(one.key, one.took, one.dropped) for one in report.resized] for report in reports] == [
        [("extra.mine", "by rank", (2,)), ("rng", "by rank", (2,))],
        [("extra.mine", "by rank", (3,)), ("rng", "by rank", (3,))],
    ]
    back = ranks.run(4, load_whole, "ddp", two)
    assert [values for _, _, values in back[:2]] == saved[:2]
    assert [values["mine"] for _, _, values in back[2:]] == [[2], [3]]
    assert [[one.took for one in report.resized] for report, _, _ in back] == [["by rank"] * 2] * 2 + [["nothing"] * 2] * 2


def spread(values: Mapping[int, Any], rank: int, world_size: int) -> list[int]:
    everything = [item for one in sorted(values) for item in values[one]]
    return everything[rank::world_size]


def with_function(path: str, saves: bool) -> Any:
    mine = PerRank([10 * dist.get_rank(), 10 * dist.get_rank() + 1], on_resize=spread)
    state = TrainState(extras={"mine": mine}, rng=False)
    if saves:
        save({"state": state}, storage_writer=ShardWriter(path))
        return None
    report = state.load(ShardReader(path))
    return mine.value, [one.took for one in report.resized]


@pytest.mark.parametrize(("world_size", "expected"), [(2, [[0, 10, 20], [1, 11, 21]]), (4, [[0, 20], [1, 21], [10], [11]])])
def test_function_decides_for_another_number_of_ranks(ranks: RankPool, tmp_path: Path, world_size: int, expected: list[list[int]]) -> None:
    ranks.run(3, with_function, str(tmp_path / "it"), True)
    assert ranks.run(world_size, with_function, str(tmp_path / "it"), False) == [(value, ["by function"]) for value in expected]


def load_unprepared(path: str) -> None:
    load({"state": Run("ddp", seed=1).state}, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())


def test_plain_load_says_which_ranks_values_have_no_taker(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "it")
    ranks.run(3, save_whole, "ddp", path)
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, load_unprepared, path)
    error = caught.value.failures[0].failures[0][0]  # type: ignore[union-attr]
    assert isinstance(error, KeyMismatchError)
    assert error.unexpected == ("state.extra.mine.rank-00002", "state.rng.rank-00002")


class Stage(nn.Module):
    """One part of a pipeline, with the names that its layers have in the whole."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(2, 2) for layer in layers})


def pipeline(path: str, layers_by_rank: list[list[list[int]]], saves: bool) -> dict[str, float]:
    """Each rank has its own parts; a parameter's value, and its slots, tell the layer."""
    parts = [Stage(layers) for layers in layers_by_rank[dist.get_rank()]]
    optimizers = torch.optim.Adam([parameter for part in parts for parameter in part.parameters()])
    state = TrainState(parts, optimizers)
    if saves:
        for part in parts:
            for name, parameter in part.named_parameters():
                parameter.grad = torch.full_like(parameter, float(name.split(".")[1]) + 1)
        optimizers.step()
        optimizers.zero_grad()
        save({"state": state}, storage_writer=ShardWriter(path))
    else:
        state.load(ShardReader(path))
    slots = state.state_dict()["optimizer"]["state"]
    return {name: round(slot["exp_avg"].flatten()[0].item(), 6) for name, slot in slots.items() if name.endswith("weight")}


def test_parts_of_a_pipeline_are_saved_and_loaded_on_other_parts(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "it")
    ranks.run(2, pipeline, path, [[[0], [2]], [[1], [3]]], True)
    (found,) = ranks.run(1, pipeline, path, [[[0, 1, 2, 3]]], False)
    assert found == {f"layers.{layer}.weight": round(0.1 * (layer + 1), 6) for layer in range(4)}


def accumulate(layout: str, path: str, micro_steps: tuple[int, int], saves: bool) -> dict[str, Any]:
    """Two micro-batches a step, each rank's its own; DDP adds up each rank's gradients and reduces at the end of a cycle."""
    run = Run(layout, seed=0 if saves else 1)
    state = TrainState(run.model, run.optimizer, grads="save", rng=False)
    if not saves:
        state.load(ShardReader(path))
    for number in range(*micro_steps):
        if layout == "ddp":
            run.model.require_backward_grad_sync = number % 2 == 1  # what no_sync() sets
        run.model(torch.full((2, 6), float(dist.get_rank() + number))).square().mean().backward()
        state.counters.micro_batch()
        if number % 2 == 1:
            run.optimizer.step()
            run.optimizer.zero_grad()
            state.counters.update()
    if saves and micro_steps[1] % 2 == 1:
        save({"state": state}, storage_writer=ShardWriter(path))
    return whole(run.state.state_dict()) if not state.counters.in_cycle else {}


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_cycle_goes_on_with_each_ranks_gradients(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "it")
    unbroken = ranks.run(2, accumulate, layout, path, (0, 4), True)
    ranks.run(2, accumulate, layout, path, (0, 3), True)
    resumed = ranks.run(2, accumulate, layout, path, (3, 4), False)
    for expected, found in zip(unbroken, resumed, strict=True):
        assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    if layout == "ddp":
        for world_size in (1, 3):
            with pytest.raises(RankFailure) as caught:
                ranks.run(world_size, accumulate, layout, path, (3, 4), False)
            assert f"expected 2 ranks; found {world_size} ranks" in str(caught.value.failures[0])
