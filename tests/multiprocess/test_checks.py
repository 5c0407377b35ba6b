"""Checks after a restore on real ranks: what one rank alone has lost is named with the rank, and other layouts are told apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_engine import PerRank, ReshardLoadPlanner, ResumableSampler, ShardReader, ShardWriter, TrainState
from dcp_engine.checkpointer.checks import Finding, check_probe, check_restored, merged
from dcp_engine.checkpointer.cut import facts_of
from dcp_engine.checkpointer.probe import ProbeRecord, compare, run_probe
from dcp_engine.checkpointer.read_back import read_back
from dcp_engine.checkpointer.recorded import Recorded, recorded
from dcp_engine.checkpointer.report import RestoreLevel, Verdict, decide_level
from dcp_engine.checkpointer.rng_guard import generators_of

NUM_STEPS = 3
GLOBAL_BATCH = 8


class Run:
    """A model in some layout, whose ranks draw noise of their own and take parts of one order of samples."""

    def __init__(self, layout: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(dist.get_rank() + seed)
        size = dist.get_world_size()
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        mesh = init_device_mesh("cpu", (size,))
        if layout == "fsdp":
            model = fully_shard(model, mesh=mesh)
        elif layout == "tp":
            model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            model = nn.parallel.DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        self.sampler = ResumableSampler(64, batch_size=GLOBAL_BATCH // size, seed=5)
        self.mine = PerRank([dist.get_rank()])
        self.state = TrainState(model, self.optimizer, data=self.sampler, extras={"mine": self.mine})
        torch.manual_seed(seed * 100 + dist.get_rank())

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            noise = torch.randn(4) + random.random()
            dist.all_reduce(noise)
            self.sampler.consumed()
            self.model(noise.expand(4, 4)).square().mean().backward()
            self.state.counters.micro_batch(samples=GLOBAL_BATCH)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.counters.update()

    def probe(self) -> ProbeRecord:
        def loss() -> tuple[Any, Any]:
            output = self.model(torch.linspace(-1, 1, 8).reshape(2, 4))
            return output, output.square().mean()

        return run_probe(loss, modules=self.state.parts("model").values(), generators=generators_of(self.state))


def save_and_note(layout: str, path: str) -> dict[str, Any]:
    run = Run(layout, seed=0)
    run.train(NUM_STEPS)
    note = recorded(run.state, NUM_STEPS, world_size=dist.get_world_size(), probe=run.probe())
    save({"state": run.state}, storage_writer=ShardWriter(path))
    return note.as_dict()


def draw(run: Run) -> None:
    torch.rand(1)


def forget_mine(run: Run) -> None:
    run.mine.value = []


def forget_a_moment(run: Run) -> None:
    for slots in run.optimizer.state.values():
        slots["exp_avg_sq"] = torch.zeros_like(slots["exp_avg_sq"])


def restore_and_check(
    layout: str, path: str, note: dict[str, Any], tamper: Callable[[Run], None] | None
) -> tuple[tuple[Finding, ...], Verdict]:
    run, saved = Run(layout, seed=1), Recorded.from_dict(note)
    reader, planner = ShardReader(path), ReshardLoadPlanner()
    run.state.prepare(reader)
    loaded = {"state": run.state.state_dict()}
    load(loaded, storage_reader=reader, planner=planner)
    run.state.load_state_dict(loaded["state"])
    if tamper is not None and dist.get_rank() == 1:
        tamper(run)
    now = recorded(run.state, NUM_STEPS, world_size=dist.get_world_size(), wait_for_device=True)
    assert run.state.report is not None
    mine = check_restored(
        saved,
        now,
        restored=run.state.components,
        rank=dist.get_rank(),
        report=run.state.report,
        load_report=planner.report,
        read_back=read_back(run.state, loaded["state"]),
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert saved.probe is not None
    same = (saved.world_size, saved.layout) == (now.world_size, now.layout)
    result = compare(saved.probe, run.probe(), same_topology=same)
    findings = (*merged(everyone), *check_probe(result, was_recorded=True))
    return findings, decide_level(restored=run.state.components, findings=findings)


def outcome(
    ranks: RankPool, tmp_path: Path, saved: tuple[str, int], restored: tuple[str, int], tamper: Callable[[Run], None] | None = None
) -> tuple[tuple[Finding, ...], Verdict]:
    path = str(tmp_path / "it")
    note, *_ = ranks.run(saved[1], save_and_note, saved[0], path)
    first, *others = ranks.run(restored[1], restore_and_check, restored[0], path, note, tamper)
    assert all(other == first for other in others)
    findings, verdict = first
    return findings, verdict


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_same_layout_is_bitwise(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    findings, verdict = outcome(ranks, tmp_path, (layout, 2), (layout, 2))
    assert findings == ()
    assert (verdict.level, verdict.quality) == (RestoreLevel.TRAJECTORY, "bitwise")


@pytest.mark.parametrize(
    ("tamper", "component", "level"),
    [
        (draw, "rng", RestoreLevel.PROGRESS),
        (forget_mine, "extra", RestoreLevel.RANDOMNESS),
        (forget_a_moment, "optimizer", RestoreLevel.PARAMETERS),
    ],
)
def test_what_one_rank_has_lost_is_named_with_the_rank(
    ranks: RankPool, tmp_path: Path, tamper: Callable[[Run], None], component: str, level: RestoreLevel
) -> None:
    findings, verdict = outcome(ranks, tmp_path, ("fsdp", 2), ("fsdp", 2), tamper)
    assert {(one.kind, one.component, one.severity, one.rank) for one in findings} == {("not_taken_up", component, "error", 1)}
    assert (verdict.level, verdict.quality) == (level, "recoverable")
    assert "(rank 1)" in verdict.why_not_more[0]


def test_other_placement_on_as_many_ranks_is_another_topology(ranks: RankPool, tmp_path: Path) -> None:
    findings, verdict = outcome(ranks, tmp_path, ("fsdp", 2), ("tp", 2))
    assert [(one.kind, one.rank) for one in findings] == [("topology", 0)]
    assert (verdict.level, verdict.quality) == (RestoreLevel.TRAJECTORY, "reproducible")


def test_fewer_ranks_drop_what_the_others_kept_and_say_so(ranks: RankPool, tmp_path: Path) -> None:
    findings, verdict = outcome(ranks, tmp_path, ("ddp", 3), ("fsdp", 2))
    assert [(one.kind, one.component, one.severity, one.rank) for one in findings if one.kind != "other_batches"] == [
        ("resized", "rng", "note", None),  # once, although each rank has read other ranks' values
        ("resized", "extra", "warning", None),
        ("topology", "topology", "note", None),
    ]
    assert "dropped those of ranks [2]" in next(one.text for one in findings if one.severity == "warning" and one.component == "extra")
    assert (verdict.level, verdict.quality) == (RestoreLevel.TRAJECTORY, "recoverable")


def test_ranks_that_were_not_there_have_no_random_numbers_to_continue(ranks: RankPool, tmp_path: Path) -> None:
    findings, verdict = outcome(ranks, tmp_path, ("ddp", 1), ("ddp", 2))
    assert [(one.component, one.severity) for one in findings if one.kind == "resized" and one.rank == 1] == [
        ("rng", "error"),
        ("extra", "error"),
    ]
    assert (verdict.level, verdict.quality) == (RestoreLevel.PROGRESS, "recoverable")


# -- a probe on sharded parameters ----------------------------------------------------------------------------------------


def train_with_probes(layout: str, with_probes: bool) -> tuple[list[float], list[str]]:
    run = Run(layout, seed=0)
    for _ in range(NUM_STEPS):
        run.train(1)
        if with_probes:
            run.probe()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in run.state.state_dict()["model"].items()}
    kinds = [type(parameter).__name__ for parameter in run.model.parameters()]
    return [value.sum().item() for value in whole.values()] + [random.random(), torch.rand(1).item()], kinds


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp"])
def test_probe_leaves_no_trace_in_training(ranks: RankPool, layout: str) -> None:
    assert ranks.run(2, train_with_probes, layout, True) == ranks.run(2, train_with_probes, layout, False)


def facts_of_ranks() -> dict[str, Any]:
    run = Run("fsdp", seed=0)
    run.train(2)
    return dict(facts_of(run.state, 2))


def test_facts_are_the_same_on_all_ranks(ranks: RankPool) -> None:
    one, other = ranks.run(2, facts_of_ranks)
    assert one == other
    assert (one["optimizer"], one["data.samples_consumed"], one["data.global_batch"]) == (2, 16, 8)
