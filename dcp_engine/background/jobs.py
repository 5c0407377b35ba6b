"""What a saver hands to an executor, and gets back."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcp_engine.types import WritePhases

__all__ = ["Executor", "SaveJob", "SaveOutcome"]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save.

    Attributes:
        state: staged, or a future of it.
        writer, planner: DCP's.
    """

    state: dict[str, Any] | Future[dict[str, Any]]
    writer: StorageWriter
    planner: SavePlanner


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """A save that went well.

    Attributes:
        metadata: what ``dcp.save`` returned.
        phases: the writer's own, None for a writer that does not tell.
    """

    metadata: Metadata
    phases: WritePhases | None


class Executor(Protocol):
    """Where saves run. Called by one thread of the saver, which may wait for it."""

    def begin(self) -> None:
        """Called once, first, by the thread that will call the others."""

    def prepare(self, group: dist.ProcessGroup | None) -> None:
        """Be ready to save. All ranks call it alike, before each save."""

    def run(self, job: SaveJob, group: dist.ProcessGroup | None) -> SaveOutcome:
        """Save; raises whatever ``dcp.save`` raises. All ranks run the same jobs in the same order."""

    def close(self) -> None:
        """End; idempotent."""

    def kill(self) -> None:
        """Break off what runs, as far as that can be done, from another thread."""
