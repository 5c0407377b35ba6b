"""What is no argument of the training state is refused by name, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_engine import Counters, TrainState
from dcp_engine.errors import InvalidOptionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counters": {}}, "counters is of the wrong type"),
        ({"extras": [1]}, "extras is of the wrong type"),
        ({"rng": "no"}, "rng is of the wrong type"),
        ({"generators": {"a": 1}}, r"generators\['a'\] is no generator"),
        ({"generators": [torch.Generator()]}, "generators is of the wrong type"),
        ({"numpy_generators": {"a": 1}}, r"numpy_generators\['a'\] is no generator"),
        ({"numpy_generators": np.random.default_rng(0)}, "numpy_generators is of the wrong type"),
    ],
)
def test_parts_of_other_types_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        TrainState(**options)


@pytest.mark.parametrize("reader", ["runs/step-00000001", Path("a"), None, 3])
def test_a_path_in_place_of_a_reader_is_told_what_to_pass(reader: Any) -> None:
    state = TrainState(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidOptionError, match=r"ShardReader\(path\)"):
        state.load(reader)
    with pytest.raises(InvalidOptionError, match=r"ShardReader\(path\)"):
        state.prepare(reader)


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="this is no state"):
        TrainState(torch.nn.Linear(2, 2)).load_state_dict(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"step": -1}, {"step": "a"}, {"samples": 1.5}, {"epoch": True}, {"max_losses": -1}])
def test_counters_count(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=f"{next(iter(options))} is no count"):
        Counters(**options)


def test_a_step_of_training_with_odd_numbers_changes_nothing() -> None:
    counters = Counters()
    with pytest.raises(InvalidOptionError, match="samples is no count"):
        counters.micro_batch(samples=-1)
    with pytest.raises(InvalidOptionError, match="loss is no number"):
        counters.update(loss="x")  # type: ignore[arg-type]
    for stored in (None, {**counters.state_dict(), "step": "x"}):
        with pytest.raises(InvalidOptionError):
            counters.load_state_dict(stored)  # type: ignore[arg-type]
    assert counters == Counters()
    counters.update(loss=torch.tensor(1.5))
    assert list(counters.losses) == [1.5]
