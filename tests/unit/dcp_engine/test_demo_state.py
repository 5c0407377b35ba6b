"""The learning rate of the demo's schedule, and what its checkpoints hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_engine import ShardReader, ShardWriter
from dcp_engine.demo.model import Decoder, ModelConfig
from dcp_engine.demo.state import Training, lr_factor


@pytest.mark.parametrize(
    ("done", "factor"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (9, 0.55), (14, 0.1), (99, 0.1)],
)
def test_warm_up_is_linear_and_the_rest_half_a_cosine(done: int, factor: float) -> None:
    assert lr_factor(done, num_steps=15, num_warmup_steps=4) == pytest.approx(factor, rel=1e-12)


def test_run_shorter_than_its_warm_up_never_leaves_it() -> None:
    assert [lr_factor(done, num_steps=2, num_warmup_steps=4) for done in range(2)] == [0.25, 0.5]


def build(seed: int, drop: str) -> Training:
    torch.manual_seed(seed)
    return Training(Decoder(ModelConfig(width=16, num_layers=1, window_bytes=8)), num_steps=10, num_warmup_steps=2, drop=drop)


@pytest.mark.parametrize("drop", ["", "rng", "optimizer", "scheduler", "data"])
def test_all_but_what_is_dropped_comes_back(tmp_path: Path, drop: str) -> None:
    training = build(0, drop)
    for _ in range(3):
        training.model(torch.randint(0, 256, (2, 8))).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        training.cursor.documents += 2
        training.state.counters.update()
    save({"state": training.state}, storage_writer=ShardWriter(tmp_path / "it"))
    expected = {
        "rng": torch.rand(1).item(),
        "optimizer": len(training.optimizer.state) > 0,
        "scheduler": training.optimizer.param_groups[0]["lr"],
        "data": 6,
    }
    fresh = build(1, drop)
    fresh.load(ShardReader(tmp_path / "it"))
    found = {
        "rng": torch.rand(1).item(),
        "optimizer": len(fresh.optimizer.state) > 0,
        "scheduler": fresh.optimizer.param_groups[0]["lr"],
        "data": fresh.cursor.documents,
    }
    assert fresh.step == 3
    assert fresh.state.disagreements() == ()
    assert [name for name, value in expected.items() if found[name] != value] == ([drop] if drop else [])
