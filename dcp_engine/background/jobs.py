"""What a saver hands to an executor, and gets back."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcp_engine.background.cut import Cut
from dcp_engine.background.exchange import Exchange
from dcp_engine.background.run import SaveRun
from dcp_engine.planners import BalancedSavePlanner
from dcp_engine.storage import ShardWriter
from dcp_engine.types import WritePhases

__all__ = ["Executor", "SaveJob", "SaveOutcome", "read_split_tensors", "staged_state", "writer_progress"]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save.

    Attributes:
        state: staged, or a future of it.
        writer, planner: DCP's.
        cut: where this rank stands.
    """

    state: dict[str, Any] | Future[dict[str, Any]]
    writer: StorageWriter
    planner: SavePlanner
    cut: Cut


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """A save that went well.

    Attributes:
        metadata: what ``dcp.save`` would return.
        phases: the writer's own, None for a writer that does not tell.
    """

    metadata: Metadata
    phases: WritePhases | None


class Executor(Protocol):
    """Where saves run. ``run`` is called in one thread after the other; one that was left behind in it finds its save over."""

    @property
    def sees_buffers(self) -> bool:
        """Whether what is saved is read from the stager's buffers themselves, together with what is known of them."""

    def begin(self) -> None:
        """Called once, first, in the thread from which all those that call ``run`` are started."""

    def run(self, job: SaveJob, run: SaveRun, exchange: Exchange) -> SaveOutcome:
        """Save; raises whatever the steps raise. All ranks run the same jobs in the same order."""

    def progress(self, job: SaveJob) -> int | None:
        """Grows while this rank's part of the save gets on; None where nothing tells. From any thread."""

    def close(self) -> None:
        """End; idempotent."""

    def kill(self) -> None:
        """Break off what runs, as far as that can be done, from another thread."""


def staged_state(job: SaveJob, run: SaveRun) -> dict[str, Any]:
    """What is to be saved, waited for where it is still copied from a device."""
    if not isinstance(job.state, Future):
        return job.state
    run.enter("staging")
    return job.state.result()


def read_split_tensors(writer: StorageWriter, planner: SavePlanner) -> bool:
    """Whether both know staged floats that were taken apart on their device. To all others these are noise."""
    knows = isinstance(writer, ShardWriter) and writer.takes_split_tensors
    return knows and isinstance(planner, BalancedSavePlanner) and planner.leaves_tensors_alone


def writer_progress(writer: StorageWriter) -> int | None:
    """Of a writer of ours, where its bytes go to the storage one by one."""
    return writer.watch.progress if isinstance(writer, ShardWriter) and writer.shows_progress else None
