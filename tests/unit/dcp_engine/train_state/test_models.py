"""Names of parameters, and models of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.swa_utils import AveragedModel

from dcp_engine import ShardReader, ShardWriter, TrainState
from dcp_engine.errors import DuplicateKeyError, KeyMismatchError
from dcp_engine.train_state.models import parameter_names


def test_wrappers_leave_no_trace_in_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[1] = torch.compile(inner[1], backend="eager")
    compiled = torch.compile(inner, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert list(parameter_names([("", compiled)]).values()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(TrainState(compiled).state_dict()["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_tied_parameter_goes_by_its_first_name(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model, torch.optim.Adam(model.parameters())

    (model, optimizer), (twin, fresh) = build(), build()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = TrainState(model, optimizer)
    assert list(state.state_dict()["optimizer"]["state"]) == ["0.weight"]
    save({"state": state}, storage_writer=ShardWriter(tmp_path / "it"))
    TrainState(twin, fresh).load(ShardReader(tmp_path / "it"))
    assert torch.equal(twin[0].weight, model[0].weight)
    assert twin[1].weight is twin[0].weight
    assert torch.equal(fresh.state[twin[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_buffers_of_two_parts_under_one_name_are_refused() -> None:
    with pytest.raises(DuplicateKeyError, match=r"model\.running_mean"):
        TrainState([nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False)]).state_dict()


def test_another_model_is_refused_with_both_lists() -> None:
    with pytest.raises(KeyMismatchError) as caught:
        TrainState(nn.Linear(2, 2)).load_state_dict(TrainState(nn.ParameterDict({"other": nn.Parameter(torch.ones(1))})).state_dict())
    assert (caught.value.missing, caught.value.unexpected) == (("model.bias", "model.weight"), ("model.other",))


def test_averaged_weights_and_counts_come_back(tmp_path: Path) -> None:
    def build(value: float) -> tuple[nn.Module, AveragedModel]:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        return model, AveragedModel(model)

    (model, averaged), (twin, fresh) = build(1.0), build(2.0)
    averaged.update_parameters(model)
    save({"state": TrainState(model, ema={"slow": averaged})}, storage_writer=ShardWriter(tmp_path / "it"))
    assert sorted(file.name for file in (tmp_path / "it").glob("*.shard")) == [
        "ema-00000.shard",
        "model-00000.shard",
        "state-00000.shard",
    ]
    TrainState(twin, ema={"slow": fresh}).load(ShardReader(tmp_path / "it"))
    assert fresh.n_averaged.item() == 1
    assert torch.equal(fresh.module.weight, torch.ones(2, 2))
