"""Plans of earlier saves, kept on the planner itself and dropped by any error.

DCP's own cache lives on the class, so that a second planner, or a second save to another place, replays what was never meant for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from dcp_engine.errors import PlanError
from dcp_engine.planners.save_global import GlobalPlan, RankPlan
from dcp_engine.planners.save_local import LocalLayout, LocalPlanData, PlanRef
from dcp_engine.types import Path

__all__ = ["GlobalPlanCache", "KnownPlan", "LocalPlanCache", "ReusedPlan"]

_NUM_KEPT = 3
"""A rank that sat out saves of a smaller process group is a plan or two behind the others."""


@dataclass(frozen=True)
class ReusedPlan(SavePlan):
    """A plan that its rank has already: its items stay behind when it is sent."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "items": []}


@dataclass(frozen=True, slots=True)
class LocalPlanCache:
    """A rank's last plan.

    Attributes:
        ref: its name on the coordinator.
        layout: everything that the plan followed from, but for contents.
        items: the final local plan.
    """

    ref: PlanRef
    layout: LocalLayout
    items: Sequence[WriteItem]


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A global plan with the local plans it was made of, and the arguments of its ``PlannerData``."""

    plan_id: str
    local: tuple[RankPlan, ...]
    made: GlobalPlan
    mapping: dict[str, Path] | None
    skeleton: bytes

    def holds_for(self, plans: Sequence[RankPlan]) -> bool:
        """Whether the same plan would be made of these, which differ from ``local`` in contents at most."""
        if self.made.by_policy or len(plans) != len(self.local):
            return False
        if not self.made.order.size:
            return True
        contents = np.concatenate([plan.data.digests for plan in plans])[self.made.order]
        return bool((contents != 0).all() and (contents == contents[self.made.groups]).all())


class GlobalPlanCache:
    """The coordinator's last few plans.

    Thread-safety: none.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, KnownPlan] = OrderedDict()

    def add(self, plan: KnownPlan) -> None:
        """Keep a plan, and forget the oldest one."""
        self._known[plan.plan_id] = plan
        self._known.move_to_end(plan.plan_id)
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)

    def whole(self, plans: Sequence[SavePlan]) -> KnownPlan | None:
        """The plan that all ranks refer to; None where any sent its items, or they refer to different ones."""
        refs = [plan.planner_data.cached for plan in plans]
        known = None if refs[0] is None else self._known.get(refs[0].plan_id)
        return known if known is not None and refs == [PlanRef(known.plan_id, rank) for rank in range(len(plans))] else None

    def expand(self, rank: int, plan: SavePlan) -> RankPlan:
        """A rank's local plan in full.

        Raises:
            PlanError: it comes from another planner, or refers to a plan that is not known here.
        """
        data = plan.planner_data
        if not isinstance(data, LocalPlanData):
            raise PlanError(
                "a rank planned its part of the save with another planner",
                rank=rank,
                expected="BalancedSavePlanner on every rank",
                found=f"planner_data of type {type(data).__name__}",
                remedy="pass the same kind of planner to dcp.save on every rank, and keep SavePlan.planner_data in subclasses",
            )
        if data.cached is None:
            return RankPlan(plan.items, data)
        known = self._known.get(data.cached.plan_id)
        if known is None:
            raise PlanError(
                "a rank refers to an earlier plan that this coordinator did not make",
                rank=rank,
                remedy="make or replace the planner on all ranks together, one for each process group; the next save plans afresh",
            )
        local = known.local[data.cached.rank]
        return RankPlan(local.items, replace(local.data, digests=data.digests, object_bytes=data.object_bytes))
