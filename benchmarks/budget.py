"""Who runs another round while a case's seconds last: a pure decision on seconds that were measured, not guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MIN_ROUNDS", "Turn", "takes_part"]

MIN_ROUNDS = 3
"""Rounds of a system that enters a ratio, however long they take: a median of fewer is no median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A system that could run once more.

    Attributes:
        name: of the system.
        compared: its time enters a ratio.
        rounds: how often it has run.
        max_rounds: how often it may run at most.
        secs: what a run takes with everything around it, as measured so far; 0 before the first.
    """

    name: str
    compared: bool
    rounds: int
    max_rounds: int
    secs: float


def takes_part(turns: Sequence[Turn], *, left_secs: float) -> list[str]:
    """The systems of the next round, in their given order.

    Everybody runs once. Whoever is compared then has its :data:`MIN_ROUNDS` for certain, and the seconds for them are set aside. What is
    left goes to further rounds of those who are compared, then to the others, the quick ones first: so it is the slow peers who get fewer.

    Args:
        turns: all systems that still run.
        left_secs: what the case has left; below zero when it is overdrawn.
    """
    due = {turn.name: _due(turn) for turn in turns}
    chosen = {name for name, rounds in due.items() if rounds > 0}
    left_secs -= sum(due[turn.name] * turn.secs for turn in turns)
    for turn in sorted(turns, key=lambda turn: (not turn.compared, turn.secs)):
        if turn.name not in chosen and turn.rounds < turn.max_rounds and turn.secs <= left_secs:
            chosen.add(turn.name)
            left_secs -= turn.secs
    return [turn.name for turn in turns if turn.name in chosen]


def _due(turn: Turn) -> int:
    """Rounds that it must still have, whatever they take."""
    wanted = MIN_ROUNDS if turn.compared else 1
    return max(0, min(wanted, turn.max_rounds) - turn.rounds)
