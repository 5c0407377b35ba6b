"""What a run records becomes numbers and texts that are equal exactly if the values are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from dcp_engine import TrainState
from dcp_engine.errors import InvalidOptionError
from dcp_engine.testing import values


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        (True, 1),
        ("1", 1),
        ([1, 2], (1, 2)),
        ([1, [2]], [1, 2]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([1.0000001])),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (np.zeros(2), np.zeros(2, dtype=np.int64)),
        (b"a", bytearray(b"b")),
        (None, "None"),
    ],
)
def test_values_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert values.digest(one) != values.digest(other)
    assert values.digest(one) == values.digest(one)


def test_equal_tensors_have_equal_digests_whatever_their_strides() -> None:
    tensor = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)
    assert values.digest(tensor.T.contiguous().T) == values.digest(tensor)


def test_numbers_scalars_and_rates() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.5]))
    assert values.number(weight, name="loss") == 0.5
    assert values.scalar(np.int64(3), name="n") == 3
    assert values.scalar(torch.tensor(0.25), name="n") == 0.25
    assert values.scalar([1, 2], name="n") == values.fingerprint([1, 2])
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [], "lr": torch.tensor(0.25)}])
    assert values.learning_rates(optimizer) == (0.5, 0.25)
    assert (values.learning_rates(0.5), values.learning_rates([0.5]), values.learning_rates(None)) == ((0.5,), (0.5,), ())
    for wrong in ("x", torch.zeros(2), None):
        with pytest.raises(InvalidOptionError, match="loss is no number"):
            values.number(wrong, name="loss")


def test_scaler_and_samples() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    assert values.scaler_values(scaler)["scale"] == 4.0
    assert values.scaler_values(scaler)["_growth_tracker"] == 0
    assert (values.scaler_values(2), values.scaler_values(None)) == ({"scale": 2.0}, {})
    assert values.sample_ids(torch.tensor([3, 1])) == (3, 1)
    assert (values.sample_ids("digest"), values.sample_ids(None)) == ("digest", None)
    with pytest.raises(InvalidOptionError, match="no sample ids"):
        values.sample_ids(["a"])


@pytest.mark.parametrize(("name", "draw"), [("torch", lambda: torch.rand(1)), ("python", random.random), ("numpy", np.random.rand)])
def test_generator_that_is_drawn_from_has_another_digest(name: str, draw: Any) -> None:
    before = values.generator_digests()
    draw()
    after = values.generator_digests()
    assert {key for key in before if before[key] != after[key]} == {name}


def test_state_has_a_digest_for_each_value() -> None:
    model = torch.nn.Linear(2, 1)
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    before = values.state_digests(state)
    assert {"model.weight", "optimizer.state.weight.exp_avg", "progress.step"} <= before.keys()
    with torch.no_grad():
        model.bias.add_(1)
    after = values.state_digests(state)
    assert {key for key in before if before[key] != after[key]} == {"model.bias"}
    with pytest.raises(InvalidOptionError, match="state is none"):
        values.state_digests(3)
