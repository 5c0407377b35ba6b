"""Random numbers and counts of steps that lie on a CUDA device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from dcp_engine import TrainState
from dcp_engine.checkpointer.cut import facts_of
from dcp_engine.checkpointer.probe import run_probe
from dcp_engine.checkpointer.rng_guard import eval_rng
from dcp_engine.train_state.rng import Generators

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def draws(generator: torch.Generator) -> list[list[float]]:
    every = [torch.rand(3, device=f"cuda:{device}").tolist() for device in range(torch.cuda.device_count())]
    return [*every, torch.rand(3, device="cuda", generator=generator).tolist()]


@pytest.mark.parametrize("seed", [None, 7])
def test_generators_of_all_devices_are_left_alone(seed: int | None) -> None:
    torch.manual_seed(1)
    generator = torch.Generator("cuda").manual_seed(2)
    expected = [draws(generator), draws(generator)]
    torch.manual_seed(1)
    generator.manual_seed(2)
    first = draws(generator)
    with eval_rng(Generators({"own": generator}), seed=seed):
        draws(generator)
        torch.manual_seed(5)
    assert [first, draws(generator)] == expected


STARTS_INSIDE = """
import torch
from dcp_engine.checkpointer.rng_guard import eval_rng
torch.manual_seed(3)
with eval_rng(seed={seed}):
    if {draws}:
        torch.rand(3, device="cuda")
print(torch.rand(3, device="cuda").tolist())
"""


@pytest.mark.parametrize("seed", [None, 7])
def test_cuda_that_is_started_inside_begins_where_training_would_have_begun(seed: int | None) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", STARTS_INSIDE.format(seed=seed, draws=with_draws)], capture_output=True, text=True, check=True
        ).stdout
        for with_draws in (False, True)
    ]
    assert said[0] == said[1]


def test_counts_on_the_device_are_read_when_asked_for_alone() -> None:
    model = nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = TrainState(model, optimizer)
    assert "optimizer" not in facts_of(state, 0)
    assert facts_of(state, 0, wait_for_device=True)["optimizer"] == 3


def test_probe_reads_values_of_a_device() -> None:
    (value,) = run_probe(lambda: torch.tensor([1.0, 2.0], device="cuda", dtype=torch.bfloat16)).values
    assert (value.dtype, value.shape) == ("torch.bfloat16", (2,))
