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

    from dcp_engine.storage.step_info import Decision

__all__ = ["decide_together"]

# A network file system may take a moment to show what another node made.
_VISIBILITY_SECS = 15.0
_POLL_SECS = 0.25


@dataclass(frozen=True, slots=True)
class _Told:
    """What one rank tells the others: the decision of the first, then what each sees of it."""

    what: Decision | str | None


def decide_together(
    group: dist.ProcessGroup,
    decide: Callable[[], Decision | None],
    see: Callable[[int], Decision | str],
    see_any: Callable[[], str | None],
    *,
    path: str,
) -> Decision | None:
    """See ``RunRoot.decide``.

    Args:
        decide: what is there. Called on the lowest rank.
        see: what this rank sees of a step. Called on all ranks, again for a while where that is something else.
        see_any: which steps this rank sees, in words; ``None`` for none. Called on all ranks where the lowest one sees none.
        path: of the root.
    """
    check_group(group)
    ranks = RankGroup(group)
    mine, error = _caught(lambda: _Told(decide()) if ranks.rank == 0 else _Told(None))
    decision = ranks.exchange(mine, error, _Told)[0].what
    if decision is None:
        mine, error = _caught(lambda: _Told(see_any()))
        _require_none(ranks.exchange(mine, error, _Told), path)
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


def _require_none(told: list[_Told], path: str) -> None:
    """A run that begins afresh because one rank looks at another place would be the worst of all disagreements."""
    for rank, seen in enumerate(told):
        if seen.what is not None:
            raise RankDisagreementError(
                "rank 0 sees no committed step, and another rank does",
                path=path,
                rank=rank,
                expected="no committed step, as rank 0 sees it",
                found=seen.what,
                remedy="the root must lie on one file system that all ranks see, mounted at the same place",
            )


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
