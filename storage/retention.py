"""Which steps may go: pure decisions over the steps that are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_engine.errors import InvalidOptionError

__all__ = ["PruneReport", "check_keep_last", "surplus_steps"]


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a call of ``prune`` has done.

    Attributes:
        retired: steps that are gone, ascending.
        in_use: steps that would have gone, had nobody read them, ascending. The next call tries again.
        kept: steps that stay, ascending, without those in use.
        guarded: no step could go while somebody read it. False on object stores and file systems without locks, where such a read ends in
            ``CheckpointNotFoundError``. None: no step was to go, so that nothing has shown what the storage can.
    """

    retired: tuple[int, ...]
    in_use: tuple[int, ...]
    kept: tuple[int, ...]
    guarded: bool | None


def check_keep_last(keep_last: object) -> int:
    """The number of steps to keep. ``InvalidOptionError`` if it is none."""
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise InvalidOptionError("keep_last is not a number of steps", expected="an int of at least 1", found=repr(keep_last)[:300])
    return keep_last


def surplus_steps(committed: Iterable[int], *, newest_good: int | None, keep_last: int) -> Sequence[int]:
    """The steps to retire so that ``keep_last`` good ones stay.

    Args:
        committed: all committed steps.
        newest_good: the newest of them that proved to be readable; None if none did.
        keep_last: how many to keep, the newest good one among them, counted from that one down. Newer ones that are not good do not count.

    Returns:
        ascending; empty without a good step, since then any of them may be all that is left.
    """
    if newest_good is None:
        return []
    candidates = sorted(step for step in committed if step <= newest_good)
    return candidates[: max(0, len(candidates) - keep_last)]
