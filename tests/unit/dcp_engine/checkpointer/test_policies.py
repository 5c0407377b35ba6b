"""What ``maybe_save`` is told: rules, what is forced, and what waits for ever."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dcp_engine import Counters, RunRoot, TrainState
from dcp_engine.checkpointer.options import CheckpointerOptions
from dcp_engine.checkpointer.policies import Policies
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.policies import When

ALL = ("model", "progress", "rng")


def policies_of(root: Path, *, save_every: int | None = None, when: When | None = None) -> Policies:
    ranks = Ranks(None)
    return Policies(RunRoot(root), CheckpointerOptions(save_every=save_every, when=when), ranks, ranks)


def deferring() -> TrainState:
    return TrainState(torch.nn.Linear(1, 1), counters=Counters(), grads="defer")


def test_what_is_forced_is_due_whatever_the_rules_say(tmp_path: Path) -> None:
    for policies in (policies_of(tmp_path), policies_of(tmp_path, save_every=5), policies_of(tmp_path, when=When(steps=5))):
        state = deferring()
        assert policies.due(3, state, is_saved=False, force=True) == ALL
        assert policies.due(4, state, is_saved=True, force=True) == ()
        assert policies.due(6, None, is_saved=False, force=True) == ("*",)


def test_what_is_forced_inside_a_cycle_is_due_once_at_its_end(tmp_path: Path) -> None:
    for policies in (policies_of(tmp_path, save_every=2), policies_of(tmp_path, when=When(steps=2))):
        state = deferring()
        state.counters.micro_step = 1
        assert policies.due(2, state, is_saved=False) == ()  # by the rules
        assert policies.due(2, state, is_saved=False, force=True) == ()
        assert policies.due(2, state, is_saved=False) == ()
        state.counters.micro_step = 0
        assert policies.due(3, state, is_saved=False) == ALL
        policies.saving(3, None)
        assert policies.due(3, state, is_saved=True) == ()


@pytest.mark.parametrize("when", [None, When(steps=2)])
def test_a_save_for_which_nobody_asks_at_a_cycles_end_is_told(tmp_path: Path, when: When | None, caplog: pytest.LogCaptureFixture) -> None:
    policies, state = policies_of(tmp_path, save_every=2 if when is None else None, when=when), deferring()
    for step in range(6):
        for micro_step in (1, 2):  # and never after the update
            state.counters.micro_step = micro_step
            assert policies.due(step, state, is_saved=False) == ()
        assert len(caplog.records) == (step > 2)  # due at 2, whose cycle has ended at 3
    policies.close()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    assert all(f"due at step 2 of {tmp_path}" in text and "call maybe_save() after Counters.update(), too" in text for text in told)
    assert "was never made" in told[1]


def test_a_save_that_is_made_at_its_cycles_end_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policies, state = policies_of(tmp_path, save_every=2), deferring()
    saved = []
    for step in range(7):
        state.counters.micro_step = 0 if step else 1
        saved += [step] if policies.due(step, state, is_saved=False) else []
        state.counters.micro_step = 1
        saved += [step] if policies.due(step, state, is_saved=False) else []
    policies.close()
    assert (saved, caplog.records) == ([2, 4, 6], [])
