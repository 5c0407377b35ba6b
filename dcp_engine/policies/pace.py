"""How saving has gone so far: the facts that decisions by time are made from, kept without a clock of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Self

__all__ = ["ASSUMED_MTBF_SECS", "Pace"]

ASSUMED_MTBF_SECS: Final = 86_400.0
"""What a run that has seen no failure begins with: it counts like one failure in a day."""

_NUM_STALLS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What one rank, which measures for all, knows of a run's time. Methods return a new one.

    Attributes:
        last_step: the newest step that was saved, or that the run began behind.
        clock_secs: the newest reading of a monotonic clock, of any zero; None before the first.
        since_secs: from the beginning of the newest save, or of this process's part of the run, to that reading.
        since_step: the step that had been made at that beginning.
        stalled_secs: the part of it in which a save kept training from training.
        stalls: for how long each of the newest saves kept training from training, oldest first, in seconds.
        durable_secs: from the beginning of the newest durable save until it was durable.
        running_secs: that the run has trained, in all processes before this one, too.
        failures: how often it had to be started again.
    """

    last_step: int = 0
    clock_secs: float | None = None
    since_secs: float = 0.0
    since_step: int = 0
    stalled_secs: float = 0.0
    stalls: tuple[float, ...] = ()
    durable_secs: float = 0.0
    running_secs: float = 0.0
    failures: int = 0

    def at(self, now_secs: float) -> Self:
        """Time goes on.

        A clock that goes back, or reads nothing finite, adds nothing, and counts on from where it is: what was due stays due. One that
        leaps ahead makes the next save early, once.
        """
        if not math.isfinite(now_secs):
            return self
        passed = 0.0 if self.clock_secs is None else max(0.0, now_secs - self.clock_secs)
        return replace(self, clock_secs=now_secs, since_secs=self.since_secs + passed, running_secs=self.running_secs + passed)

    def begun(self, step: int) -> Self:
        """A process begins to tell its steps, with this one: it is not saved yet."""
        return replace(self, last_step=step - 1, since_step=step)

    def saved(self, step: int) -> Self:
        """A save of this step begins, at the time of the newest reading."""
        return replace(self, last_step=step, since_secs=0.0, since_step=step, stalled_secs=0.0)

    def restarted(self, step: int) -> Self:
        """A process that goes on behind this step, with a clock of its own, after one that died."""
        return replace(self.saved(step), clock_secs=None, failures=self.failures + 1)

    def stalled(self, secs: float) -> Self:
        """It has kept training from training for so long."""
        secs = max(0.0, secs)
        return replace(self, stalled_secs=secs, stalls=(*self.stalls, secs)[-_NUM_STALLS:])

    @property
    def stall_secs(self) -> float | None:
        """What a save costs: the median of the newest, since the first also makes its buffers. None before the first."""
        return median(self.stalls) if self.stalls else None

    @property
    def mtbf_secs(self) -> float:
        """Mean time between failures as observed: the time and the failures of the run, and :data:`ASSUMED_MTBF_SECS` with one failure, so
        that a young run has an answer, which counts for less and less.
        """
        return (ASSUMED_MTBF_SECS + self.running_secs) / (1 + self.failures)

    def step_secs(self, step: int) -> float | None:
        """Mean duration of a step since the newest save; None where none is over."""
        trained_secs = self.since_secs - self.stalled_secs
        return trained_secs / (step - self.since_step) if step > self.since_step and trained_secs > 0 else None
