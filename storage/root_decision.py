"""One rank decides which checkpoint there is, and every other one says whether it sees that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_engine.errors import RankDisagreementError
from dcp_engine.storage.rank_group import RankGroup, check_group

if TYPE_CHECKING:
    import torch.distributed as dist

    from dcp_engine.storage.root import Decision

__all__ = ["decide_together"]

# A network file system may take a moment to show what another node made.
_VISIBILITY_SECS = 15.0
_POLL_SECS = 0.25


@dataclass(frozen=True, slots=True)
class _Told:
    """What one rank tells the others: the decision of the first, then what each sees of it."""

    what: Decision | str | None


def decide_together(
    group: dist.ProcessGroup, decide: Callable[[], Decision | None], see: Callable[[int], Decision | str], *, path: str
) -> Decision | None:
    """See ``RunRoot.decide``.

    Args:
        decide: what is there. Called on the lowest rank.
        see: what this rank sees of a step. Called on all ranks, again for a while where that is something else.
        path: of the root.
    """
    check_group(group)
    ranks = RankGroup(group)
    mine, error = _caught(lambda: _Told(decide()) if ranks.rank == 0 else _Told(None))
    decision = ranks.exchange(mine, error, _Told)[0].what
    if decision is None:
        return None
    assert not isinstance(decision, str), "the lowest rank tells a decision"
    mine, error = _caught(lambda: _Told(_look(see, decision)))
    told = ranks.exchange(mine, error, _Told)
    for rank, seen in enumerate(told):
        if seen.what != decision:
            raise RankDisagreementError(
                "a rank sees another checkpoint than the one that is to be loaded",
                path=path,
                step=decision.step,
                rank=rank,
                expected=f"what rank 0 sees: {decision}",
                found=seen.what,
                remedy="the root must lie on one file system that all ranks see, mounted at the same place, and that step must stay",
            )
    return decision


def _look(see: Callable[[int], Decision | str], decision: Decision) -> Decision | str:
    deadline = time.monotonic() + _VISIBILITY_SECS
    while (seen := see(decision.step)) != decision and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return seen


def _caught(make: Callable[[], _Told]) -> tuple[_Told | None, BaseException | None]:
    """The others wait for this rank, whatever happens to it."""
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told to all ranks
        return None, error
