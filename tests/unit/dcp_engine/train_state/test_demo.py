"""The demonstration's hand-made state is a small ``TrainState``: what it keeps, this keeps too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_engine import Counters, ShardReader, ShardWriter, TrainState
from dcp_engine.demo.model import Decoder, ModelConfig
from dcp_engine.demo.state import TrainingState, make_state
from dcp_engine.train_state import differences


class Cursor:
    """The demonstration's position in its corpus."""

    def __init__(self, training: TrainingState) -> None:
        self.training = training

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.training.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training.cursor = state["cursor"]


def build(seed: int) -> tuple[TrainingState, TrainState]:
    torch.manual_seed(seed)
    training = make_state(Decoder(ModelConfig(width=16, num_layers=1, window_bytes=8)), num_steps=10, num_warmup_steps=2)
    counters = Counters()
    return training, TrainState(training.model, training.optimizer, schedulers=training.scheduler, counters=counters, data=Cursor(training))


def test_all_that_the_demonstration_keeps_comes_back(tmp_path: Path) -> None:
    training, state = build(0)
    for _ in range(3):
        training.model(torch.randint(0, 256, (2, 8))).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        training.cursor += 2
        training.step += 1
        state.counters.update()
    expected = copy.deepcopy(training.state_dict(None))
    save({"state": state}, storage_writer=ShardWriter(tmp_path / "it"))
    other, fresh = build(1)
    fresh.load(ShardReader(tmp_path / "it"))
    other.step = fresh.counters.step
    assert fresh.disagreements() == ()
    assert differences(expected, other.state_dict(None)) == ()
