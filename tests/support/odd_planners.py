"""Planners that fail, dawdle or meddle, where other processes can import them."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from dcp_engine import BalancedSavePlanner

__all__ = ["FailingPlanner", "HangingPlanner", "MeddlingPlanner", "SlowPlanner", "UnpicklableError"]


class UnpicklableError(Exception):
    """Can neither be sent, nor made again from its text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class FailingPlanner(BalancedSavePlanner):
    """Fails on one rank when a tensor is resolved.

    Args:
        how: "raise", "unpicklable", "sys.exit", or "die" at once.
        rank: on which.
    """

    def __init__(self, how: str = "raise", rank: int = 1) -> None:
        super().__init__()
        self.how = how
        self.rank = rank

    def resolve_data(self, write_item: Any) -> Any:
        if (dist.get_rank() if dist.is_initialized() else 0) == self.rank:
            if self.how == "sys.exit":
                sys.exit(17)
            if self.how == "die":
                os._exit(17)
            if self.how == "unpicklable":
                raise UnpicklableError("a hook of the user's failed", 17)
            raise ValueError("a hook of the user's failed")
        return super().resolve_data(write_item)


class HangingPlanner(BalancedSavePlanner):
    """Does not come back for a minute on rank 1."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(60.0)
        return super().resolve_data(write_item)


class SlowPlanner(BalancedSavePlanner):
    """Takes a second for each value."""

    def resolve_data(self, write_item: Any) -> Any:
        time.sleep(1.0)
        return super().resolve_data(write_item)


class MeddlingPlanner(BalancedSavePlanner):
    """Writes to the staged state while it is saved."""

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        if isinstance(value, torch.Tensor):
            value.add_(1)
        return value
