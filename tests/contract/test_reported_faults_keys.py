"""Faults that users reported with keys: renamed, dropped, and the state of optimizers that were never the same."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import load, refused, save
from support.values import full, same
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from dcp_engine import ReshardLoadPlanner
from dcp_engine.errors import DuplicateKeyError, KeyMismatchError
from dcp_engine.planners import strip

# -- keys ----------------------------------------------------------------------------------------------------------------


def weights(*names: str, filled: bool = True) -> dict[str, torch.Tensor]:
    return {name: full(name, (3, 2)) if filled else torch.zeros(3, 2) for name in names}


def both_lists(state: dict[str, Any], path: Path, **options: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    error = refused(load, state, path, **options)
    assert isinstance(error, KeyMismatchError)
    for key in (*error.missing, *error.unexpected):
        assert key in str(error)
    return error.missing, error.unexpected


STORED = ("layers.0.weight", "layers.0.bias", "head.weight")


@pytest.mark.parametrize(
    ("wanted", "missing", "unexpected"),
    [
        (("layers.0.weight", "head.weight"), (), ("model.layers.0.bias",)),
        ((*STORED, "tail.weight"), ("model.tail.weight",), ()),
        (("layers.0.weight", "layers.0.b", "head.weight"), ("model.layers.0.b",), ("model.layers.0.bias",)),
        (("Layers.0.weight", "layers.0.bias", "head.weight"), ("model.Layers.0.weight",), ("model.layers.0.weight",)),
        ((), (), tuple(sorted(f"model.{name}" for name in STORED))),
    ],
)
def test_missing_and_unexpected_keys_are_both_listed(
    tmp_path: Path, wanted: tuple[str, ...], missing: tuple[str, ...], unexpected: tuple[str, ...]
) -> None:
    save({"model": weights(*STORED)}, tmp_path / "a")
    assert both_lists({"model": weights(*wanted, filled=False)}, tmp_path / "a") == (missing, unexpected)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("side", ["saved", "loaded"])
def test_wrappers_in_names_are_reported_and_renamed_away(tmp_path: Path, wrapper: str, side: str) -> None:
    plain, wrapped = STORED, tuple(wrapper + name for name in STORED)
    stored, wanted = (wrapped, plain) if side == "saved" else (plain, wrapped)
    save({"model": weights(*stored)}, tmp_path / "a")
    missing, unexpected = both_lists({"model": weights(*wanted, filled=False)}, tmp_path / "a")
    assert (len(missing), len(unexpected)) == (3, 3)
    rename: Any = strip("module.", "_orig_mod.") if side == "saved" else {"model": f"model.{wrapper.removesuffix('.')}"}
    found = load({"model": weights(*wanted, filled=False)}, tmp_path / "a", rename=rename)["model"]
    assert [name for one, name in zip(stored, wanted, strict=True) if not same(found[name], full(one, (3, 2)))] == []


def test_wrappers_within_names_are_stripped_in_the_optimizers_keys_too(tmp_path: Path) -> None:
    model, optimizer = trained(steps=2)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    wrapped = {
        "model": {f"module.{key}": value for key, value in state["model"].items()},
        "optimizer": {
            "state": {f"module.{key}": value for key, value in state["optimizer"]["state"].items()},
            "param_groups": [
                {**group, "params": [f"module.{key}" for key in group["params"]]} for group in state["optimizer"]["param_groups"]
            ],
        },
    }
    save(wrapped, tmp_path / "a")
    other = trained(steps=1, seed=9)
    restore(other, tmp_path / "a", rename=strip("module."))
    assert_same_training((model, optimizer), other)


def test_a_rename_that_drops_a_difference_is_refused(tmp_path: Path) -> None:
    save({"model": weights("w", "module.w")}, tmp_path / "a")
    error = refused(load, {"model": weights("w", filled=False)}, tmp_path / "a", rename=strip("module."))
    assert isinstance(error, DuplicateKeyError)
    assert "model.module.w" in str(error)


def test_strictness_is_by_component(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"model": weights("w", "old"), "ema": weights("w", "gone"), "progress": {"step": 3}}, tmp_path / "a")

    def state() -> dict[str, Any]:
        return {"model": weights("w", "new", filled=False), "ema": weights("w", "added", filled=False), "progress": {"step": 0}}

    components = {"ema.*": "ema"}
    everything = (("ema.added", "model.new"), ("ema.gone", "model.old"))
    assert both_lists(state(), tmp_path / "a", components=components) == everything
    lax_ema = {"strict": {"ema": False}, "components": components}
    assert both_lists(state(), tmp_path / "a", **lax_ema) == (("model.new",), ("model.old",))
    lax_model = {"strict": {"model": False}, "components": components}
    assert both_lists(state(), tmp_path / "a", **lax_model) == (("ema.added",), ("ema.gone",))
    planner = ReshardLoadPlanner(strict={"model": False, "ema": False}, components=components)
    with caplog.at_level(logging.WARNING):
        found = load(state(), tmp_path / "a", planner=planner)
    assert (planner.report.missing, planner.report.unexpected) == everything
    assert any("model.new" in record.getMessage() and "ema.gone" in record.getMessage() for record in caplog.records)
    assert same(found["model"]["w"], full("w", (3, 2)))
    assert not found["model"]["new"].any()
    assert found["progress"]["step"] == 3


# -- optimizers ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """One parameter of it is never part of the loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)
        self.never = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


Training = tuple[Net, torch.optim.AdamW]


def build(*, seed: int = 0, tensor_lr: bool = True, amsgrad: bool = False) -> Training:
    """Three groups, the second empty, each with settings of its own."""
    model = Net(seed)
    groups = [
        {"params": list(model.first.parameters()), "lr": torch.tensor(0.01) if tensor_lr else 0.01, "betas": (0.8, 0.9)},
        {"params": [], "lr": 0.5, "betas": (0.1, 0.2)},
        {"params": [*model.second.parameters(), model.never], "lr": 0.003, "weight_decay": 0.2, "betas": (0.7, 0.95)},
    ]
    return model, torch.optim.AdamW(groups, foreach=False, amsgrad=amsgrad)


def train(training: Training, steps: range, *, freeze_at: int | None = 3) -> None:
    """Data of step i is a function of i; from ``freeze_at`` on the first layer's bias is frozen."""
    model, optimizer = training
    for step in steps:
        model.first.bias.requires_grad_(freeze_at is None or step < freeze_at)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
            optimizer.param_groups[0]["lr"].mul_(0.9)
        optimizer.step()


def trained(*, steps: int, seed: int = 0, **options: Any) -> Training:
    training = build(seed=seed, **options)
    train(training, range(steps))
    return training


def save_training(training: Training, path: Path) -> None:
    model, optimizer = training
    save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}, path)


def restore(training: Training, path: Path, **options: Any) -> None:
    """Load, and put what was loaded into model and optimizer; without what the report says is missing."""
    model, optimizer = training
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    planner = ReshardLoadPlanner(**options)
    load(state, path, planner=planner)
    set_model_state_dict(model, state["model"])
    slots, groups = state["optimizer"]["state"], state["optimizer"]["param_groups"]
    for key in planner.report.missing:
        slots.pop(key.removeprefix("optimizer.state.").rpartition(".")[0], None)
    # Not set_optimizer_state_dict: torch's loses the settings of an empty group that is not the last one.
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    native = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": {numbers[name]: value for name, value in slots.items()}, "param_groups": native})


def assert_same_training(one: Training, other: Training) -> None:
    assert [name for name, value in one[0].state_dict().items() if not torch.equal(value, other[0].state_dict()[name])] == []
    mine, theirs = one[1].state_dict(), other[1].state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for index, slots in mine["state"].items():
        assert slots.keys() == theirs["state"][index].keys()
        for name, value in slots.items():
            assert torch.equal(value, theirs["state"][index][name]), (index, name)
            assert value.dtype == theirs["state"][index][name].dtype
    for group, twin in zip(mine["param_groups"], theirs["param_groups"], strict=True):
        assert group.keys() == twin.keys()
        for name, value in group.items():
            assert type(value) is type(twin[name]), name
            assert torch.equal(value, twin[name]) if isinstance(value, torch.Tensor) else value == twin[name], name


@pytest.mark.parametrize("tensor_lr", [True, False])
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path, tensor_lr: bool) -> None:
    """One parameter never graded, one frozen later, an empty group in the middle, tensor lr: as the run that did not stop, bit for bit."""
    unbroken = trained(steps=9, tensor_lr=tensor_lr)
    stopped = trained(steps=5, tensor_lr=tensor_lr)
    save_training(stopped, tmp_path / "a")
    resumed = trained(steps=2, seed=7, tensor_lr=tensor_lr)
    restore(resumed, tmp_path / "a")
    assert_same_training(stopped, resumed)
    train(resumed, range(5, 9))
    assert_same_training(unbroken, resumed)


def test_a_fresh_optimizer_resumes_exactly_by_option(tmp_path: Path) -> None:
    """Those initialise it. The parameter without gradients was never saved with state, so that its absence has to be allowed."""
    unbroken = trained(steps=9)
    stopped = trained(steps=5)
    save_training(stopped, tmp_path / "a")
    fresh = build(seed=7)
    error = refused(restore, fresh, tmp_path / "a")
    assert isinstance(error, KeyMismatchError)
    assert error.missing == tuple(f"optimizer.state.never.{name}" for name in ("exp_avg", "exp_avg_sq", "step"))
    fresh = build(seed=7)
    restore(fresh, tmp_path / "a", strict={"optimizer": False})
    assert_same_training(stopped, fresh)
    train(fresh, range(5, 9))
    assert_same_training(unbroken, fresh)


def test_a_fresh_optimizers_own_state_dict_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Loading into its empty state restores nothing: the reported fault was silence."""
    model, optimizer = trained(steps=5)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a")
    fresh, fresh_optimizer = build(seed=7)
    state = {"model": fresh.state_dict(), "optimizer": fresh_optimizer.state_dict()}
    error = refused(load, state, tmp_path / "a")
    assert isinstance(error, KeyMismatchError)
    assert error.missing == ()
    assert all(key.startswith("optimizer.state.") for key in error.unexpected)
    assert len(error.unexpected) == 3 * 4
    assert "get_optimizer_state_dict" in str(error)


def test_wholly_absent_state_is_left_alone_only_by_option(tmp_path: Path) -> None:
    model, optimizer = trained(steps=4)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    del state["optimizer"]["state"]["second.weight"]
    save(state, tmp_path / "a")
    other = trained(steps=4, seed=7)
    error = refused(restore, other, tmp_path / "a")
    assert isinstance(error, KeyMismatchError)
    assert error.missing == tuple(f"optimizer.state.second.weight.{name}" for name in ("exp_avg", "exp_avg_sq", "step"))
    restore(other, tmp_path / "a", strict={"optimizer": False})
    assert other[0].second.weight not in other[1].state
    assert torch.equal(optimizer.state[model.first.weight]["exp_avg"], other[1].state[other[0].first.weight]["exp_avg"])


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("side", ["checkpoint", "state"])
@pytest.mark.parametrize("strict", [True, False, {"optimizer": False}])
def test_half_absent_state_is_always_fatal(tmp_path: Path, slot: str, side: str, strict: Any) -> None:
    model, optimizer = trained(steps=4)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    halved = {**state, "optimizer": {**state["optimizer"], "state": {k: dict(v) for k, v in state["optimizer"]["state"].items()}}}
    del halved["optimizer"]["state"]["second.weight"][slot]
    stored, wanted = (halved, state) if side == "checkpoint" else (state, halved)
    save(stored, tmp_path / "a")
    error = refused(load, copy.deepcopy(wanted), tmp_path / "a", strict=strict)
    assert isinstance(error, KeyMismatchError)
    key = f"optimizer.state.second.weight.{slot}"
    assert (error.missing, error.unexpected) == (((key,), ()) if side == "checkpoint" else ((), (key,)))
    assert "only in part" in str(error)


@pytest.mark.parametrize("saved_with", [True, False])
def test_amsgrads_third_moment_is_half_absent_state(tmp_path: Path, saved_with: bool) -> None:
    save_training(trained(steps=3, amsgrad=saved_with), tmp_path / "a")
    other = trained(steps=3, seed=7, amsgrad=not saved_with)
    error = refused(restore, other, tmp_path / "a", strict=False)
    assert isinstance(error, KeyMismatchError)
    assert all(key.endswith(".max_exp_avg_sq") for key in (error.missing or error.unexpected))
    assert len(error.missing or error.unexpected) == 4


def test_groups_that_grew_or_shrank_are_reported(tmp_path: Path) -> None:
    training = trained(steps=3)
    state = {"optimizer": training[1].state_dict()}
    save(state, tmp_path / "a")
    for change in (lambda groups: groups.pop(), lambda groups: groups.append(copy.deepcopy(groups[0]))):
        other = {"optimizer": copy.deepcopy(training[1].state_dict())}
        change(other["optimizer"]["param_groups"])
        error = refused(load, other, tmp_path / "a")
        assert isinstance(error, KeyMismatchError)
        assert all(".param_groups." in key for key in (*error.missing, *error.unexpected))
