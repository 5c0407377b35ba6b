"""Who is dead, stopped or hung, from what the ranks show of themselves. Pure: clock and beats come from outside."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass

from dcp_engine.errors import RankLostError

__all__ = ["ARRIVING", "LEFT", "Beat", "Limits", "Pulses"]

ARRIVING = "coming to the save"
LEFT = "left"


@dataclass(frozen=True, slots=True)
class Beat:
    """What one rank shows every few seconds.

    Attributes:
        count: grows with every beat: its process runs.
        save: number of the save that it is in or has ended last; 0 before the first.
        phase: what it does in it; :data:`LEFT` once it will take part in none any more.
        is_work: whether the phase is its own work; else it waits for others.
        progress: grows while that work gets on; None where nothing tells.
    """

    count: int
    save: int
    phase: str
    is_work: bool = False
    progress: int | None = None

    def encode(self) -> str:
        """As it is stored."""
        return json.dumps(astuple(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Beat:
        """Of another rank's :meth:`encode`."""
        return cls(*json.loads(text))


@dataclass(frozen=True, slots=True)
class Limits:
    """When a rank counts as failed, in seconds.

    Attributes:
        stall_secs: no beat; or no progress in work that shows some.
        patience_secs: it lives, but does not come to the save, or stays in work that shows no progress: slow is not dead.
    """

    stall_secs: float
    patience_secs: float


@dataclass(slots=True)
class _Seen:
    beat: Beat | None
    beat_at: float
    work_at: float


class Pulses:
    """What a watcher has seen of others, in one save.

    Times are those at which this watcher saw a change, by its own clock: no clocks of different machines are compared.

    Args:
        save: number of the save.
        ranks: to watch.
        limits: see there.
        now: of the clock, in seconds.
    """

    def __init__(self, save: int, ranks: list[int], limits: Limits, now: float) -> None:
        self.save = save
        self._limits = limits
        self._seen = {rank: _Seen(None, now, now) for rank in ranks}

    @property
    def ranks(self) -> list[int]:
        """Whom to look at."""
        return list(self._seen)

    def saw(self, rank: int, beat: Beat, now: float) -> None:
        """A look at one rank's beat."""
        seen = self._seen[rank]
        before = seen.beat
        if before is None or beat.count != before.count:
            seen.beat_at = now
        if before is None or (beat.save, beat.phase, beat.progress) != (before.save, before.phase, before.progress):
            seen.work_at = now
        seen.beat = beat

    def forgive(self, now: float) -> None:
        """The watcher itself did not run for a while, so that it cannot tell who else did not."""
        for seen in self._seen.values():
            seen.beat_at = seen.work_at = now

    def lost(self, now: float) -> RankLostError | None:
        """The first rank that has failed, if one has."""
        for rank, seen in self._seen.items():
            found = self._fault(seen, now)
            if found is not None:
                beat = seen.beat
                phase = ARRIVING if beat is None or beat.save < self.save else beat.phase
                return RankLostError(
                    "a rank is lost",
                    rank=rank,
                    phase=phase,
                    found=found,
                    remedy="look at that rank's log and process; replace it, or save again if it goes on",
                )
        return None

    def _fault(self, seen: _Seen, now: float) -> str | None:
        beat = seen.beat
        silent_secs, idle_secs = now - seen.beat_at, now - seen.work_at
        if silent_secs > self._limits.stall_secs:
            return f"no sign of life for {silent_secs:.0f} s: its process is dead or stopped"
        if beat is None:
            return None
        if beat.phase == LEFT:
            return "it has left: its saver was closed, or its process ends"
        if beat.save < self.save:
            return f"it lives, but has not come for {idle_secs:.0f} s" if idle_secs > self._limits.patience_secs else None
        if beat.save > self.save or not beat.is_work:
            return None
        if beat.progress is not None and idle_secs > self._limits.stall_secs:
            return f"it lives, but its work hangs: no progress for {idle_secs:.0f} s"
        return f"it lives, but its work has not ended for {idle_secs:.0f} s" if idle_secs > self._limits.patience_secs else None
