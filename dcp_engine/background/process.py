"""Saves in a process beside training: one for each rank, long-lived, with a gloo group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from concurrent.futures import Future
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dcp_engine.background.jobs import SaveJob, SaveOutcome
from dcp_engine.background.priority import Priority
from dcp_engine.background.process_main import SILENT_SECS, Alive, ChildGroup, Done, Failed, Ready, Request, main
from dcp_engine.errors import BackgroundSaveError, SaverDiedError
from dcp_engine.planners import BalancedSavePlanner
from dcp_engine.staging.failure import failed_state
from dcp_engine.storage import ShardWriter

__all__ = ["ProcessExecutor"]

_START_SECS = 120.0
_END_SECS = 5.0


class ProcessExecutor:
    """Runs ``dcp.save`` in a process of this rank, which it starts at the first save and replaces when it has died.

    Before each save the ranks agree, by one small collective, whether all have a living process; else all start new ones, since a group
    with a dead member is of no use to the others. Staged tensors in shared memory are not copied: the process maps the buffer once.

    Args:
        timeout_secs: of the processes' own collectives.
        priority: of the process.
    """

    def __init__(self, *, timeout_secs: float, priority: Priority) -> None:
        self._timeout_secs = timeout_secs
        self._priority = priority
        self._child: _Child | None = None

    def prepare(self, group: dist.ProcessGroup | None) -> None:
        """Start the process, or processes of all ranks anew where one of them is gone.

        Raises:
            SaverDiedError: it does not start.
        """
        alive = self._child is not None and self._child.is_alive()
        if group is None:
            if not alive:
                self.close()
                self._child = _Child(None, self._priority)
            return
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (alive, _new_address() if dist.get_rank(group) == 0 else None), group=group)
        if all(one_alive for one_alive, _ in everyone):
            return
        self.close()
        host, port = everyone[0][1]
        place = ChildGroup(dist.get_rank(group), dist.get_world_size(group), host, port, self._timeout_secs)
        self._child = _Child(place, self._priority)

    def run(self, job: SaveJob, group: dist.ProcessGroup | None) -> SaveOutcome:
        """See :class:`dcp_engine.background.jobs.Executor`.

        Raises:
            SaverDiedError: this rank's process died in this save.
        """
        assert self._child is not None, "prepare() comes first"
        return self._child.save(job.state.result() if isinstance(job.state, Future) else job.state, job)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._child is not None:
            self._child.end()
            self._child = None


def _new_address() -> tuple[str, int]:
    """Where the processes of all ranks meet: this host, by the name that the others know it by, and a port that is free now."""
    host = os.environ.get("MASTER_ADDR", "") if dist.get_rank() == 0 else ""
    host = host or socket.gethostname()
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        probe.bind(("", 0))
        return host, int(probe.getsockname()[1])


class _Child:
    """One process, and what is known of it. Used by one thread."""

    def __init__(self, place: ChildGroup | None, priority: Priority) -> None:
        context = multiprocessing.get_context("spawn")
        self._rank = None if place is None else place.rank
        self._planner: Any = None
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, place, priority), name="dcp-engine-saver", daemon=True)
        self._process.start()
        theirs.close()  # so that its death ends what is read here
        answer = self._receive(_START_SECS, "starting")
        if not isinstance(answer, Ready):
            raise SaverDiedError(
                "the process that saves did not start",
                rank=self._rank,
                found=repr(answer)[:300],
                remedy='a script that starts processes needs `if __name__ == "__main__":` around what it does',
            )

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def save(self, state: dict[str, Any], job: SaveJob) -> SaveOutcome:
        # The process keeps the planner, with its remembered plans, for as long as it stays the same one.
        planner = None if job.planner is self._planner else job.planner
        try:
            self._connection.send(Request(state, job.writer, planner))
        except (BrokenPipeError, ConnectionResetError):
            raise self._died("before the save") from None
        except Exception as error:  # noqa: BLE001  whatever cannot be pickled: the other ranks' processes must not be left waiting for this
            failing = failed_state(_unsendable(error, state, self._rank))
            target = getattr(job.writer, "checkpoint_id", None) or "unknown"
            self._connection.send(Request(failing, ShardWriter(target), BalancedSavePlanner()))
            self._planner = None
        else:
            self._planner = job.planner
        answer = self._receive(None, "saving")
        if isinstance(answer, Done):
            return SaveOutcome(answer.metadata, answer.phases)
        assert isinstance(answer, Failed)
        self._planner = None  # it may not have arrived
        raise answer.error

    def end(self) -> None:
        """Ask it to end, then make it."""
        with contextlib.suppress(OSError, ValueError):
            self._connection.send(None)
        self._process.join(_END_SECS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        self._process.close()

    def _receive(self, limit_secs: float | None, doing: str) -> Any:
        """The next answer. Signs of life in between only show that the process is not stopped."""
        deadline = time.monotonic() + limit_secs if limit_secs is not None else None
        heard = time.monotonic()
        while True:
            ready = wait([self._connection, self._process.sentinel], timeout=1.0)
            if self._connection in ready:
                try:
                    answer = self._connection.recv()
                except (EOFError, ConnectionResetError):
                    raise self._died(doing) from None
                heard = time.monotonic()
                if not isinstance(answer, Alive):
                    return answer
            elif ready:
                raise self._died(doing)
            now = time.monotonic()
            if now - heard > SILENT_SECS or (deadline is not None and now > deadline):
                self._process.kill()
                raise self._died(doing, silent_secs=now - heard)

    def _died(self, doing: str, silent_secs: float | None = None) -> SaverDiedError:
        self._process.join(_END_SECS)
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return SaverDiedError(
            f"the process that saves for this rank died while {doing}",
            rank=self._rank,
            found=how if silent_secs is None else f"no sign of life for {silent_secs:.0f} s, so it was killed",
            remedy="look for an out-of-memory kill in the system's log; the next save starts a new process",
        )


def _unsendable(error: Exception, state: dict[str, Any], rank: int | None) -> BackgroundSaveError:
    return BackgroundSaveError(
        "a value, the writer or the planner cannot be sent to the process that saves",
        rank=rank,
        tensor=next((key for key, value in state.items() if not _is_sendable(value)), None),
        found=f"{type(error).__name__}: {error}",
        remedy='use executor="thread", or define its class at the top level of a module',
    )


def _is_sendable(value: object) -> bool:
    try:
        ForkingPickler.dumps(value)
    except Exception:  # noqa: BLE001  whatever a class of the user's raises
        return False
    return True
