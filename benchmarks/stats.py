"""Medians, spreads and ratios of rounds: pure arithmetic on what the harness timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Spread", "growth_exponent", "ratio", "spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """What a number was over the rounds.

    Attributes:
        median: of all rounds.
        low: smallest.
        high: largest.
        num: rounds.
    """

    median: float
    low: float
    high: float
    num: int


def spread(values: Iterable[float]) -> Spread:
    """The spread of at least one value.

    Raises:
        ValueError: there is none.
    """
    known = list(values)
    if not known:
        raise ValueError("no value to take a median of")
    return Spread(statistics.median(known), min(known), max(known), len(known))


def ratio(of: Mapping[int, float], to: Mapping[int, float]) -> Spread | None:
    """The ratios ``of / to`` of the rounds that both took part in: a round's runs lie close together in time, so that what slows the
    machine down for a while slows both.

    Args:
        of: round -> seconds.
        to: round -> seconds, none of them zero.

    Returns:
        None where no round has both.
    """
    common = sorted(of.keys() & to.keys())
    return spread(of[number] / to[number] for number in common) if common else None


def growth_exponent(sizes: Iterable[float], values: Iterable[float]) -> float:
    """Slope of the least-squares line through ``(log size, log value)``: 1 where the value grows as the size does.

    Args:
        sizes: at least two different ones, positive.
        values: one a size, positive.
    """
    slope, _ = statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values])
    return slope
