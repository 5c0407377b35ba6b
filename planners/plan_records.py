"""What the save planners of the ranks tell each other. It crosses ranks by pickle, inside DCP's ``SavePlan``, and is never stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import SavePlan

__all__ = ["LocalPlanData", "PlanReply", "ReusedPlan"]


@dataclass(frozen=True, slots=True)
class LocalPlanData:
    """``planner_data`` of a local plan.

    Attributes:
        digests: content of each item, ``[num_items]``; 0 where this rank knows that no other holds the same box.
        object_bytes: encoded size of each item that is an object, ``[num_items]``; 0 for tensors and where it is unknown.
        cached_plan_id: the items are those that this rank sent when the plan of this id was made, and are not sent again; nor are the
            fields below.
        mapping: key -> typed path; None where the state was not flattened.
        skeleton: the state's containers, encoded.
        ties: alias key -> key with the same memory on this rank.
    """

    digests: NDArray[np.uint64]
    object_bytes: NDArray[np.int64]
    cached_plan_id: str | None = None
    mapping: Mapping[str, tuple[str | int, ...]] | None = None
    skeleton: bytes = b""
    ties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanReply:
    """``planner_data`` of a plan on its way back to a rank: the id under which the coordinator keeps it."""

    plan_id: str


@dataclass(frozen=True)
class ReusedPlan(SavePlan):
    """A plan that its rank has already: its items stay behind when it is sent."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "items": []}
