"""Each part of a state that is not what was saved is found, and named."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_engine import (
    Counters,
    PerRank,
    ReshardLoadPlanner,
    ResumableSampler,
    ResumableStream,
    ShardReader,
    ShardWriter,
    StreamSource,
    TrainState,
)
from dcp_engine.checkpointer.checks import Finding, check_probe, check_restored
from dcp_engine.checkpointer.probe import ProbeRecord, compare, run_probe
from dcp_engine.checkpointer.read_back import ReadBack, read_back
from dcp_engine.checkpointer.recorded import Recorded, recorded
from dcp_engine.checkpointer.report import RestoreLevel, Verdict, decide_level
from dcp_engine.checkpointer.rng_guard import generators_of
from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.planners.load_report import Cast, LoadReport
from dcp_engine.train_state import TrainStateReport
from dcp_engine.train_state.report import Resized

NUM_STEPS = 6


class Queue:
    """Something that a rank keeps for itself."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Run:
    """A run that holds one of everything."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        first, *others = self.model.parameters()
        self.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others, "weight_decay": 0.2}], lr=0.01, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.sampler = ResumableSampler(100, batch_size=4, seed=3)
        self.counters = Counters()
        self.ema = deepcopy(self.model)
        self.queue = Queue()
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizers": self.optimizer,
            "schedulers": self.scheduler,
            "scaler": self.scaler,
            "data": self.sampler,
            "counters": self.counters,
            "ema": self.ema,
            "extras": {"queue": PerRank(self.queue)},
            **options,
        }
        self.state = TrainState(**{name: part for name, part in self.parts.items() if part is not None})

    def train(self, num_steps: int = NUM_STEPS) -> None:
        for _ in range(num_steps):
            x = torch.randn(4, 4) + float(np.random.rand()) + random.random()
            self.sampler.consumed()
            self.scaler.scale(self.model(x).square().mean()).backward()
            self.counters.micro_batch(samples=4)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counters.update()
            self.queue.seen += 1
            for average, parameter in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                average.data.lerp_(parameter.data, 0.1)

    def probe(self) -> ProbeRecord:
        return run_probe(
            lambda: self.model(torch.ones(2, 4)).sum(), modules=self.state.parts("model").values(), generators=generators_of(self.state)
        )


def saved(path: Path, run: Run) -> Recorded:
    """A checkpoint of a run, and what its metadata says: as it would be read again."""
    note = recorded(run.state, run.counters.step, world_size=1, probe=run.probe())
    save({"state": run.state}, storage_writer=ShardWriter(path, metadata={"checkpointer": note.as_dict()}, threads=1))
    return Recorded.from_dict(note.as_dict())


class Restored:
    """What a restore found, with something done to the run between the load and the checks."""

    def __init__(self, path: Path, note: Recorded, run: Run, tamper: Callable[[Run], object] = lambda run: None) -> None:
        reader, planner = ShardReader(path, threads=1), ReshardLoadPlanner()
        run.state.prepare(reader)
        loaded = {"state": run.state.state_dict()}
        load(loaded, storage_reader=reader, planner=planner)
        run.state.load_state_dict(loaded["state"])
        tamper(run)
        assert run.state.report is not None
        now = recorded(run.state, int(note.facts["step"]), world_size=1, wait_for_device=True)
        restored = run.state.report.components
        assert note.probe is not None
        result = compare(note.probe, run.probe(), same_topology=True)
        self.findings = check_restored(
            note,
            now,
            restored=restored,
            rank=0,
            report=run.state.report,
            load_report=planner.report,
            read_back=read_back(run.state, loaded["state"]),
        ) + check_probe(result, was_recorded=True)
        self.verdict: Verdict = decide_level(restored=restored, findings=self.findings)

    def named(self) -> set[str]:
        return {finding.component for finding in self.findings if finding.severity != "note"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorded]:
    path = tmp_path_factory.mktemp("checks") / "step-00000006"
    run = Run(seed=0)
    run.train()
    return path, saved(path, run)


def test_whole_restore_is_bitwise(checkpoint: tuple[Path, Recorded]) -> None:
    outcome = Restored(*checkpoint, Run(seed=1))
    assert outcome.findings == ()
    assert outcome.verdict == Verdict(level=RestoreLevel.TRAJECTORY, quality="bitwise", why_not_more=())


def test_checks_do_not_move_the_run(checkpoint: tuple[Path, Recorded]) -> None:
    straight = Run(seed=0)
    straight.train(NUM_STEPS + 2)
    expected = deepcopy(straight.state.state_dict())
    resumed = Run(seed=1)
    Restored(*checkpoint, resumed)
    resumed.train(2)
    assert [str(one) for one in resumed.state.differences(expected)] == []


def reset_moments(run: Run) -> None:
    run.optimizer.state.clear()


def zero_moments(run: Run) -> None:
    for slots in run.optimizer.state.values():
        slots["exp_avg"] = torch.zeros_like(slots["exp_avg"])


def other_lr(run: Run) -> None:
    run.optimizer.param_groups[1]["lr"] = 0.5


def fresh_scheduler(run: Run) -> None:
    run.scheduler.load_state_dict({**run.scheduler.state_dict(), "last_epoch": 0})


def fresh_scaler(run: Run) -> None:
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 65536.0})


def fresh_counters(run: Run) -> None:
    run.counters.load_state_dict(Counters().state_dict())


def one_batch_ahead(run: Run) -> None:
    run.sampler.consumed()


def one_batch_behind(run: Run) -> None:
    behind = ResumableSampler(100, batch_size=4, seed=3)
    behind.consumed(NUM_STEPS - 1)
    run.sampler.load_state_dict(behind.state_dict())


def other_weights(run: Run) -> None:
    run.model[0].weight.data = torch.zeros_like(run.model[0].weight)


def other_buffer(run: Run) -> None:
    run.model[1].running_mean = torch.zeros(8)


def other_averages(run: Run) -> None:
    run.ema[0].weight.data = torch.zeros(8, 4)


def other_queue(run: Run) -> None:
    run.queue.seen = 0


DRAWS: Mapping[str, Callable[[Run], object]] = {
    "torch": lambda run: torch.rand(1),
    "numpy": lambda run: np.random.rand(),
    "python": lambda run: random.random(),
}


@pytest.mark.parametrize(
    ("tamper", "component", "level", "text"),
    [
        (other_weights, "model", RestoreLevel.NONE, "model.0.weight is not what was loaded"),
        (other_buffer, "model", RestoreLevel.NONE, "model.1.running_mean is not what was loaded"),
        (reset_moments, "optimizer", RestoreLevel.PARAMETERS, "optimizer had taken 6 steps when it was saved, and has no state now"),
        (zero_moments, "optimizer", RestoreLevel.PARAMETERS, "optimizer.state.0.weight.exp_avg is not what was loaded: other values"),
        (other_lr, "optimizer", RestoreLevel.PARAMETERS, "optimizer.param_groups.1.lr is not what was loaded: 0.5 instead of"),
        (fresh_scheduler, "scheduler", RestoreLevel.OPTIMIZER, "scheduler is 0, and was 6 when it was saved"),
        (fresh_scaler, "scaler", RestoreLevel.OPTIMIZER, "scaler is 65536.0, and was 2048.0 when it was saved"),
        (fresh_counters, "progress", RestoreLevel.OPTIMIZER, "progress.step is 0, and was 6 when it was saved"),
        (one_batch_ahead, "data", RestoreLevel.RANDOMNESS, "data.samples_consumed is 28, and was 24 when it was saved"),
        (one_batch_behind, "data", RestoreLevel.RANDOMNESS, "data.samples_consumed is 20, and was 24 when it was saved"),
        (other_averages, "ema", RestoreLevel.RANDOMNESS, "ema.0.weight is not what was loaded: other values"),
        (other_queue, "extra", RestoreLevel.RANDOMNESS, "extra.queue.rank-00000.seen is not what was loaded: 0 instead of 6"),
        *((draw, "rng", RestoreLevel.PROGRESS, f"rng.rank-00000.{name}") for name, draw in DRAWS.items()),
    ],
)
def test_part_that_is_lost_after_the_load_is_named(
    checkpoint: tuple[Path, Recorded], tamper: Callable[[Run], object], component: str, level: RestoreLevel, text: str
) -> None:
    outcome = Restored(*checkpoint, Run(seed=1), tamper)
    errors = [finding.text for finding in outcome.findings if finding.severity == "error" and finding.component == component]
    assert [error for error in errors if error.startswith(text)], outcome.findings
    assert (outcome.verdict.level, outcome.verdict.quality) == (level, "recoverable")
    assert outcome.verdict.why_not_more[0].startswith(f"{component}: ")
    assert outcome.named() - {component} <= ({"probe"} if component == "model" else set())


@pytest.mark.parametrize(
    ("argument", "component"),
    [
        ("optimizers", "optimizer"),
        ("schedulers", "scheduler"),
        ("scaler", "scaler"),
        ("data", "data"),
        ("ema", "ema"),
        ("extras", "extra"),
    ],
)
def test_component_that_neither_side_has_is_none_that_was_lost(tmp_path: Path, argument: str, component: str) -> None:
    """What is mandatory is missed all the same: nothing makes the next step without it."""
    run = Run(seed=0, **{argument: None})
    run.train()
    path = tmp_path / "step-00000006"
    outcome = Restored(path, saved(path, run), Run(seed=1, **{argument: None}))
    assert outcome.findings == ()
    mandatory = {"optimizer": RestoreLevel.PARAMETERS, "data": RestoreLevel.RANDOMNESS}
    assert outcome.verdict.level == mandatory.get(component, RestoreLevel.TRAJECTORY)


def test_counters_that_nobody_moves_are_named(tmp_path: Path) -> None:
    run = Run(seed=0)
    run.train()
    run.counters.load_state_dict(Counters().state_dict())
    path = tmp_path / "step-00000006"
    note = replace(saved(path, run), facts={**recorded(run.state, 6, world_size=1).facts})
    outcome = Restored(path, note, Run(seed=1))
    assert [(one.kind, one.component, one.severity) for one in outcome.findings] == [("idle_counters", "progress", "warning")]
    assert outcome.verdict.quality == "recoverable"


def test_moments_that_were_lost_before_the_save_are_missed(tmp_path: Path) -> None:
    run = Run(seed=0)
    run.train()
    run.optimizer.state.clear()
    path = tmp_path / "step-00000006"
    outcome = Restored(path, saved(path, run), Run(seed=1))
    assert [(one.kind, one.component) for one in outcome.findings] == [("no_optimizer_state", "optimizer")]
    assert outcome.verdict.level == RestoreLevel.PARAMETERS


def test_optimizer_that_keeps_no_state_misses_none(tmp_path: Path) -> None:
    def plain(seed: int) -> Run:
        run = Run(seed)
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
        run.state = TrainState(**{**run.parts, "optimizers": run.optimizer, "schedulers": run.scheduler})
        return run

    run = plain(0)
    run.train()
    path = tmp_path / "step-00000006"
    outcome = Restored(path, saved(path, run), plain(1))
    assert (outcome.findings, outcome.verdict.quality) == ((), "bitwise")


def test_parameter_that_moved_between_groups_is_named(checkpoint: tuple[Path, Recorded]) -> None:
    run = Run(seed=1)
    first, second = run.optimizer.param_groups
    second["params"].append(first["params"].pop())
    outcome = Restored(*checkpoint, run)
    assert [(one.kind, one.component, one.severity, one.text) for one in outcome.findings] == [
        (
            "moved_parameter",
            "optimizer",
            "warning",
            "0.weight was in group 0 and is in group 1: it trains on with that group's settings",
        )
    ]
    assert (outcome.verdict.level, outcome.verdict.quality) == (RestoreLevel.TRAJECTORY, "recoverable")


def test_load_state_dict_that_does_nothing_is_named(checkpoint: tuple[Path, Recorded]) -> None:
    class Deaf(Queue):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    outcome = Restored(*checkpoint, Run(seed=1, extras={"queue": PerRank(Deaf())}))
    assert [(one.component, one.text) for one in outcome.findings] == [
        ("extra", "extra.queue.rank-00000.seen is not what was loaded: 0 instead of 6")
    ]


def read_on(stream: ResumableStream, num_samples: int) -> None:
    for _ in islice(stream, num_samples):
        pass


def stream() -> ResumableStream:
    source = StreamSource(shards=["a", "b"], read=lambda shard, offset: ((n, n + 1) for n in range(offset, 50)))
    return ResumableStream({"all": source}, rank=0, world_size=1)


@pytest.mark.parametrize("make", [stream, lambda: ResumableSampler(100, batch_size=4, seed=3)])
@pytest.mark.parametrize("per_rank", [False, True])
def test_position_of_a_stream_or_of_each_rank_is_read_back(tmp_path: Path, make: Callable[[], Any], per_rank: bool) -> None:
    """Such positions are no facts, which all ranks share."""

    def forward(run: Run) -> None:
        data = run.state.parts("data")[""]
        data = data.value if per_rank else data
        read_on(data, 8) if isinstance(data, ResumableStream) else data.consumed(2)

    def fresh(seed: int) -> Run:
        return Run(seed, data=PerRank(make()) if per_rank else make())

    run = fresh(0)
    run.train()
    forward(run)
    path = tmp_path / "step-00000006"
    note = saved(path, run)
    assert Restored(path, note, fresh(1)).findings == ()
    outcome = Restored(path, note, fresh(1), forward)
    assert outcome.named() == {"data"}
    assert {one.kind for one in outcome.findings} == {"not_taken_up" if per_rank or make is stream else "other_position"}
    assert outcome.verdict.level == RestoreLevel.RANDOMNESS


def test_other_batch_size_continues_the_order_in_other_batches(checkpoint: tuple[Path, Recorded]) -> None:
    run = Run(seed=1, data=ResumableSampler(100, batch_size=8, seed=3))
    outcome = Restored(*checkpoint, run)
    assert [(one.kind, one.severity, one.text) for one in outcome.findings] == [
        ("other_batches", "warning", "data hands out 8 samples a step over all ranks, and handed out 4")
    ]
    assert outcome.verdict.level == RestoreLevel.TRAJECTORY


def test_other_kernels_show_in_the_probe_alone(checkpoint: tuple[Path, Recorded]) -> None:
    path, note = checkpoint
    assert note.probe is not None
    (value,) = note.probe.values
    number = float(np.frombuffer(value.kept)[0])
    rounded = replace(value, sha256="0" * 64, kept=np.array([number * (1 + 1e-6)]).tobytes())
    outcome = Restored(path, replace(note, probe=ProbeRecord((rounded,))), Run(seed=1))
    assert [(one.kind, one.severity) for one in outcome.findings] == [("probe", "warning")]
    assert (outcome.verdict.level, outcome.verdict.quality) == (RestoreLevel.TRAJECTORY, "reproducible")


# -- what both sides say, without a checkpoint ----------------------------------------------------------------------------

FACTS: Mapping[str, int | float | str] = {"step": 6, "progress.step": 6, "progress.updates_applied": 6, "progress.epoch": 0, "optimizer": 6}
SIDE = Recorded(facts=FACTS, components=("model", "optimizer", "progress"), world_size=2, layout=("whole",))


def found(saved: Recorded | None, now: Recorded, **options: Any) -> list[tuple[str, str, str]]:
    options = {"restored": SIDE.components, "rank": 0, **options}
    return [(one.kind, one.component, one.severity) for one in check_restored(saved, now, **options)]


def test_equal_sides_have_nothing_to_say() -> None:
    assert found(SIDE, SIDE) == []
    assert found(None, SIDE) == []


def test_components_that_were_not_restored_are_told_apart() -> None:
    more = replace(SIDE, components=("model", "optimizer", "progress", "ema"))
    assert found(more, SIDE) == [("not_restored", "ema", "error")]
    assert found(SIDE, more) == [("not_stored", "ema", "error")]
    assert found(more, more) == [("left_out", "ema", "note")]
    assert found(SIDE, SIDE, restored=("model",)) == [("left_out", "optimizer", "note"), ("left_out", "progress", "note")]


def test_topology_is_ranks_and_placements() -> None:
    assert found(SIDE, replace(SIDE, world_size=4)) == [("topology", "topology", "note")]
    assert found(SIDE, replace(SIDE, layout=("Shard(dim=0) over dim of 2",))) == [("topology", "topology", "note")]
    assert found(SIDE, replace(SIDE, layout=("Shard(dim=0) over dim of 2",)), rank=1) == []


def test_facts_that_only_one_side_has() -> None:
    assert found(replace(SIDE, facts={**FACTS, "optimizer.a": 6}), SIDE) == [("no_optimizer_state", "optimizer", "error")]
    assert found(SIDE, replace(SIDE, facts={**FACTS, "optimizer.b": 6})) == []


def test_state_of_mixed_steps_is_named() -> None:
    torn = replace(SIDE, facts={**FACTS, "optimizer": 5})
    assert found(torn, torn) == [("mixed_steps", "optimizer", "error")]
    assert found(torn, torn, optimizer_counts=None) == []


@pytest.mark.parametrize(
    ("resized", "expected"),
    [
        (Resized(key="rng", saved_world_size=4, world_size=2, took="by rank", dropped=(2,)), ("resized", "rng", "note")),
        (Resized(key="rng", saved_world_size=2, world_size=4, took="nothing", dropped=()), ("resized", "rng", "error")),
        (Resized(key="extra.queue", saved_world_size=4, world_size=2, took="by rank", dropped=(2,)), ("resized", "extra", "warning")),
        (Resized(key="extra.queue", saved_world_size=2, world_size=4, took="nothing", dropped=()), ("resized", "extra", "error")),
        (Resized(key="data", saved_world_size=4, world_size=2, took="by function", dropped=()), ("resized", "data", "note")),
    ],
)
def test_values_of_another_number_of_ranks(resized: Resized, expected: tuple[str, str, str]) -> None:
    report = TrainStateReport(components=SIDE.components, resized=(resized,))
    assert found(SIDE, SIDE, report=report) == [expected]


def test_keys_that_the_planner_passed_over_are_named() -> None:
    report = LoadReport(
        loaded=(),
        missing=("state.ema.w",),
        unexpected=("state.optimizer.state.w.exp_avg", "stray"),
        cast=(Cast("state.model.w", torch.float32, torch.bfloat16, False),),
        renamed=(),
        num_tensor_bytes=0,
    )
    findings = check_restored(SIDE, SIDE, restored=SIDE.components, rank=0, load_report=report)
    assert [(one.kind, one.component, one.text) for one in findings] == [
        ("cast", "model", "state.model.w was stored as torch.float32 and is torch.bfloat16: rounded"),
        ("unexpected_key", "optimizer", "state.optimizer.state.w.exp_avg is in the checkpoint, and the state has no place for it"),
        ("missing_key", "ema", "state.ema.w is not in the checkpoint: it is as it was before the restore"),
        ("unexpected_key", "extra", "stray is in the checkpoint, and the state has no place for it"),
    ]


def test_findings_are_in_the_order_of_cause_and_effect() -> None:
    far = replace(SIDE, world_size=4, facts={**FACTS, "progress.step": 7, "optimizer": 5})
    components = [one.component for one in check_restored(SIDE, far, restored=SIDE.components, rank=0)]
    assert components == ["optimizer", "progress", "topology"]


def test_finding_reads_as_a_line() -> None:
    one = Finding(kind="topology", component="topology", text="2 ranks, and 4 saved", severity="note")
    assert str(one) == "note: topology: 2 ranks, and 4 saved"
    assert str(replace(one, rank=3)) == "note: topology: 2 ranks, and 4 saved (rank 3)"


# -- the record -----------------------------------------------------------------------------------------------------------


def test_record_comes_back_from_plain_values(checkpoint: tuple[Path, Recorded]) -> None:
    _, note = checkpoint
    assert Recorded.from_dict({**note.as_dict(), "of a later release": 1}) == note
    assert note.layout == ("whole",)
    assert note.components == ("model", "optimizer", "scheduler", "scaler", "data", "progress", "ema", "extra", "rng")


@pytest.mark.parametrize("value", [None, {}, 3, {**SIDE.as_dict(), "facts": {"step": None}}, {**SIDE.as_dict(), "layout": "whole"}])
def test_damaged_record_is_no_record(value: object) -> None:
    with pytest.raises(MalformedCheckpointError, match="facts in the checkpoint's metadata"):
        Recorded.from_dict(value)


def test_state_that_was_never_loaded_is_not_asked() -> None:
    assert read_back(Run(seed=0).state, {}) == ReadBack()
