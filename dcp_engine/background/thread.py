"""Saves in a thread of the training process: no copies between processes, but Python's work of a save shares the interpreter's lock."""

from __future__ import annotations

from concurrent.futures import Future

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_engine.background.jobs import SaveJob, SaveOutcome
from dcp_engine.background.priority import Priority

__all__ = ["ThreadExecutor"]


class ThreadExecutor:
    """Runs ``dcp.save`` in the saver's own thread.

    Args:
        priority: of that thread, and of those that it starts.
    """

    def __init__(self, priority: Priority) -> None:
        self._priority = priority

    def begin(self) -> None:
        """See :class:`dcp_engine.background.jobs.Executor`."""
        self._priority.apply()

    def prepare(self, group: dist.ProcessGroup | None) -> None:
        """Nothing to prepare."""

    def run(self, job: SaveJob, group: dist.ProcessGroup | None) -> SaveOutcome:
        """See :class:`dcp_engine.background.jobs.Executor`."""
        state = job.state.result() if isinstance(job.state, Future) else job.state
        metadata = save(state, storage_writer=job.writer, planner=job.planner, process_group=group, no_dist=group is None)
        return SaveOutcome(metadata, getattr(job.writer, "phases", None))

    def close(self) -> None:
        """Nothing of its own to end."""

    def kill(self) -> None:
        """A thread cannot be ended: its collectives end by their timeout."""
