"""The planner of nodes that save each to a root of its own: what is missing there is likely on another node."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dcp_engine.errors import PlanError
from dcp_engine.planners import BalancedSavePlanner

__all__ = ["NodePlanner"]


class NodePlanner(BalancedSavePlanner):
    """A balanced planner that says why a node's ranks do not hold a whole tensor. Thread-safety: as its base."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See ``BalancedSavePlanner``."""
        try:
            return super().create_global_plan(all_plans)
        except PlanError as error:
            error.remedy = (
                "with node_local=True each node saves all that its own ranks hold, which must be the whole state: replicate over nodes and "
                "shard inside them, as DDP and HSDP do, or save to a root that all nodes share"
            )
            raise
