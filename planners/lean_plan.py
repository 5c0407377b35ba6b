"""A load plan that leaves its items at home when it travels: no rank but its own needs them.

DCP gathers all local plans on the coordinator and scatters them back, by pickle. A million read items take minutes there, and nobody looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_engine.errors import PlanError

__all__ = ["LeanLoadPlan", "with_items"]


@dataclass
class LeanLoadPlan(LoadPlan):
    """``items`` are complete on the rank that made the plan, and empty once it was pickled. Only for our own reader, which agrees to that.

    Attributes:
        num_left: number of items that the pickled plan left at home.
    """

    num_left: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LeanLoadPlan, ([], self.storage_data, self.planner_data, self.num_left + len(self.items))


def with_items(plan: LoadPlan, items: Sequence[ReadItem]) -> LoadPlan:
    """``plan`` with the items that it left at home, which are ``items``; any other plan as it is.

    Raises:
        PlanError: somebody added items or took some away, which pickling then lost.
    """
    if not isinstance(plan, LeanLoadPlan) or not plan.num_left:
        return plan
    if plan.items or plan.num_left != len(items):
        raise PlanError(
            "the items of a load plan were changed on their way",
            expected=len(items),
            found=plan.num_left + len(plan.items),
            remedy="change items in finish_plan",
        )
    return replace(plan, items=list(items), num_left=0)
