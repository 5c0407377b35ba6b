"""What one part of the fault campaign has done and found: the same record for all, so that one table shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MAX_BAD", "Outcome"]

MAX_BAD = 20
"""Broken promises that are kept in words; more would say nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one part.

    Attributes:
        part: its name on the command line.
        points: faults that were really put; what did not happen is not counted.
        seed: of everything that was drawn.
        facts: counts by kind, in the order of the table.
        bad: broken promises in words, each with what reproduces it; at most ``MAX_BAD``. Empty, or the engine is wrong.
        secs: that it took.
    """

    part: str
    points: int
    seed: int
    facts: Mapping[str, int]
    bad: tuple[str, ...]
    secs: float
