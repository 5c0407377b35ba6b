"""Medians, spreads and ratios of rounds."""

from __future__ import annotations

import pytest

from benchmarks.stats import Spread, growth_exponent, ratio, spread


def test_a_spread_is_median_least_and_greatest() -> None:
    assert spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0, 3)
    assert spread([2.0, 4.0]) == Spread(3.0, 2.0, 4.0, 2)
    assert spread([5.0]) == Spread(5.0, 5.0, 5.0, 1)


def test_nothing_has_no_spread() -> None:
    with pytest.raises(ValueError, match="no value"):
        spread([])


def test_ratios_are_taken_round_by_round() -> None:
    # The medians' ratio would be 2; a slow second round slowed both.
    slow = {0: 4.0, 1: 60.0, 2: 9.0}
    fast = {0: 2.0, 1: 20.0, 2: 3.0}
    assert ratio(slow, fast) == Spread(3.0, 2.0, 3.0, 3)


def test_rounds_that_only_one_took_part_in_do_not_count() -> None:
    assert ratio({0: 6.0, 1: 100.0}, {0: 2.0, 2: 1.0}) == Spread(3.0, 3.0, 3.0, 1)
    assert ratio({0: 6.0}, {1: 2.0}) is None
    assert ratio({}, {}) is None


@pytest.mark.parametrize(("values", "exponent"), [([1.0, 10.0, 100.0], 1.0), ([3.0, 300.0, 30000.0], 2.0), ([7.0, 7.0, 7.0], 0.0)])
def test_growth_is_the_power_of_the_size(values: list[float], exponent: float) -> None:
    assert growth_exponent([1.0, 10.0, 100.0], values) == pytest.approx(exponent)
