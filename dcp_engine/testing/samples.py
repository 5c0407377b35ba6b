"""Whether training took every sample once over a stop: what was taken twice and what never, on both sides of it. Pure: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["WINDOW_SAMPLES", "Boundary", "all_samples", "boundaries"]

WINDOW_SAMPLES: Final = 1000
"""Samples that are looked at on each side of a boundary."""

_Steps = Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The place where one leg went on from a checkpoint of the one before.

    Attributes:
        leg: name of the leg that went on.
        step: of the checkpoint.
        num_before: samples looked at before it.
        num_after: samples looked at after it.
        repeated: samples that are on both sides, and are not in the run that never stopped; sorted.
        lost: samples that the run that never stopped took after it, before the last one looked at, and this run did not; sorted.
    """

    leg: str
    step: int
    num_before: int
    num_after: int
    repeated: tuple[int, ...]
    lost: tuple[int, ...]


def all_samples(batches: Sequence[tuple[int, ...] | str | None]) -> tuple[int, ...] | str | None:
    """The samples of all ranks, sorted; those that several ranks have (tensor parallelism, padding) once.

    Args:
        batches: of each rank. Of texts only one that all ranks share is kept.
    """
    together: Counter[int] = Counter()
    for batch in batches:
        if not isinstance(batch, tuple):
            return batch if all(other == batch for other in batches) else None
        together |= Counter(batch)
    return tuple(sorted(together.elements()))


def boundaries(straight: _Steps, legs: Sequence[tuple[str, int, _Steps]], *, window: int = WINDOW_SAMPLES) -> tuple[Boundary, ...]:
    """Counts samples on both sides of each place where a leg went on.

    Args:
        straight: step -> samples of all ranks, of the run that never stopped.
        legs: name, step of the checkpoint that it went on from (0: none), and step -> samples of all ranks. Steps behind the checkpoint
            that the next leg went on from are no part of the run: they were trained again.
        window: samples to look at on each side.
    """
    expected = _flat(straight)
    taken: list[int] = []
    starts: list[tuple[str, int, int]] = []
    for number, (name, resumed_from, steps) in enumerate(legs):
        end = legs[number + 1][1] if number + 1 < len(legs) else max(steps, default=0)
        if number:
            starts.append((name, resumed_from, len(taken)))
        taken += _flat({step: ids for step, ids in steps.items() if step <= end})
    return tuple(_boundary(name, step, expected, taken, at, window) for name, step, at in starts)


def _flat(steps: _Steps) -> list[int]:
    # Sorted within a step: ranks of another number have other parts of it.
    return [sample for step in sorted(steps) for sample in sorted(steps[step])]


def _boundary(leg: str, step: int, expected: Sequence[int], taken: Sequence[int], at: int, window: int) -> Boundary:
    start = max(0, at - window)
    before, after = taken[start:at], taken[at : at + window]
    on_both = Counter(before) & Counter(after)
    on_both -= Counter(expected[start:at]) & Counter(expected[at : at + len(after)])
    # Up to the sample that was looked at last: what comes behind it may still be taken.
    usual = at + len(after)
    places = [place + 1 for place in range(at, min(len(expected), usual + window)) if after and expected[place] == after[-1]]
    end = min(places, key=lambda place: abs(place - usual), default=usual)
    missing = Counter(expected[at:end]) - Counter(after)
    return Boundary(
        leg=leg,
        step=step,
        num_before=len(before),
        num_after=len(after),
        repeated=tuple(sorted(on_both.elements())),
        lost=tuple(sorted(missing.elements())),
    )
