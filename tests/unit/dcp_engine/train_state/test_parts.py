"""The pure parts: counters, ranks, keys of a checkpoint, differences, cadence."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_engine import Counters, ReshardLoadPlanner, ShardReader, ShardWriter, TrainState
from dcp_engine.errors import InvalidOptionError, KeyMismatchError, UsageError
from dcp_engine.train_state import PartOfState, components_due, differences, stored_components
from dcp_engine.train_state.packed import pack
from dcp_engine.train_state.per_rank import name_of_rank, rank_of_name, ranks_to_read
from dcp_engine.train_state.stored import stored_in

# -- counters -------------------------------------------------------------------------------------------------------------


def test_attempted_and_applied_updates_are_two_numbers() -> None:
    counters = Counters(max_losses=2)
    for number in range(3):
        counters.micro_batch(samples=4, tokens=100)
        counters.micro_batch(samples=4, tokens=100)
        counters.grads_clipped = True
        counters.update(applied=number != 1, loss=float(number))
    assert (counters.step, counters.updates_applied, counters.micro_step) == (3, 2, 0)
    assert (counters.batch_in_epoch, counters.samples, counters.tokens) == (6, 24, 600)
    assert not counters.grads_clipped
    assert list(counters.losses) == [1.0, 2.0]
    counters.end_epoch()
    assert (counters.epoch, counters.batch_in_epoch) == (1, 0)
    other = Counters(max_losses=2)
    other.load_state_dict(counters.state_dict())
    assert other == counters


def test_epoch_does_not_end_inside_a_cycle_and_half_a_progress_is_refused() -> None:
    counters = Counters()
    counters.micro_batch()
    with pytest.raises(UsageError):
        counters.end_epoch()
    with pytest.raises(KeyMismatchError) as caught:
        counters.load_state_dict({"step": 1})
    assert "updates_applied" in caught.value.missing
    assert counters.step == 0
    with pytest.raises(InvalidOptionError):
        Counters(max_losses=-1)


# -- ranks ----------------------------------------------------------------------------------------------------------------


def test_names_of_ranks() -> None:
    assert name_of_rank(3) == "rank-00003"
    assert [rank_of_name(name) for name in ("rank-00003", "rank-123456", "rank-3", "rank-000003", "rank-0000x", "weight")] == [
        3,
        123456,
        None,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("saved", "world_size", "wants_all", "read"),
    [
        (4, 4, False, [(0,), (1,), (2,), (3,)]),
        (4, 4, True, [(0,), (1,), (2,), (3,)]),
        (4, 2, False, [(0, 2), (1, 3)]),
        (2, 4, False, [(0,), (1,), (), ()]),
        (3, 2, True, [(0, 1, 2), (0, 1, 2)]),
    ],
)
def test_every_saved_value_is_read_by_somebody(saved: int, world_size: int, wants_all: bool, read: list[tuple[int, ...]]) -> None:
    found = [ranks_to_read(range(saved), rank=rank, world_size=world_size, wants_all=wants_all) for rank in range(world_size)]
    assert found == read
    assert {one for ranks in found for one in ranks} == set(range(saved))


# -- keys of a checkpoint -------------------------------------------------------------------------------------------------


def test_keys_tell_ranks_slots_and_gradients() -> None:
    keys = [
        "state.rng.rank-00000",
        "state.rng.rank-00001",
        "state.extra.a.rank-00001",
        "state.optimizer.x.state.l.0.weight.exp_avg",
        "state.optimizer.x.state.l.0.weight.preconditioner.left",
        "state.optimizer.x.state.gone.exp_avg",
        "state.grads.shared.l.0.weight",
        "state.grads.rank-00001.l",
        "other.rng.rank-00002",
    ]
    found = stored_in(keys, under="state", optimizers=["x"], parameters=["l", "l.0.weight"])
    assert found.ranks == {"rng": (0, 1), "extra.a": (1,)}
    assert found.started == {"x": frozenset({"l.0.weight"})}
    assert found.grads == {"shared": frozenset({"l.0.weight"}), "rank-00001": frozenset({"l"})}
    assert stored_components(keys) == {"rng", "extra", "optimizer", "grads"}
    assert stored_components(["model.w"], under="") == {"model"}


# -- differences ----------------------------------------------------------------------------------------------------------


def test_differences_are_named_down_to_the_value() -> None:
    one = {
        "a": {"x": 1.0, "nan": math.nan, "t": torch.tensor([1.0, math.nan])},
        "b": pack({"deep": [1, {2: torch.ones(2)}], "array": np.arange(3)}, key="b"),
        "c": -0.0,
        "d": True,
    }
    two = {
        "a": {"x": 1.5, "nan": math.nan, "t": torch.tensor([1.0, math.nan])},
        "b": pack({"deep": [1, {2: torch.zeros(2)}], "array": np.arange(3) + 1}, key="b"),
        "c": 0.0,
        "d": 1,
        "e": 0,
    }
    assert [str(difference) for difference in differences(one, two)] == [
        "a.x: 1.5 instead of 1.0",
        "b.deep.1.2: other values",
        "b.array: other numbers",
        "c: 0.0 instead of -0.0",
        "d: int instead of bool",
        "e: was not expected",
    ]
    assert differences(one, one) == ()
    assert [
        str(difference) for difference in differences({"m": torch.ones(2), "n": (1,), "o": b"x"}, {"m": torch.ones(3), "n": (1, 2)})
    ] == [
        "m: torch.float32 [3] instead of torch.float32 [2]",
        "n: 2 elements instead of 1",
        "o: is missing",
    ]


# -- cadence --------------------------------------------------------------------------------------------------------------


def test_weights_every_200_steps_and_everything_every_1000() -> None:
    every = {"model": 200, "*": 1000}
    due = {step: components_due(step, every, components=("model", "optimizer")) for step in range(1, 2001)}
    assert [step for step, names in due.items() if names == ("model",)] == [200, 400, 600, 800, 1200, 1400, 1600, 1800]
    assert [step for step, names in due.items() if names == ("model", "optimizer")] == [1000, 2000]
    assert sum(bool(names) for names in due.values()) == 10


@pytest.mark.parametrize(("every", "text"), [({"weights": 2}, "no component 'weights'"), ({"*": 0}, "below 1")])
def test_intervals_are_checked(every: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidOptionError, match=text):
        components_due(1, every, components=("model",))


def test_weights_alone_are_saved_loaded_and_no_full_state(tmp_path: Path) -> None:
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    state, fresh = TrainState(model, torch.optim.Adam(model.parameters())), TrainState(twin, torch.optim.Adam(twin.parameters()))
    save({"state": PartOfState(state, ["model"])}, storage_writer=ShardWriter(tmp_path / "weights"))
    save({"state": state}, storage_writer=ShardWriter(tmp_path / "full"))
    with pytest.raises(BaseException, match="missing"):
        fresh.load(ShardReader(tmp_path / "weights"))
    assert not torch.equal(model.weight, twin.weight)
    load({"state": PartOfState(fresh, ["model"])}, storage_reader=ShardReader(tmp_path / "weights"), planner=ReshardLoadPlanner())
    assert torch.equal(model.weight, twin.weight)
    nn.init.zeros_(twin.weight)
    planner = ReshardLoadPlanner(keys=["state.model"])
    load({"state": PartOfState(fresh, ["model"])}, storage_reader=ShardReader(tmp_path / "full"), planner=planner)
    assert torch.equal(model.weight, twin.weight)
    with pytest.raises(InvalidOptionError, match="no such components"):
        PartOfState(state, ["ema"])
