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
from dcp_engine.storage import ShardWriter
from dcp_engine.types import WritePhases

__all__ = ["Executor", "SaveJob", "SaveOutcome", "staged_state", "writer_progress"]


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


def writer_progress(writer: StorageWriter) -> int | None:
    """Of a writer of ours, where its bytes go to the storage one by one."""
    return writer.watch.progress if isinstance(writer, ShardWriter) and writer.shows_progress else None
