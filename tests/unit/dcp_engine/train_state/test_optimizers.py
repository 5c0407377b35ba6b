"""State of optimizers by name: every kind of group and slot, in fresh and in trained optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_engine import ShardReader, ShardWriter, TrainState
from dcp_engine.errors import KeyMismatchError, StateError, UnencodableObjectError
from dcp_engine.train_state import differences


def step(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    for number in range(num_steps):
        sum((parameter * (number + 1)).sum() for parameter in model.parameters() if parameter.requires_grad).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def slots_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    return {name: dict(optimizer.state[one]) for name, one in model.named_parameters() if optimizer.state.get(one)}


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_every_optimizer_goes_on_in_a_fresh_one(tmp_path: Path, kind: str, num_steps: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(model, optimizer, num_steps)
    save({"state": TrainState(model, optimizer)}, storage_writer=ShardWriter(tmp_path / "it"))
    twin = nn.Linear(3, 2)
    fresh = OPTIMIZERS[kind](twin.parameters())
    TrainState(twin, fresh).load(ShardReader(tmp_path / "it"))
    assert differences(slots_of(optimizer, model), slots_of(fresh, twin)) == ()
    step(model, optimizer)
    step(twin, fresh)
    assert differences(slots_of(optimizer, model), slots_of(fresh, twin)) == ()
    assert torch.equal(model.weight, twin.weight)


def test_taking_the_state_changes_nothing_and_calls_no_hook() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    before = copy.deepcopy(model.state_dict())
    state = TrainState(model, optimizer, schedulers=scheduler).state_dict()
    assert set(state["optimizer"]["state"]["weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["optimizer"]["membership"] == {"weight": (0, ()), "bias": (0, ())}
    assert optimizer.state == {}
    assert model.weight.grad is None
    assert calls == []
    assert differences(before, model.state_dict()) == ()


def test_frozen_parameters_without_slots_cost_nothing() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    assert list(TrainState(model, optimizer).state_dict()["optimizer"]["state"]) == ["bias"]


def test_parameter_frozen_after_it_was_trained_keeps_its_slots(tmp_path: Path) -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    step(model, optimizer)
    model.bias.requires_grad_(False)
    twin.bias.requires_grad_(False)
    save({"state": TrainState(model, optimizer)}, storage_writer=ShardWriter(tmp_path / "it"))
    TrainState(twin, fresh).load(ShardReader(tmp_path / "it"))
    assert differences(slots_of(optimizer, model), slots_of(fresh, twin)) == ()
    assert set(slots_of(fresh, twin)) == {"weight", "bias"}


def test_tensor_settings_are_filled_in_place_and_own_entries_come_back() -> None:
    def build(lr: float) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        model = nn.Linear(3, 2)
        rate = torch.tensor(lr)
        return model, torch.optim.Adam(model.parameters(), lr=rate, foreach=False), rate

    (model, optimizer, _), (twin, fresh, rate) = build(0.25), build(0.5)
    optimizer.param_groups[0]["kind"] = {"name": "head", "layers": (1, 2), 3: None}
    TrainState(twin, fresh).load_state_dict(TrainState(model, optimizer).state_dict())
    assert fresh.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert fresh.param_groups[0]["kind"] == {"name": "head", "layers": (1, 2), 3: None}


def test_several_optimizers_keep_their_own(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
        model = nn.Linear(3, 2)
        return model, {"matrix": torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), "rest": torch.optim.Adam([model.bias], lr=0.2)}

    (model, optimizers), (twin, fresh) = build(), build()
    for optimizer in optimizers.values():
        step(model, optimizer)
    save({"state": TrainState(model, optimizers)}, storage_writer=ShardWriter(tmp_path / "it"))
    TrainState(twin, fresh).load(ShardReader(tmp_path / "it"))
    for name, optimizer in optimizers.items():
        assert differences(slots_of(optimizer, model), slots_of(fresh[name], twin)) == ()
        assert slots_of(fresh[name], twin)


def test_optimizer_that_needs_a_closure_is_saved_and_loaded() -> None:
    def build() -> tuple[nn.Module, torch.optim.LBFGS]:
        model = nn.Linear(3, 2)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def train(model: nn.Module, optimizer: torch.optim.LBFGS) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    (model, optimizer), (twin, fresh) = build(), build()
    train(model, optimizer)
    TrainState(twin, fresh).load_state_dict(TrainState(model, optimizer).state_dict())
    train(model, optimizer)
    train(twin, fresh)
    assert torch.equal(model.weight, twin.weight)


def test_other_groups_and_parameters_are_refused() -> None:
    model = nn.Linear(3, 2)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with pytest.raises(StateError, match=r"another number of parameter groups.*expected 1; found 2"):
        TrainState(model, two).load_state_dict(TrainState(model, one).state_dict())
    fewer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(KeyMismatchError) as caught:
        TrainState(model, fewer).load_state_dict(TrainState(model, one).state_dict())
    assert caught.value.unexpected == ("optimizer.membership.bias",)


def test_setting_that_cannot_be_stored_is_named() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(UnencodableObjectError, match=r"optimizer\.param_groups\.0"):
        TrainState(model, optimizer).state_dict()
