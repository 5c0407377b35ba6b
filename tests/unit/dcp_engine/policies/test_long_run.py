"""A run of 10,000 steps on a clock that is none, with failures from a seed: what is saved, kept, lost and spent, by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from dcp_engine.policies import Health, Keep, Pace, StepFacts, When, decide_save, plan_keep, waste

_NUM_STEPS = 10_000
_BEGAN = datetime(2026, 3, 2, tzinfo=UTC)


def _lives(seed: int, mean_steps: float) -> list[int]:
    """How many steps each process of the run makes before it dies, for as long as anybody asks."""
    drawn = random.Random(seed)
    return [1 + int(drawn.expovariate(1 / mean_steps)) for _ in range(100)]


@dataclass
class _Run:
    """A job with its scheduler: a process trains until it dies, and the next goes on from what is there."""

    when: When
    keep: Keep
    step_secs: float
    stall_secs: float
    restart_secs: float = 0.0
    diverged_at: int = _NUM_STEPS + 1
    now_secs: float = 0.0
    there: list[StepFacts] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    lost_steps: list[int] = field(default_factory=list)
    num_questions: int = 0

    def run(self, lives: Sequence[int]) -> None:
        pace, step = Pace().at(self.now_secs), 0
        for life in lives:
            step, pace = self._live(step, pace, life)
            if step == _NUM_STEPS:
                return
            resumed = max((one.step for one in self.there), default=0)
            self.lost_steps.append(step - resumed)
            self.now_secs += self.restart_secs
            pace = pace.restarted(resumed).at(self.now_secs)
            step = resumed

    def _live(self, step: int, pace: Pace, life: int) -> tuple[int, Pace]:
        ask_at = 0
        for _ in range(life):
            step += 1
            self.now_secs += self.step_secs
            if step >= ask_at:
                pace = pace.at(self.now_secs)
                decision = decide_save(self.when, pace, step)
                self.num_questions += 1
                ask_at = decision.ask_again_step
                if decision.save:
                    pace = self._save(step, pace)
            if step == _NUM_STEPS:
                break
        return step, pace

    def _save(self, step: int, pace: Pace) -> Pace:
        self.now_secs += self.stall_secs
        self.saved.append(step)
        metrics = {"loss": 1.0 if step < self.diverged_at else math.nan}
        verdict = Health().judge(metrics)
        self.there.append(
            StepFacts(
                step=step,
                saved_at=_BEGAN + timedelta(seconds=self.now_secs),
                is_healthy=verdict.is_healthy,
                is_verified=True,
                metrics=metrics,
            )
        )
        kept = plan_keep(self.keep, self.there).kept
        self.there = [one for one in self.there if one.step in kept]
        return pace.saved(step).stalled(self.stall_secs).at(self.now_secs)

    @property
    def kept(self) -> list[int]:
        return [one.step for one in self.there]


def test_a_save_every_hundred_steps() -> None:
    lives = _lives(seed=7, mean_steps=1500)
    # The 17th process comes to the end: the 16 before it have brought the run to step 9,800.
    assert lives[:17] == [587, 246, 1579, 113, 1152, 683, 90, 1063, 58, 853, 109, 143, 829, 2631, 199, 379, 1482]
    run = _Run(When(steps=100), Keep(last=3, every=2500, pinned={700}), step_secs=1.0, stall_secs=2.0, restart_secs=60.0)
    run.run(lives)
    # A process begins behind a multiple of 100, so that one which makes n steps loses n % 100 of them: 914 in all.
    assert run.lost_steps == [87, 46, 79, 13, 52, 83, 90, 63, 58, 53, 9, 43, 29, 31, 99, 79]
    # Each multiple is saved once, by whichever process comes to it.
    assert run.saved == list(range(100, 10_001, 100))
    # Two seconds for each of 100 saves, one for each step made, a minute for each of 16 failures.
    assert run.now_secs == 200 + 10_914 + 960
    assert run.kept == [700, 2500, 5000, 7500, 9800, 9900, 10_000]


def test_silent_divergence_does_not_age_the_last_healthy_step_out() -> None:
    run = _Run(When(steps=100), Keep(last=3), step_secs=1.0, stall_secs=2.0, diverged_at=4_321)
    run.run([_NUM_STEPS])
    assert run.kept == [4_300, 9_800, 9_900, 10_000]


def test_the_optimum_is_kept_and_costs_what_the_formula_says() -> None:
    """C = 60 s, M = 4 h, R = 5 min: T = sqrt(2 x 60 x 14,400) = 1,314.5 s; waste 4.56 + 4.56 + 2.08 = 11.21 %."""
    mtbf_secs, lives = 4 * 3600.0, _lives(seed=3, mean_steps=1440)
    assert lives[:10] == [392, 1132, 666, 1334, 1416, 98, 20, 2617, 433, 385]
    run = _Run(When(secs="auto", mtbf_secs=mtbf_secs, restart_secs=300), Keep(), step_secs=10.0, stall_secs=60.0, restart_secs=300.0)
    run.run(lives)
    # An interval is a stall and 126 steps (60 + 1,260 s), but the first of a process 132 steps, and the very first save comes after step 1.
    # A process of n steps loses (n - 132) % 126 of them, the first one (n - 1) % 126, one that dies before its first save all.
    assert run.lost_steps == [13, 118, 30, 68, 24, 98, 20, 91, 49, 1]
    # They saved 4, 8, 5, 10, 11, 0, 0, 20, 3 and 3 times. The last one begins behind step 7,981 and saves 1 + (2,019 - 132) // 126 times.
    assert len(run.saved) == 64 + 15
    # 11.39 % of the time went into 79 saves, 512 steps that were made again, and 10 restarts.
    assert run.now_secs == 79 * 60 + (10_000 + 512) * 10 + 10 * 300
    assert 1 - 100_000 / run.now_secs == pytest.approx(0.1139, abs=5e-5)
    assert waste(1320, save_secs=60, mtbf_secs=mtbf_secs, restart_secs=300) == pytest.approx(0.1121, abs=5e-5)


def test_without_failures_the_optimum_takes_80_saves() -> None:
    run = _Run(When(secs="auto", mtbf_secs=4 * 3600.0), Keep(), step_secs=10.0, stall_secs=60.0)
    run.run([_NUM_STEPS])
    assert run.saved == list(range(1, 10_001, 126))
    assert len(run.saved) == 80
    assert run.now_secs == 100_000 + 80 * 60  # 4.58 % of it are saves
    assert run.num_questions <= 80 * 17  # 1, 2, 4, 8, 16, 32, 64 steps after a save; then at 62, 31, 16, 8, 4, 2, 1, 0 before the next


def test_a_budget_of_two_percent_is_kept() -> None:
    run = _Run(When(secs="auto", mtbf_secs=4 * 3600.0, budget=0.02), Keep(), step_secs=10.0, stall_secs=60.0)
    run.run([_NUM_STEPS])
    # 60 s are 2 % of 3,000 s: a stall and 294 steps.
    assert run.saved == list(range(1, 10_001, 294))
    assert len(run.saved) == 35
