"""When to save: tables of what is decided, and that budgets and intervals are kept whatever happens."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies import Pace, Phase, When, decide_save

_HOUR = 3600.0
_PHASES = When(phases=(Phase(every=500, until=10_000), Phase(every=2_000)))


def _saved_steps(when: When, num_steps: int) -> list[int]:
    """Of a run that asks after every step; without a clock."""
    pace, saved = Pace(), []
    for step in range(1, num_steps + 1):
        if decide_save(when, pace, step).save:
            pace = pace.saved(step)
            saved.append(step)
    return saved


def _pace(since_secs: float = 0.0, *, last_step: int = 0, stalls: tuple[float, ...] = (), **others: Any) -> Pace:
    return Pace(since_secs=since_secs, last_step=last_step, since_step=last_step, stalls=stalls, **others)


# -- by steps -----------------------------------------------------------------------------------------------------------------


def test_phases_are_exact() -> None:
    assert _saved_steps(_PHASES, 20_000) == [*range(500, 10_001, 500), 12_000, 14_000, 16_000, 18_000, 20_000]


def test_every_seventh_step() -> None:
    assert _saved_steps(When(steps=7), 30) == [7, 14, 21, 28]


@pytest.mark.parametrize(
    ("after", "due"),
    [(0, 500), (499, 500), (500, 1000), (9_500, 10_000), (9_999, 10_000), (10_000, 12_000), (11_999, 12_000), (12_000, 14_000)],
)
def test_the_next_step_of_phases(after: int, due: int) -> None:
    assert _PHASES.next_step(after) == due


def test_a_phase_that_does_not_end_on_a_multiple_leaves_its_end_out() -> None:
    when = When(phases=(Phase(every=4, until=10), Phase(every=5, until=11), Phase(every=7)))
    assert _saved_steps(when, 30) == [4, 8, 14, 21, 28]


def test_a_phase_longer_than_its_part_has_no_step() -> None:
    assert _saved_steps(When(phases=(Phase(every=50, until=10), Phase(every=20))), 60) == [20, 40, 60]


def test_a_step_that_nobody_asked_at_is_made_up_for_at_the_next() -> None:
    assert decide_save(When(steps=500), _pace(last_step=400), 501).save
    assert not decide_save(When(steps=500), _pace(last_step=501), 999).save


def test_a_resumed_run_goes_on_with_the_same_steps() -> None:
    assert not decide_save(_PHASES, _pace(last_step=750), 999).save
    assert decide_save(_PHASES, _pace(last_step=750), 1000).save


def test_rules_by_steps_need_no_clock_and_say_when_to_ask_again() -> None:
    assert not _PHASES.uses_time
    assert decide_save(_PHASES, _pace(last_step=10_000), 10_001).ask_again_step == 12_000


# -- by time ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since_secs", "step", "save", "reason"),
    [
        (1799, 499, False, "no rule asks for a save"),
        (1800, 499, True, "a save every 1,800 s is wanted"),
        (10, 500, True, "step 500 is due"),
        (1900, 500, True, "step 500 is due"),
    ],
)
def test_whichever_comes_first(since_secs: float, step: int, save: bool, reason: str) -> None:
    decision = decide_save(When(steps=500, secs=1800), _pace(since_secs), step)
    assert (decision.save, decision.reason) == (save, reason)


def test_a_clock_that_goes_back_keeps_what_was_due() -> None:
    pace = Pace().at(1000).at(1500)
    assert pace.since_secs == 500
    pace = pace.at(200)  # back by 1,300 s: 500 s are over, as before
    assert (pace.since_secs, pace.running_secs) == (500, 500)
    assert pace.at(300).since_secs == 600
    assert decide_save(When(secs=600), pace.at(300), 1).save


@pytest.mark.parametrize("reading", [math.nan, math.inf, -math.inf])
def test_a_reading_that_is_no_time_is_passed_over(reading: float) -> None:
    pace = Pace().at(0).at(10)
    assert pace.at(reading) == pace
    assert pace.at(reading).at(12).since_secs == 12


def test_a_clock_that_leaps_ahead_makes_one_save_early() -> None:
    pace = Pace().at(0).at(1_000_000)
    assert decide_save(When(secs=600), pace, 5).save
    pace = pace.saved(5).at(1_000_001)
    assert not decide_save(When(secs=600), pace, 6).save


def test_whoever_waits_for_time_asks_again_half_way() -> None:
    # 10 s a step; 500 s are left, which are 50 steps
    decision = decide_save(When(secs=1000), _pace(500, last_step=100), 150)
    assert (decision.save, decision.ask_again_step) == (False, 175)
    assert decide_save(When(steps=160, secs=1000), _pace(500, last_step=100), 150).ask_again_step == 160
    assert decide_save(When(secs=1000), _pace(995, last_step=100), 199).ask_again_step == 200


def test_the_first_step_says_nothing_of_how_long_steps_take() -> None:
    pace = Pace().begun(7).at(50.0).at(50.001)  # asked twice within a millisecond, at the first step
    decision = decide_save(When(secs=600), pace, 7)
    assert (decision.save, decision.ask_again_step) == (False, 8)


def test_an_interval_of_many_steps_takes_few_questions() -> None:
    step, left = 1, []
    while not (decision := decide_save(When(secs=750), _pace(step / 8), step)).save:  # 1/8 s a step
        left.append(6000 - step)
        step = decision.ask_again_step
    assert step == 6000
    doubled = [6000 - 2**power for power in range(12)]
    assert left == [*doubled, 1976, 988, 494, 247, 124, 62, 31, 16, 8, 4, 2, 1]


# -- the budget ---------------------------------------------------------------------------------------------------------------


def test_after_a_stall_of_four_seconds_two_percent_allow_a_save_200_seconds_later() -> None:
    when = When(budget=0.02)
    assert decide_save(when, _pace(0), 1).save, "the first tells what it costs"
    assert not decide_save(when, _pace(199, stalls=(1.0, 4.0)), 50).save
    assert decide_save(when, _pace(200, stalls=(1.0, 4.0)), 50).save


def test_a_due_step_waits_for_the_budget_and_both_numbers_are_shown() -> None:
    early = decide_save(When(steps=100, budget=0.02), _pace(50, last_step=100, stalls=(4.0,)), 200)
    assert not early.save
    assert early.conflict == "step 200 is due, and an overhead budget of 2.00% allows one every 200 s: the budget wins"
    assert early.ask_again_step == 300  # 0.5 s a step, 150 s left: 300 steps; half of them are more than the 100 that were timed
    assert decide_save(When(steps=100, budget=0.02), _pace(200, last_step=100, stalls=(4.0,)), 500).save


def test_a_time_that_the_budget_forbids_is_in_conflict() -> None:
    decision = decide_save(When(secs=60, budget=0.02), _pace(60, stalls=(4.0,)), 10)
    assert not decision.save
    assert decision.conflict == "a save every 60 s is wanted, and an overhead budget of 2.00% allows one every 200 s: the budget wins"


@given(
    st.lists(st.floats(0, 50), min_size=2, max_size=30),
    st.lists(st.floats(0.01, 100), min_size=50, max_size=200),
    st.sampled_from([0.01, 0.02, 0.1]),
    st.sampled_from([{}, {"steps": 1}, {"steps": 3}, {"secs": 10.0}, {"secs": "auto", "mtbf_secs": 500.0}]),
)
def test_a_budget_is_kept_whatever_saves_and_steps_take(
    stalls: list[float], step_secs: list[float], budget: float, others: dict[str, Any]
) -> None:
    """When a save begins, all saves before it have taken at most that share of the time since the first began."""
    when, pace, now = When(budget=budget, **others), Pace().at(0.0), 0.0
    stalled, began = 0.0, None
    for step, secs in enumerate(step_secs, start=1):
        now += secs
        pace = pace.at(now)
        if decide_save(when, pace, step).save:
            began = now if began is None else began
            assert stalled <= budget * (now - began) * (1 + 1e-9) + 1e-9
            stall = stalls[step % len(stalls)]
            stalled += stall
            now += stall
            pace = pace.saved(step).stalled(stall).at(now)
    assert began is not None


# -- auto ---------------------------------------------------------------------------------------------------------------------


def test_auto_saves_at_once_to_learn_what_it_costs_and_then_at_the_optimum() -> None:
    when = When(secs="auto", mtbf_secs=36 * _HOUR)
    assert decide_save(when, _pace(0), 1).save
    early, late = (decide_save(when, _pace(secs, stalls=(240.0,)), 300) for secs in (7887, 7888))
    assert (early.save, late.save) == (False, True)
    assert late.interval is not None
    assert str(late.interval).startswith("a save every 7,887 s: saves take 3.04% of the time")


def test_auto_takes_the_median_of_what_saves_cost() -> None:
    decision = decide_save(When(secs="auto", mtbf_secs=36 * _HOUR), _pace(0, stalls=(900.0, 240.0, 230.0)), 2)
    assert decision.interval is not None
    assert decision.interval.optimum_secs == pytest.approx(7887.2, abs=0.05)


def test_autos_budget_wins_and_both_are_shown() -> None:
    when = When(secs="auto", mtbf_secs=36 * _HOUR, budget=0.02)
    early, late = (decide_save(when, _pace(secs, stalls=(240.0,)), 300) for secs in (11_999, 12_000))
    assert (early.save, late.save) == (False, True)
    for decision in (early, late):
        assert decision.conflict is not None
        assert "every 12,000 s (waste 6.63%)" in decision.conflict
        assert "every 7,887 s (overhead 3.04%, waste 6.09%)" in decision.conflict


def test_without_a_given_time_between_failures_auto_takes_what_was_observed() -> None:
    # a day assumed with one failure, and a day of running with two: 48 h / 3
    pace = _pace(0, stalls=(60.0,), running_secs=86_400.0, failures=2)
    assert pace.mtbf_secs == 16 * _HOUR
    decision = decide_save(When(secs="auto"), pace, 2)
    assert decision.interval is not None
    assert decision.interval.secs == pytest.approx(math.sqrt(2 * 60 * 16 * _HOUR))


def test_auto_does_not_save_before_the_last_save_is_over() -> None:
    decision = decide_save(When(secs="auto", mtbf_secs=1000), _pace(0, stalls=(0.5,), durable_secs=90.0), 2)
    assert decision.interval is not None
    assert (round(decision.interval.optimum_secs, 1), decision.interval.secs) == (31.6, 90)


# -- options ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "one of steps, phases, secs and budget"),
        ({"steps": 0}, "a whole number, at least 1"),
        ({"steps": True}, "a whole number, at least 1"),
        ({"steps": 2.5}, "a whole number, at least 1"),
        ({"steps": 5, "phases": (Phase(every=5),)}, "one of them"),
        ({"phases": (5,)}, "Phase(every=500"),
        ({"phases": 5}, "Phase(every=500"),
        ({"phases": (Phase(every=5, until=10),)}, "the last without"),
        ({"phases": (Phase(every=5), Phase(every=6))}, "each with an until"),
        ({"phases": (Phase(every=5, until=10), Phase(every=6, until=10), Phase(every=7))}, "above that of the one before"),
        ({"secs": 0}, "above 0"),
        ({"secs": -1}, "above 0"),
        ({"secs": math.nan}, "above 0"),
        ({"secs": "often"}, '"auto"'),
        ({"budget": 2}, "between 0 and 1"),
        ({"budget": 0}, "between 0 and 1"),
        ({"steps": 5, "mtbf_secs": 100}, 'secs="auto"'),
        ({"secs": 5, "restart_secs": 100}, 'secs="auto"'),
        ({"secs": "auto", "mtbf_secs": 0}, "above 0"),
        ({"secs": "auto", "restart_secs": -1}, "at least 0"),
    ],
)
def test_wrong_options_are_told_what_is_valid(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        When(**options)
    assert expected in str(caught.value)


def test_a_phase_is_checked() -> None:
    for options in ({"every": 0}, {"every": 5, "until": 0}, {"every": "5"}):
        with pytest.raises(InvalidOptionError, match="at least 1"):
            Phase(**options)  # type: ignore[arg-type]


def test_auto_is_short_for_the_option() -> None:
    assert When.of("auto") == When(secs="auto")
    assert When.of(_PHASES) is _PHASES
    for wrong in ("often", 5, None):
        with pytest.raises(InvalidOptionError, match="when is not known"):
            When.of(wrong)  # type: ignore[arg-type]


def test_options_are_frozen_and_decisions_travel() -> None:
    with pytest.raises(FrozenInstanceError):
        _PHASES.steps = 5  # type: ignore[misc]
    decision = decide_save(When(secs="auto", mtbf_secs=1000), _pace(0, stalls=(1.0,)), 2)
    assert pickle.loads(pickle.dumps(decision)) == decision
