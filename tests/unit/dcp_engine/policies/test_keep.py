"""What to keep: the worked week, tables of rules, and that the last good step survives whatever the rules and the steps are."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies import Best, Keep, StepFacts, plan_keep

_MIDNIGHT = datetime(2026, 3, 2, tzinfo=UTC)


def _steps(*numbers: int, **facts: Any) -> list[StepFacts]:
    return [StepFacts(step=number, saved_at=_MIDNIGHT, **facts) for number in numbers]


def _reasons(keep: Keep, steps: list[StepFacts]) -> dict[int, tuple[str, ...]]:
    return {decision.step: decision.reasons for decision in plan_keep(keep, steps).decisions}


# -- rules --------------------------------------------------------------------------------------------------------------------


def test_a_week_of_saves_every_two_hours() -> None:
    week = [StepFacts(step=k, saved_at=_MIDNIGHT + timedelta(hours=2 * k)) for k in range(1, 85)]
    plan = plan_keep(Keep(last=5, daily=True, pinned={30}), week)
    assert plan.kept == (11, 23, 30, 35, 47, 59, 71, 80, 81, 82, 83, 84)
    assert plan.surplus == tuple(sorted(set(range(1, 85)) - set(plan.kept)))


def test_the_week_is_the_same_when_retention_runs_after_each_save() -> None:
    there: list[StepFacts] = []
    for k in range(1, 85):
        there.append(StepFacts(step=k, saved_at=_MIDNIGHT + timedelta(hours=2 * k)))
        kept = plan_keep(Keep(last=5, daily=True, pinned={30}), there).kept
        there = [one for one in there if one.step in kept]
    assert kept == (11, 23, 30, 35, 47, 59, 71, 80, 81, 82, 83, 84)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(), (9,)),
        (Keep(last=3), (7, 8, 9)),
        (Keep(last=100), tuple(range(1, 10))),
        (Keep(every=4), (4, 8, 9)),
        (Keep(pinned=[2, 5, 77]), (2, 5, 9)),
        (Keep(daily=True), (9,)),
        (Keep(best=Best(metric="loss", num=2)), (3, 6, 9)),
        (Keep(best=Best(metric="loss", mode="max", num=2)), (1, 2, 9)),
        (Keep(best=Best(metric="accuracy", num=2)), (9,)),
        (Keep(last=2, every=5, pinned={1}, best=Best(metric="loss")), (1, 5, 6, 8, 9)),
    ],
)
def test_each_rule_keeps_what_it_names(keep: Keep, kept: tuple[int, ...]) -> None:
    losses = {1: 9.0, 2: 8.0, 3: 1.5, 4: 3.0, 5: 7.0, 6: 1.0, 7: math.nan, 8: 2.0}  # of step 9 nothing is known
    steps = [
        StepFacts(step=number, saved_at=_MIDNIGHT, metrics={"loss": losses[number]} if number in losses else {}) for number in range(1, 10)
    ]
    assert plan_keep(keep, steps).kept == kept
    assert plan_keep(keep, reversed(steps)).kept == kept


def test_of_equally_good_steps_the_newest_is_the_best() -> None:
    steps = _steps(1, 2, metrics={"loss": 1.0}) + _steps(3, metrics={"loss": 2.0})
    assert plan_keep(Keep(best=Best(metric="loss")), steps).kept == (2, 3)


def test_days_are_those_of_utc_and_clocks_that_go_back_do_no_harm() -> None:
    tokyo = timezone(timedelta(hours=9))
    steps = [
        StepFacts(step=1, saved_at=datetime(2026, 3, 2, 8, 59, tzinfo=tokyo)),  # 23:59 of the first, UTC
        StepFacts(step=2, saved_at=datetime(2026, 3, 2, 9, 0, tzinfo=tokyo)),
        StepFacts(step=3, saved_at=datetime(2026, 3, 1, 12, 0, tzinfo=UTC)),  # the clock has gone back
        StepFacts(step=4, saved_at=datetime(2026, 3, 2, 12, 0, tzinfo=UTC)),
    ]
    assert plan_keep(Keep(daily=True), steps).kept == (3, 4)


def test_a_step_of_an_unknown_day_stays_where_days_matter() -> None:
    steps = [StepFacts(step=1), *_steps(2, 3)]
    assert plan_keep(Keep(daily=True), steps).kept == (1, 3)
    assert plan_keep(Keep(), steps).kept == (3,)


def test_parts_of_a_state_are_counted_apart_and_save_nobody() -> None:
    steps = _steps(10, 20) + _steps(12, 14, 16, 22, 24, is_partial=True)
    assert plan_keep(Keep(last=2), steps).kept == (10, 20, 22, 24)
    assert plan_keep(Keep(last=1), steps).kept == (20, 22, 24)  # 22 has no newer whole step
    assert plan_keep(Keep(last=1, every=7), steps).kept == (20, 22, 24)


# -- reasons ------------------------------------------------------------------------------------------------------------------


def test_every_step_has_its_reasons() -> None:
    steps = [*_steps(10, 20, metrics={"loss": 0.5}), *_steps(30, 35, 40, is_healthy=True)]
    keep = Keep(last=1, every=20, daily=True, best=Best(metric="loss"), pinned={10})
    assert _reasons(keep, steps) == {
        10: ("pinned",),
        20: ("a multiple of 20", "one of the 1 best by loss: 0.5"),
        30: ("no rule names it",),
        35: ("no rule names it",),
        40: ("the newest good step", "the last healthy step", "one of the last 1", "a multiple of 20", "the last of 2026-03-02"),
    }


def test_a_plan_reads_as_a_dry_run() -> None:
    assert str(plan_keep(Keep(), _steps(1, 2))) == (
        "step 1: goes: no rule names it\nstep 2: stays: the newest good step, the last healthy step, one of the last 1"
    )
    assert str(plan_keep(Keep(), [])) == "there are no steps"


# -- what stays whatever the rules say --------------------------------------------------------------------------------------------


def test_divergence_does_not_age_the_last_healthy_verified_step_out() -> None:
    steps = [
        *_steps(1, 2, 3, is_healthy=True, is_verified=True),
        *_steps(4, is_healthy=True),
        *_steps(*range(5, 12), is_healthy=False, is_verified=True),
    ]
    assert _reasons(Keep(last=2), steps)[3] == ("the last healthy verified step",)
    assert plan_keep(Keep(last=2), steps).kept == (3, 4, 10, 11)


def test_where_no_step_is_known_to_be_healthy_the_newest_of_the_unknown_stays() -> None:
    steps = _steps(1, 2) + _steps(3, 4, is_healthy=False)
    assert plan_keep(Keep(), steps).kept == (2, 4)


def test_a_damaged_step_counts_for_no_rule_and_goes_once_there_is_a_newer_good_one() -> None:
    damaged = _steps(4, is_damaged=True) + _steps(8, is_verified=False)
    assert plan_keep(Keep(last=2, every=4), _steps(1, 2, 3, 5, 6) + damaged).kept == (5, 6, 8)
    assert plan_keep(Keep(last=2, pinned={4}), _steps(1, 2, 3, 5, 6) + damaged).kept == (4, 5, 6, 8)


def test_without_a_good_step_nothing_goes() -> None:
    steps = _steps(1, 2, is_damaged=True) + _steps(3, is_partial=True) + _steps(4, is_durable=False)
    assert plan_keep(Keep(), steps).surplus == ()


def test_nothing_goes_for_a_step_that_is_not_durable() -> None:
    assert plan_keep(Keep(), _steps(1) + _steps(2, is_durable=False)).kept == (1, 2)
    assert _reasons(Keep(), _steps(1, 2) + _steps(3, is_durable=False))[3] == ("not durable yet",)


def test_what_is_read_stays_and_so_does_what_a_newer_release_wrote() -> None:
    steps = _steps(1, is_read=True) + _steps(2, is_readable=False) + _steps(3, 4)
    assert _reasons(Keep(), steps) == {
        1: ("being read",),
        2: ("a newer release wrote it",),
        3: ("no rule names it",),
        4: ("the newest good step", "the last healthy step", "one of the last 1"),
    }


def test_milestones_of_the_run_stay() -> None:
    assert plan_keep(Keep(), _steps(1, is_pinned=True) + _steps(2, 3)).kept == (1, 3)


def test_where_verification_is_asked_for_nothing_goes_before_it() -> None:
    keep = Keep(verified=True)
    assert plan_keep(keep, _steps(1, 2, 3)).kept == (1, 2, 3)
    assert _reasons(keep, _steps(1, 2, 3))[1] == ("no newer step of its worth is durable and verified",)
    assert plan_keep(keep, _steps(1) + _steps(2, is_verified=True) + _steps(3)).kept == (2, 3)
    assert plan_keep(keep, _steps(1, 2) + _steps(3, is_verified=True)).kept == (3,)


_facts = st.builds(
    StepFacts,
    step=st.integers(0, 40),
    saved_at=st.none() | st.datetimes(datetime(2026, 1, 1), datetime(2026, 1, 9)).map(lambda at: at.replace(tzinfo=UTC)),
    is_durable=st.booleans(),
    is_damaged=st.booleans(),
    is_readable=st.booleans(),
    is_partial=st.booleans(),
    is_read=st.booleans(),
    is_healthy=st.sampled_from([None, True, False]),
    is_verified=st.sampled_from([None, True, False]),
    metrics=st.dictionaries(st.just("loss"), st.floats()),
)
_keeps = st.builds(
    Keep,
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 9),
    daily=st.booleans(),
    best=st.none() | st.just(Best(metric="loss", num=2)),
    pinned=st.sets(st.integers(0, 40), max_size=3),
    verified=st.booleans(),
)


@given(_keeps, st.lists(_facts, unique_by=lambda one: one.step))
def test_no_rules_and_no_steps_lose_what_a_run_comes_back_to(keep: Keep, steps: list[StepFacts]) -> None:
    plan = plan_keep(keep, steps)
    kept = {one.step for one in steps if one.step in plan.kept}
    good = [one for one in sorted(steps, key=lambda one: one.step) if one.is_good]
    for wanted in (
        good,
        [one for one in good if one.is_healthy],
        [one for one in good if one.is_healthy and one.is_verified],
    ):
        assert not wanted or wanted[-1].step in kept
    assert all(one.step in kept for one in steps if one.is_read or not one.is_durable or not one.is_readable or one.step in keep.pinned)
    for one in steps:
        if one.step not in kept:
            assert any(newer.step > one.step and newer.is_verified in ([True] if keep.verified else [None, True]) for newer in good)
    assert sorted([*plan.kept, *plan.surplus]) == sorted(one.step for one in steps)


@given(_keeps, st.lists(_facts, unique_by=lambda one: one.step))
def test_what_is_kept_once_is_kept_again_if_nothing_new_comes(keep: Keep, steps: list[StepFacts]) -> None:
    kept = plan_keep(keep, steps).kept
    assert plan_keep(keep, [one for one in steps if one.step in kept]).surplus == ()


# -- options ------------------------------------------------------------------------------------------------------------------


def test_a_rule_that_would_delete_the_last_good_step_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="at least 1; found 0; the newest good step is never deleted"):
        Keep(last=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"last": -1}, "at least 1"),
        ({"last": True}, "at least 1"),
        ({"last": 2.0}, "at least 1"),
        ({"every": 0}, "at least 1"),
        ({"daily": 1}, "True or False"),
        ({"verified": "yes"}, "True or False"),
        ({"best": ("loss", "min")}, 'Best(metric="loss", num=3)'),
        ({"pinned": 5}, "as in {30, 60}"),
        ({"pinned": "5"}, "as in {30, 60}"),
        ({"pinned": {5: 6}}, "as in {30, 60}"),
        ({"pinned": {-5}}, "at least 0"),
    ],
)
def test_wrong_options_are_told_what_is_valid(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        Keep(**options)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"metric": ""}, "not empty"), ({"metric": "a", "mode": "least"}, '"min" or "max"'), ({"metric": "a", "num": 0}, "at least 1")],
)
def test_best_is_checked(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        Best(**options)
    assert expected in str(caught.value)


def test_a_step_that_is_there_twice_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="twice"):
        plan_keep(Keep(), _steps(1, 1))
