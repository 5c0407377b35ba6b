"""Roots with real checkpoints in them, for tests of who writes there and what goes. A step's tensor holds its step and who wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, RunRoot, ShardReader, ShardWriter
from dcp_engine.storage.attempts import Fence

__all__ = ["RootPlace", "loaded", "save_step"]


def save_step(root: RunRoot, step: int, fence: Fence | None = None, *, writer: int = 0, **options: Any) -> None:
    """Publishes a step."""
    state = {"model": {"w": torch.tensor([step, writer])}}
    dcp.save(state, storage_writer=ShardWriter(root.path_of(step), fence=fence, threads=1, **options), planner=BalancedSavePlanner())


def loaded(root: RunRoot, step: int, **options: Any) -> list[int]:
    """The step and the writer that a checkpoint's data says, every byte of it verified."""
    state = {"model": {"w": torch.zeros(2, dtype=torch.int64)}}
    dcp.load(state, storage_reader=ShardReader(root.path_of(step), threads=1, **options), planner=ReshardLoadPlanner())
    values: list[int] = state["model"]["w"].tolist()
    return values


@dataclass(frozen=True)
class RootPlace:
    """Where a root is, in a storage of some kind."""

    path: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def root(self) -> RunRoot:
        """As another process would see it."""
        return RunRoot(self.path, storage_options=self.storage_options)

    def save(self, step: int, fence: Fence | None = None, **options: Any) -> None:
        """See :func:`save_step`."""
        save_step(self.root(), step, fence, storage_options=self.storage_options, **options)

    def loaded(self, step: int) -> list[int]:
        """See :func:`loaded`."""
        return loaded(self.root(), step, storage_options=self.storage_options)
