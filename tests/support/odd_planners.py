"""Planners that fail or dawdle, where other processes can import them."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from dcp_engine import BalancedSavePlanner

__all__ = ["FailingPlanner", "SlowPlanner"]


class FailingPlanner(BalancedSavePlanner):
    """Fails on rank 1 when a tensor is resolved."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("a hook of the user's failed")
        return super().resolve_data(write_item)


class SlowPlanner(BalancedSavePlanner):
    """Takes a second for each value."""

    def resolve_data(self, write_item: Any) -> Any:
        time.sleep(1.0)
        return super().resolve_data(write_item)
