"""A whole training run in one process, and what its state is worth: the run that was resumed is the run that never stopped."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_engine import BackgroundSaver, Counters, PerRank, ReshardLoadPlanner, ShardReader, ShardWriter, TrainState
from dcp_engine.errors import (
    DuplicateKeyError,
    InvalidOptionError,
    KeyMismatchError,
    ShapeMismatchError,
    StateError,
    UnencodableObjectError,
)
from dcp_engine.train_state import differences


class Cursor:
    """Data whose order is its position."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": {1: "int key"}, "nothing": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == {1: "int key"}
        assert state["nothing"] == {}
        self.position = state["position"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3))
        return out


class Run:
    """Everything that a training script has. Data of position p is a function of p and of numpy's and python's generators."""

    def __init__(self, *, seed: int, optimizer: str = "adamw", without: str | None = None) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = Net()
        groups: list[dict[str, Any]] = [
            {"params": list(self.model.first.parameters()), "lr": torch.tensor(0.01), "kind": "first"},
            {"params": [], "lr": 0.5, "betas": (0.1, 0.2)},
            {"params": [*self.model.norm.parameters(), *self.model.second.parameters(), self.model.never], "weight_decay": 0.2},
        ]
        if optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.003, foreach=False)
        else:
            for group in groups:
                group.pop("betas", None)
            self.optimizer = torch.optim.SGD(groups, lr=0.003, momentum=0.9, dampening=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 6], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.cursor = Cursor()
        self.generator, self.numpy_generator = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        self.averages = {"second": torch.zeros(3, 6)}
        self.counters = Counters(max_losses=5)
        self.trace: list[tuple[float, ...]] = []
        parts = {
            "schedulers": self.scheduler,
            "scaler": self.scaler,
            "data": self.cursor,
            "extras": {"averages": self.averages, "local": PerRank(self)},
            "generators": {"augment": self.generator},
            "numpy_generators": {"mix": self.numpy_generator},
        }
        self.state = TrainState(
            self.model, self.optimizer, counters=self.counters, **{name: part for name, part in parts.items() if name != without}
        )

    def state_dict(self) -> dict[str, Any]:
        return {"trace": list(self.trace)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trace = state["trace"]

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.model.first.bias.requires_grad_(self.counters.step < 3)
            torch_draw = torch.randn(5, 4)
            x = torch_draw + self.cursor.position + np.random.rand() + random.random() + self.numpy_generator.random()
            x = x + torch.rand(1, generator=self.generator)
            self.cursor.position += 1
            loss = self.model(x).square().mean()
            self.scaler.scale(loss).backward()
            if self.counters.step == 1:
                self.model.first.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
            self.counters.micro_batch(samples=5)
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            applied = self.scaler.get_scale() >= before
            if applied:
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.averages["second"].lerp_(self.model.second.weight.detach(), 0.1)
            self.counters.update(applied=applied, loss=loss.item())
            self.trace.append((loss.item(), float(self.optimizer.param_groups[0]["lr"]), self.scaler.get_scale(), torch_draw[0, 0].item()))


def trained(num_steps: int, *, optimizer: str = "adamw") -> Run:
    """A run from its start. The global generators are one for all runs of a process: the last run made has them."""
    run = Run(seed=0, optimizer=optimizer)
    run.train(num_steps)
    return run


def snapshot(run: Run) -> dict[str, Any]:
    return copy.deepcopy(run.state.state_dict())


def saved(run: Run, path: Path) -> Path:
    save({"state": run.state}, storage_writer=ShardWriter(path))
    return path


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("stop_at", [0, 1, 2, 5])
def test_resumed_run_is_the_run_that_never_stopped(tmp_path: Path, stop_at: int, optimizer: str) -> None:
    unbroken = trained(8, optimizer=optimizer)
    end = snapshot(unbroken)
    stopped = trained(stop_at, optimizer=optimizer)
    path = saved(stopped, tmp_path / "it")
    middle = snapshot(stopped)
    resumed = Run(seed=99, optimizer=optimizer)
    report = resumed.state.load(ShardReader(path))
    assert report.lines() == []
    assert "never" in report.unstarted
    assert [one for one in differences(middle, resumed.state.state_dict()) if "never" not in one.key] == []
    resumed.train(8 - stop_at)
    assert resumed.trace == unbroken.trace
    assert differences(end, resumed.state.state_dict()) == ()
    assert resumed.model.never not in resumed.optimizer.state
    assert resumed.counters.step == 8
    assert resumed.counters.updates_applied == 7


def test_plain_load_restores_a_fresh_run_and_one_that_went_on(tmp_path: Path) -> None:
    run = trained(3)
    path = saved(run, tmp_path / "it")
    before = snapshot(run)
    run.train(2)
    run.state.load(ShardReader(path))
    assert differences(before, snapshot(run)) == ()
    fresh = Run(seed=1)
    load({"state": fresh.state}, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    assert differences(before, snapshot(fresh)) == ()


def test_components_have_files_of_their_own(tmp_path: Path) -> None:
    path = saved(Run(seed=0), tmp_path / "it")
    assert sorted(file.name for file in path.glob("*.shard")) == [
        "extra-00000.shard",
        "model-00000.shard",
        "optimizer-00000.shard",
        "state-00000.shard",
    ]


def test_stock_writer_and_reader_keep_it_too(tmp_path: Path) -> None:
    run = trained(3)
    before = snapshot(run)
    save({"state": run.state}, checkpoint_id=tmp_path / "it")
    fresh = Run(seed=1)
    load({"state": fresh.state}, checkpoint_id=tmp_path / "it")
    assert differences(before, snapshot(fresh)) == ()


def test_background_saver_takes_it(tmp_path: Path) -> None:
    run = trained(3)
    saver = BackgroundSaver()
    handle = saver.submit({"state": run.state}, writer=ShardWriter(tmp_path / "it"))
    run.train(1)
    handle.result()
    saver.close()
    fresh = Run(seed=1)
    fresh.state.load(ShardReader(tmp_path / "it"))
    fresh.train(1)
    assert fresh.trace == run.trace


def test_state_dict_alone_is_loaded_without_a_name_around_it(tmp_path: Path) -> None:
    run = trained(2)
    before = snapshot(run)
    save(run.state.state_dict(), storage_writer=ShardWriter(tmp_path / "it"))
    fresh = Run(seed=1)
    fresh.state.load(ShardReader(tmp_path / "it"), under="")
    assert differences(before, snapshot(fresh)) == ()


def test_load_of_another_state_copies_its_tensors() -> None:
    run, fresh = trained(3), Run(seed=1)
    before = snapshot(run)
    fresh.state.load_state_dict(run.state.state_dict())
    copied = snapshot(fresh)
    run.train(2)
    assert differences(before, copied) == ()
    assert {one.component for one in differences(copied, snapshot(fresh))} == {"rng"}  # the global generators went on


DROPS: dict[str, Callable[[Run, Run], Any]] = {
    "model": lambda run, strange: run.model.load_state_dict(strange.model.state_dict()),
    "optimizer": lambda run, _: run.optimizer.state.clear(),
    "scheduler": lambda run, strange: run.scheduler.load_state_dict(strange.scheduler.state_dict()),
    "scaler": lambda run, _: run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 8.0}),
    "data": lambda run, _: setattr(run.cursor, "position", 0),
    "progress": lambda run, _: setattr(run.counters, "updates_applied", 5),
    "extra": lambda run, _: run.averages["second"].zero_(),
    "rng": lambda run, _: random.seed(3),
}


@pytest.mark.parametrize("component", DROPS)
def test_each_component_that_is_lost_is_named(component: str) -> None:
    expected = snapshot(trained(5))
    other = Run(seed=1)
    strange = Run(seed=7)
    other.state.load_state_dict(expected)
    assert differences(expected, other.state.state_dict()) == ()
    DROPS[component](other, strange)
    found = differences(expected, other.state.state_dict())
    assert {difference.component for difference in found} == {component}


@pytest.mark.parametrize("component", ["model", "optimizer", "scheduler", "scaler", "data", "progress", "extra", "rng"])
def test_component_that_is_not_stored_is_refused_before_anything_changes(component: str) -> None:
    run, other = Run(seed=0), Run(seed=1)
    run.train(2)
    stored = {name: part for name, part in run.state.state_dict().items() if name != component}
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(KeyMismatchError) as caught:
        other.state.load_state_dict(stored)
    assert caught.value.missing == (component,)
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


@pytest.mark.parametrize(
    ("argument", "component"), [("schedulers", "scheduler"), ("scaler", "scaler"), ("data", "data"), ("extras", "extra")]
)
def test_component_that_the_script_forgot_is_named(tmp_path: Path, argument: str, component: str) -> None:
    path = saved(Run(seed=0), tmp_path / "it")
    with pytest.raises(BaseException) as caught:
        Run(seed=1, without=argument).state.load(ShardReader(path))
    (error, _) = caught.value.failures[0]  # type: ignore[attr-defined]
    assert isinstance(error, KeyMismatchError)
    assert {key.split(".")[1] for key in error.unexpected} == {component}


def test_half_of_a_parameters_slots_is_fatal() -> None:
    run, other = Run(seed=0), Run(seed=1)
    run.train(2)
    state = run.state.state_dict()
    del state["optimizer"]["state"]["second.weight"]["exp_avg_sq"]
    with pytest.raises(KeyMismatchError) as caught:
        other.state.load_state_dict(state)
    assert caught.value.missing == ("optimizer.state.second.weight.exp_avg_sq",)


def test_parameter_that_moved_between_groups_is_named(tmp_path: Path) -> None:
    run, other = Run(seed=0), Run(seed=1)
    run.train(2)
    groups = other.optimizer.param_groups
    groups[1]["params"].append(groups[2]["params"].pop(2))
    report = other.state.load(ShardReader(saved(run, tmp_path / "it")))
    assert [(one.parameter, one.saved_group, one.group) for one in report.moved] == [("second.weight", 2, 1)]
    assert report.lines() == ["second.weight moved from group 2 to 1"]


def test_scheduler_is_held_against_the_updates_that_were_applied() -> None:
    run = Run(seed=0)
    run.train(3)
    assert run.state.disagreements() == ()
    strict = TrainState(run.model, run.optimizer, schedulers=run.scheduler, counters=run.counters, scheduler_counts="attempted")
    assert strict.disagreements() == ("the scheduler has taken 2 steps, and the counters say 3 (attempted)",)


def test_shape_is_checked_before_anything_changes() -> None:
    run = Run(seed=0)
    state = run.state.state_dict()
    state["model"] = {**state["model"], "never": torch.zeros(3)}
    with pytest.raises(ShapeMismatchError, match=r"model\.never"):
        run.state.load_state_dict(state)


def test_scaler_that_was_off_is_refused_for_one_that_is_on() -> None:
    off, on = TrainState(scaler=torch.amp.GradScaler("cpu", enabled=False)), TrainState(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(StateError, match=r"tensor 'scaler'"):
        on.load_state_dict(off.state_dict())
    off.load_state_dict(off.state_dict())


def test_parts_of_a_component_are_the_live_objects_by_label() -> None:
    run = Run(seed=0)
    assert run.state.parts("optimizer") == {"": run.optimizer}
    assert run.state.parts("model") == {"0": run.model}
    assert run.state.parts("data") == {"": run.cursor}
    assert list(run.state.parts("extra")) == ["averages", "local"]
    assert run.state.parts("progress") == {"": run.counters}
    assert run.state.parts("ema") == {}
    assert run.state.parts("no such component") == {}


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data": object()}, "data cannot be saved: it has no state_dict"),
        ({"schedulers": {"a.b": Cursor()}}, r"schedulers\['a.b'\] is not a name"),
        ({"extras": {"x": 3}}, r"extras\['x'\] cannot be saved"),
        ({"grads": "maybe"}, "grads is not a policy"),
        ({"scheduler_counts": "steps"}, "scheduler_counts is not known"),
        ({"optimizer_counts": "attempted"}, "optimizer_counts is not known"),
        ({"optimizers": 3}, "optimizers is of the wrong kind"),
        ({"model": "net"}, "model is of the wrong kind"),
    ],
)
def test_objects_of_the_wrong_kind_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidOptionError, match=text):
        TrainState(**options)


def test_optimizer_over_foreign_parameters_is_refused() -> None:
    other = nn.Linear(2, 2)
    with pytest.raises(InvalidOptionError, match=r"group 0, parameter 0, shape \[2, 2\]"):
        TrainState(nn.Linear(2, 2), torch.optim.SGD(other.parameters(), lr=0.1))


def test_two_parameters_under_one_name_are_refused() -> None:
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(DuplicateKeyError, match=r"model\.weight"):
        TrainState(parts)
    named = TrainState({"one": parts[0], "two": parts[1]})
    assert list(named.state_dict()["model"]) == ["one.weight", "one.bias", "two.weight", "two.bias"]


def test_value_that_cannot_be_stored_is_named_when_the_state_is_taken() -> None:
    cursor = Cursor()
    cursor.position = lambda: 3  # type: ignore[assignment]
    with pytest.raises(UnencodableObjectError) as caught:
        TrainState(data={"train": cursor}).state_dict()
    assert caught.value.tensor is not None
    assert caught.value.tensor.startswith("data.train")


# -- accumulation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["refuse", "defer"])
def test_save_inside_a_cycle_is_refused(policy: str) -> None:
    state = TrainState(nn.Linear(2, 2), grads=policy)
    assert state.may_save()
    state.counters.micro_batch()
    assert not state.may_save()
    with pytest.raises(StateError, match="inside an accumulation cycle"):
        state.state_dict()
    state.counters.update()
    assert state.may_save()


def accumulate(state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer, micro_steps: range) -> None:
    for number in micro_steps:
        model(torch.full((2, 3), float(number + 1))).square().mean().backward()
        state.counters.micro_batch()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            state.counters.update()


def build_accumulation(seed: int) -> tuple[TrainState, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    return TrainState(model, optimizer, grads="save"), model, optimizer


@pytest.mark.parametrize("stop_at", [4, 6])
def test_gradients_of_a_cycle_are_saved_when_asked(tmp_path: Path, stop_at: int) -> None:
    unbroken, stopped, resumed = build_accumulation(0), build_accumulation(0), build_accumulation(1)
    accumulate(*unbroken, range(12))
    accumulate(*stopped, range(stop_at))
    save({"state": stopped[0]}, storage_writer=ShardWriter(tmp_path / "it"))
    accumulate(*resumed, range(3))  # gradients that are not the checkpoint's
    resumed[0].load(ShardReader(tmp_path / "it"))
    assert resumed[0].counters.micro_step == stop_at % 4
    accumulate(*resumed, range(stop_at, 12))
    assert unbroken[0].differences(resumed[0]) == ()


def test_save_of_unscaled_gradients_is_refused() -> None:
    model = nn.Linear(3, 2)
    state = TrainState(model, scaler=torch.amp.GradScaler("cpu"), grads="save")
    state.counters.micro_batch()
    with pytest.raises(StateError, match="no parameter has a gradient"):
        state.state_dict()
    model(torch.ones(1, 3)).sum().backward()
    assert list(state.state_dict()["grads"]["shared"]) == ["weight", "bias"]
    state.counters.grads_unscaled = True
    with pytest.raises(StateError, match="between unscale_ and update"):
        state.state_dict()
