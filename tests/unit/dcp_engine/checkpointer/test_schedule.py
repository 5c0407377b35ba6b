"""When ``maybe_save`` saves by ``When``, on a clock that the test moves."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import pytest

from dcp_engine.background import SaveHandle
from dcp_engine.background.handle import SaveTimings
from dcp_engine.checkpointer.policy_record import PolicyRecord
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.checkpointer.schedule import Schedule
from dcp_engine.errors import SaverBusyError
from dcp_engine.policies import Phase, When
from dcp_engine.train_state import TrainState


@dataclass
class _Cycle:
    """A training state as far as a schedule looks at it."""

    defers_saves: bool = True
    is_open: bool = False

    def may_save(self) -> bool:
        return not self.is_open


class _Trainer:
    """Makes steps of one second, and saves of ``stall_secs``."""

    def __init__(self, when: When, *, stall_secs: float = 2.0) -> None:
        self.now_secs = 1000.0
        self.stall_secs = stall_secs
        self.schedule = Schedule(when, Ranks(None), clock=lambda: self.now_secs)
        self.saved: list[int] = []

    def train(self, first: int, last: int, *, is_busy: bool = False) -> list[int]:
        """The steps that were saved, of those from the first to the last."""
        before = len(self.saved)
        for step in range(first, last + 1):
            self.now_secs += 1.0
            if self.schedule.is_due(step, None):
                self.save(step, is_busy=is_busy)
        return self.saved[before:]

    def save(self, step: int, *, is_busy: bool = False) -> SaveHandle:
        self.schedule.saving(step)
        if is_busy:
            handle = SaveHandle.of_skipped(SaverBusyError("busy"), step=step, path="")
        else:
            handle = SaveHandle(step=step, path="")
            self.now_secs += self.stall_secs
            self.saved.append(step)
        self.schedule.saved(handle)
        return handle


def test_phases_are_exact() -> None:
    trainer = _Trainer(When(phases=(Phase(every=500, until=10_000), Phase(every=2_000))))
    assert trainer.train(1, 14_500) == [*range(500, 10_001, 500), 12_000, 14_000]


def test_every_micro_batch_may_ask() -> None:
    schedule = Schedule(When(steps=2), Ranks(None))
    assert [schedule.is_due(step, None) for step in (1, 1, 2)] == [False, False, True]
    schedule.saving(2)
    assert [schedule.is_due(step, None) for step in (2, 2, 3, 3, 4)] == [False, False, False, False, True]


def test_a_save_inside_an_accumulation_cycle_is_due_at_its_end() -> None:
    schedule, state = Schedule(When(steps=2), Ranks(None)), _Cycle()
    state.is_open = True
    assert not schedule.is_due(2, cast(TrainState, state))
    assert not schedule.is_due(2, cast(TrainState, state))
    state.is_open = False
    assert schedule.is_due(3, cast(TrainState, state))
    schedule.saving(3)
    assert not schedule.is_due(3, cast(TrainState, state))
    assert schedule.is_due(4, cast(TrainState, state))


def test_a_save_of_the_callers_own_counts() -> None:
    trainer = _Trainer(When(secs=10))
    assert trainer.train(1, 9) == []
    trainer.save(9)
    # A stall of 2 s, and 8 steps: the tenth second after the save began.
    assert trainer.train(10, 20) == [17]


def test_a_save_that_was_left_out_stays_due() -> None:
    trainer = _Trainer(When(steps=5))
    assert trainer.train(1, 7, is_busy=True) == []
    assert trainer.train(8, 12) == [8, 10]


def test_after_a_save_that_was_left_out_time_is_what_it_was() -> None:
    trainer = _Trainer(When(secs=10))
    assert trainer.train(1, 12, is_busy=True) == []
    assert trainer.train(13, 15) == [13]


def test_the_budget_is_kept_from_measured_stalls() -> None:
    trainer = _Trainer(When(budget=0.02))
    # The first save comes at once; then 2 s are 2 % of 100 s: a stall and 98 steps.
    assert trainer.train(1, 300) == [1, 99, 197, 295]


def test_what_is_best_and_what_the_budget_allows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _Trainer(When(secs="auto", mtbf_secs=400.0, budget=0.02))
    with caplog.at_level(logging.INFO):
        # sqrt(2 x 2 x 400) = 40 s would be the best.
        assert trainer.train(1, 200) == [1, 99, 197]
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "an overhead budget of 2.00% allows a save every 100 s (waste 14.50%), and the optimum would be one every 40 s (overhead 5.00%, "
        "waste 10.00%): the budget wins"
    ]
    assert caplog.messages[-1] == (
        "step 197 is saved: a save every 100 s is wanted; a save every 100 s: saves take 2.00% of the time, saves and failures 14.50%; a "
        "failure loses 50 s on average"
    )


def test_auto_learns_how_long_a_save_takes_to_be_durable() -> None:
    trainer = _Trainer(When(secs="auto", mtbf_secs=400.0))
    handle = trainer.save(1)
    handle.timings = SaveTimings(wait_secs=7, stage_secs=2, queue_secs=10, plan_secs=1, write_secs=80, commit_secs=1)
    handle.durable.set_result(cast(Any, None))
    assert trainer.train(2, 150) == [93]  # 94 s: a stall of 2 s, and 92 steps


def test_a_process_that_goes_on_knows_what_the_one_before_has_learned() -> None:
    trainer = _Trainer(When(secs="auto"))
    record = PolicyRecord(running_secs=86_400.0, failures=1, stalls=(2.0, 3.0, 2.0), durable_secs=5.0)
    trainer.schedule.resumed(40, record)
    pace = trainer.schedule.pace
    assert (pace.last_step, pace.failures, pace.mtbf_secs, pace.stall_secs, pace.durable_secs) == (40, 2, 57_600, 2, 5)
    # After t seconds without another failure the optimum is sqrt(2 x 2 x (172,800 + t) / 3): 480.67 s for t = 481.
    assert trainer.train(41, 600) == [40 + 481]


def test_steps_that_are_made_again_are_saved_again() -> None:
    trainer = _Trainer(When(steps=10))
    assert trainer.train(1, 35) == [10, 20, 30]
    trainer.schedule.resumed(10, PolicyRecord())
    assert trainer.train(11, 30) == [20, 30]


def test_step_zero_is_nothing_to_save() -> None:
    assert not Schedule(When(steps=5), Ranks(None)).is_due(0, None)
    assert not Schedule(When.of("auto"), Ranks(None)).is_due(0, None)
