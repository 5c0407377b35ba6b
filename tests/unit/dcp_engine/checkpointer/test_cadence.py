"""When ``maybe_save`` saves, step by step."""

from __future__ import annotations

import pytest
import torch

from dcp_engine import Counters, TrainState
from dcp_engine.checkpointer.cadence import Cadence
from dcp_engine.errors import InvalidOptionError


def state_of(grads: str = "refuse") -> TrainState:
    model = torch.nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters()), counters=Counters(), grads=grads)


ALL = ("model", "optimizer", "progress", "rng")


def test_every_nth_step_the_whole_state_is_due() -> None:
    cadence, state = Cadence({"*": 3}), state_of()
    assert [bool(cadence.due(step, state, is_saved=False)) for step in range(10)] == [False] * 3 + [True, False, False] * 2 + [True]
    assert Cadence({"*": 3}).due(3, state, is_saved=False) == ALL


def test_weights_are_due_more_often_than_the_rest() -> None:
    cadence, state = Cadence({"model": 2, "*": 6}), state_of()
    due = {step: cadence.due(step, state, is_saved=False) for step in range(1, 7)}
    assert due == {1: (), 2: ("model",), 3: (), 4: ("model",), 5: (), 6: ALL}


def test_a_step_is_decided_once_whatever_the_number_of_calls() -> None:
    cadence, state = Cadence({"*": 2}), state_of()
    assert [bool(cadence.due(2, state, is_saved=False)) for _ in range(3)] == [True, False, False]
    assert not cadence.due(4, state, is_saved=True)
    assert not cadence.due(4, state, is_saved=False)


def test_a_save_that_waits_for_its_cycle_is_made_once_at_its_end() -> None:
    cadence, state = Cadence({"model": 1, "*": 2}), state_of("defer")
    state.counters.micro_step = 1
    assert [cadence.due(step, state, is_saved=False) for step in (1, 1, 2, 2)] == [()] * 4
    state.counters.micro_step = 0
    assert cadence.due(3, state, is_saved=False) == ALL  # the whole was due at 2, and is more than the weights of 3
    assert cadence.due(3, state, is_saved=False) == ()


def test_a_state_that_does_not_wait_is_due_inside_a_cycle() -> None:
    state = state_of("save")
    state.counters.micro_step = 1
    assert Cadence({"*": 1}).due(1, state, is_saved=False) == ALL


def test_a_state_of_which_nothing_is_known_is_due_as_a_whole() -> None:
    cadence = Cadence({"*": 2})
    assert [cadence.due(step, None, is_saved=False) for step in (1, 2, 3)] == [(), ("*",), ()]


def test_without_an_interval_or_with_one_for_nothing_it_is_told_what_to_pass() -> None:
    with pytest.raises(InvalidOptionError, match="save_every"):
        Cadence(None).due(1, None, is_saved=False)
    for state in (None, state_of()):
        with pytest.raises(InvalidOptionError, match="no component 'weights'"):
            Cadence({"weights": 2}).due(1, state, is_saved=False)
