"""How often to save: worked values, and that the optimum is one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies import choose_interval, daly_interval, waste, young_interval

_HOUR = 3600.0
_costs = st.floats(0.01, 600)
_mtbfs = st.floats(2000, 1e7)


def test_the_optimum_of_a_save_of_four_minutes_and_a_failure_in_36_hours() -> None:
    assert young_interval(240, 36 * _HOUR) == pytest.approx(7887.2, abs=0.05)
    assert young_interval(240, 36 * _HOUR) / 60 == pytest.approx(131.45, abs=0.005)
    assert daly_interval(240, 36 * _HOUR) / 60 == pytest.approx(128.80, abs=0.005)
    assert waste(7887.2, save_secs=240, mtbf_secs=36 * _HOUR) == pytest.approx(0.0609, abs=5e-5)


def test_waste_of_500_steps_of_30_seconds() -> None:
    assert waste(500 * 30, save_secs=120, mtbf_secs=24 * _HOUR) == pytest.approx(0.0948, abs=5e-5)
    assert waste(500 * 30, save_secs=120, mtbf_secs=24 * _HOUR, restart_secs=240) == pytest.approx(0.0976, abs=5e-5)


@pytest.mark.parametrize(("steps", "percent"), [(200, 5.47), (300, 6.54), (500, 9.48), (1000, 17.76)])
def test_waste_of_other_intervals(steps: int, percent: float) -> None:
    assert 100 * waste(steps * 30, save_secs=120, mtbf_secs=24 * _HOUR) == pytest.approx(percent, abs=0.005)


def test_the_optimum_of_two_minutes_and_a_failure_a_day() -> None:
    chosen = choose_interval(save_secs=120, mtbf_secs=24 * _HOUR)
    assert chosen.secs == pytest.approx(4553.7, abs=0.05)
    assert chosen.secs / 30 == pytest.approx(151.8, abs=0.05)
    assert chosen.waste == pytest.approx(0.0527, abs=5e-5)
    assert chosen.conflict is None


def test_a_restart_costs_the_same_at_any_interval() -> None:
    without, with_restart = (choose_interval(save_secs=120, mtbf_secs=24 * _HOUR, restart_secs=secs) for secs in (0, 240))
    assert with_restart.secs == without.secs
    assert with_restart.waste - without.waste == pytest.approx(240 / 86400)
    assert with_restart.lost_secs == pytest.approx(4553.7 / 2 + 240, abs=0.05)


def test_a_budget_in_conflict_with_the_optimum_wins_and_both_are_shown() -> None:
    chosen = choose_interval(save_secs=240, mtbf_secs=36 * _HOUR, budget=0.02)
    assert chosen.secs == chosen.budget_secs == 12_000
    assert chosen.overhead == pytest.approx(0.02)
    assert chosen.waste == pytest.approx(0.0663, abs=5e-5)
    assert chosen.optimum_overhead == pytest.approx(0.0304, abs=5e-5)
    assert chosen.conflict == (
        "an overhead budget of 2.00% allows a save every 12,000 s (waste 6.63%), and the optimum would be one every 7,887 s "
        "(overhead 3.04%, waste 6.09%): the budget wins"
    )


def test_a_budget_that_the_optimum_keeps_changes_nothing() -> None:
    chosen = choose_interval(save_secs=240, mtbf_secs=36 * _HOUR, budget=0.04)
    assert chosen.secs == pytest.approx(7887.2, abs=0.05)
    assert chosen.conflict is None


def test_the_expected_loss_is_shown() -> None:
    text = str(choose_interval(save_secs=240, mtbf_secs=36 * _HOUR, restart_secs=60))
    # T/2 + R = 3,943.6 + 60; waste 6.09 % + 60 s / 129,600 s
    assert text == "a save every 7,887 s: saves take 3.04% of the time, saves and failures 6.13%; a failure loses 4,004 s on average"


def test_no_save_begins_before_the_last_one_has_ended() -> None:
    chosen = choose_interval(save_secs=0.5, mtbf_secs=24 * _HOUR, durable_secs=600)
    assert chosen.optimum_secs == pytest.approx(293.94, abs=0.005)
    assert chosen.secs == 600
    assert chosen.lost_secs == 900


def test_a_save_that_costs_nothing_is_made_after_every_step() -> None:
    chosen = choose_interval(save_secs=0, mtbf_secs=1000, restart_secs=10)
    assert (chosen.secs, chosen.overhead, chosen.waste, chosen.lost_secs) == (0, 0, 0.01, 10)


def test_saves_longer_than_the_time_between_failures_are_at_most_one_between_two_failures() -> None:
    assert daly_interval(300, 100) == 100


@given(_costs, _mtbfs, st.floats(0.05, 20))
def test_no_other_interval_wastes_less_than_youngs(cost: float, mtbf: float, factor: float) -> None:
    best = young_interval(cost, mtbf)
    assert waste(best, save_secs=cost, mtbf_secs=mtbf) <= waste(best * factor, save_secs=cost, mtbf_secs=mtbf) * (1 + 1e-12)


@given(st.floats(0.01, 10), st.floats(1e5, 1e7))
def test_dalys_higher_order_is_the_optimum_of_exponential_failures(cost: float, mtbf: float) -> None:
    """Daly's exact model, by its own formula: total time is proportional to (exp((T + C) / M) - 1) / T."""

    def total(secs: float) -> float:
        return math.expm1((secs + cost) / mtbf) / secs

    best = daly_interval(cost, mtbf)
    assert total(best) <= min(total(0.97 * best), total(1.03 * best))


@given(_costs, _mtbfs, st.floats(0.001, 0.5), st.floats(0, 1000))
def test_a_budget_is_always_kept(cost: float, mtbf: float, budget: float, durable: float) -> None:
    chosen = choose_interval(save_secs=cost, mtbf_secs=mtbf, budget=budget, durable_secs=durable)
    assert chosen.overhead <= budget * (1 + 1e-12)
    assert chosen.secs >= max(chosen.optimum_secs, durable)
    assert (chosen.conflict is not None) == (cost / budget > young_interval(cost, mtbf))


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, True, "1", None])
def test_what_is_no_duration_is_refused(bad: object) -> None:
    for call in (
        lambda: young_interval(bad, 1),  # type: ignore[arg-type]
        lambda: young_interval(1, bad),  # type: ignore[arg-type]
        lambda: daly_interval(bad, 1),  # type: ignore[arg-type]
        lambda: waste(bad, save_secs=1, mtbf_secs=1),  # type: ignore[arg-type]
        lambda: waste(1, save_secs=1, mtbf_secs=1, restart_secs=bad),  # type: ignore[arg-type]
        lambda: choose_interval(save_secs=1, mtbf_secs=1, durable_secs=bad),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidOptionError, match="finite number of seconds"):
            call()


@pytest.mark.parametrize("bad", [0, 1, -0.1, 2, math.nan, True, "2 %"])
def test_what_is_no_budget_is_refused(bad: object) -> None:
    with pytest.raises(InvalidOptionError, match=r"budget is no share; expected a number between 0 and 1"):
        choose_interval(save_secs=1, mtbf_secs=1, budget=bad)  # type: ignore[arg-type]
