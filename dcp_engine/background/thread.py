"""Saves in a thread of the training process: no copies between processes, but Python's work of a save shares the interpreter's lock."""

from __future__ import annotations

from dcp_engine.background.exchange import Exchange
from dcp_engine.background.jobs import SaveJob, SaveOutcome, staged_state, writer_progress
from dcp_engine.background.priority import Priority
from dcp_engine.background.run import SaveRun
from dcp_engine.background.steps import save_in_steps

__all__ = ["ThreadExecutor"]


class ThreadExecutor:
    """Saves in the thread that calls it.

    Args:
        priority: of that thread, and of those that it starts.
    """

    def __init__(self, priority: Priority) -> None:
        self._priority = priority

    @property
    def sees_buffers(self) -> bool:
        """See :class:`dcp_engine.background.jobs.Executor`."""
        return True

    def begin(self) -> None:
        """See :class:`dcp_engine.background.jobs.Executor`. Threads inherit it."""
        self._priority.apply()

    def run(self, job: SaveJob, run: SaveRun, exchange: Exchange) -> SaveOutcome:
        """See :class:`dcp_engine.background.jobs.Executor`."""
        state = staged_state(job, run)
        metadata = save_in_steps(state, job.writer, job.planner, exchange, run, cut=job.cut)
        return SaveOutcome(metadata, getattr(job.writer, "phases", None))

    def progress(self, job: SaveJob) -> int | None:
        """See :class:`dcp_engine.background.jobs.Executor`."""
        return writer_progress(job.writer)

    def close(self) -> None:
        """Nothing of its own to end."""

    def kill(self) -> None:
        """A thread cannot be ended: it finds its save over at its next step."""
