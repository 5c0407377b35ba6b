"""Saves in a process beside training: one for each rank, long-lived, with a gloo group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.checkpoint.api import CheckpointException

from dcp_engine.background.cut import Cut
from dcp_engine.background.exchange import Exchange
from dcp_engine.background.jobs import SaveJob, SaveOutcome, staged_state
from dcp_engine.background.priority import Priority
from dcp_engine.background.process_main import END, Alive, Asks, ChildGroup, Done, Entered, Failed, Fails, Published, Ready, Up, main
from dcp_engine.background.run import SaveRun
from dcp_engine.background.watch import Liveness
from dcp_engine.background.wire import Head, Request, packed
from dcp_engine.errors import BackgroundSaveError, DcpEngineError, SaverDiedError
from dcp_engine.planners import BalancedSavePlanner
from dcp_engine.staging import DoubleBufferStager, SharedBuffer
from dcp_engine.staging.failure import failed_state
from dcp_engine.storage import ShardWriter

__all__ = ["ProcessExecutor"]

STARTING = "starting the process that saves"
_START_SECS = 120.0
_END_SECS = 5.0


class ProcessExecutor:
    """Saves in a process of this rank, which it starts at the first save and replaces when it has died.

    Before each save the ranks agree, by one small collective, whether all have a living process; else all start new ones, since a group
    with a dead member is of no use to the others. Staged tensors in shared memory are not copied: the process maps each buffer once.

    Args:
        stager: of the states that it gets.
        liveness: how fast a failure is found.
        priority: of the process.
    """

    def __init__(self, stager: DoubleBufferStager, *, liveness: Liveness, priority: Priority) -> None:
        self._stager = stager
        self._liveness = liveness
        self._priority = priority
        self._child: _Child | None = None

    @property
    def sees_buffers(self) -> bool:
        """See :class:`dcp_engine.background.jobs.Executor`. Tensors that lie in no shared buffer travel by value."""
        return self._stager.memory == "shared"

    def begin(self) -> None:
        """The thread that waits for the process keeps its priority: holding the interpreter's lock it must not be slow."""

    def run(self, job: SaveJob, run: SaveRun, exchange: Exchange) -> SaveOutcome:
        """See :class:`dcp_engine.background.jobs.Executor`.

        Raises:
            SaverDiedError: this rank's process died in this save, or one does not start; the latter on all ranks.
        """
        self._prepare(run, exchange)
        assert self._child is not None
        state = staged_state(job, run)
        return self._child.save(state, job, self._stager, run)

    def progress(self, job: SaveJob) -> int | None:
        """See :class:`dcp_engine.background.jobs.Executor`."""
        child = self._child
        return None if child is None else child.progress

    def _prepare(self, run: SaveRun, exchange: Exchange) -> None:
        """Start the process, or processes of all ranks anew where one of them is gone."""
        alive = self._child is not None and self._child.is_usable()
        if all(exchange.everyone(alive)):
            return
        self.close()
        run.enter(STARTING)
        answer: SaverDiedError | tuple[str, int]
        silent_secs = self._liveness.failure_secs / 2
        try:
            self._child = _Child(None if exchange.size == 1 else exchange.rank, self._priority, silent_secs)
            answer = _host(), self._child.port
        except SaverDiedError as error:
            answer = error
        answers = exchange.everyone(answer)
        for failure in answers:
            if isinstance(failure, SaverDiedError):
                self.close()
                raise failure
        assert self._child is not None
        if exchange.size == 1:
            self._child.join(None)
            return
        host, port = answers[0]
        limit_secs = self._liveness.patience_secs + self._liveness.failure_secs
        self._child.join(ChildGroup(exchange.rank, exchange.size, host, port, limit_secs))

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def kill(self) -> None:
        """End the process while another thread waits for it, which then gets an error."""
        if self._child is not None:
            self._child.kill()


def _host() -> str:
    """This host, by the name that the others know it by."""
    is_first = dist.is_initialized() and dist.get_rank() == 0
    return (os.environ.get("MASTER_ADDR", "") if is_first else "") or socket.gethostname()


class _Child:
    """One process, and what is known of it. Used by one thread, but for :meth:`kill`.

    Attributes:
        port: where it listens for those of the other ranks; 0 if they listen for it.
        progress: as it says itself.
    """

    def __init__(self, rank: int | None, priority: Priority, silent_secs: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._rank = rank
        self._silent_secs = silent_secs
        self.progress: int | None = None
        self._planner: Any = None
        self._is_broken = False
        self._sent: set[int] = set()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, rank, priority), name="dcp-engine-saver", daemon=True)
        self._process.start()
        theirs.close()  # so that its death ends what is read here
        self.port = self._started(Up).port

    def join(self, place: ChildGroup | None) -> None:
        """Let it join its group.

        Raises:
            SaverDiedError: it cannot.
        """
        try:
            self._connection.send(place)
        except OSError:
            raise self._died("starting") from None
        self._started(Ready)

    def is_usable(self) -> bool:
        """Whether it lives, and its group has not been left in the middle of a collective."""
        return self._process.is_alive() and not self._is_broken

    def save(self, state: dict[str, Any], job: SaveJob, stager: DoubleBufferStager, run: SaveRun) -> SaveOutcome:
        self.progress = None
        buffers = stager.shared_buffers()
        # The process keeps our planner, with its remembered plans, for as long as it stays the same one. Others may have changed.
        planner = None if job.planner is self._planner and type(job.planner) is BalancedSavePlanner else job.planner
        try:
            body = packed(Request(state, job.writer, planner, stager.proof_of(state), job.cut), buffers)
            self._planner = job.planner
        except Exception as error:  # noqa: BLE001  whatever cannot be pickled: the other ranks' processes must not be left waiting for this
            failing = failed_state(_unsendable(error, state, buffers, self._rank))
            target = getattr(job.writer, "checkpoint_id", None) or "unknown"
            body = packed(Request(failing, ShardWriter(target), BalancedSavePlanner(), None, Cut()))
            self._planner = None
        numbers = {buffer.number for buffer in buffers}
        new = {buffer.number: buffer.memory.untyped_storage() for buffer in buffers if buffer.number not in self._sent}
        head = Head(frozenset(numbers), new)
        self._sent = numbers
        answer = self._asked(packed(head), body, run)
        if isinstance(answer, Done):
            return SaveOutcome(answer.metadata, answer.phases)
        assert isinstance(answer, Failed)
        self._planner = None  # it may not have arrived
        # What the ranks told each other has been on all of them. Any other error has broken the save off, who knows where.
        self._is_broken = not isinstance(answer.error, CheckpointException)
        raise answer.error

    def kill(self) -> None:
        with contextlib.suppress(ValueError):  # ended already
            self._process.kill()

    def end(self) -> None:
        """Ask it to end, then make it."""
        with contextlib.suppress(OSError, ValueError):
            self._connection.send_bytes(END)
        self._process.join(_END_SECS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        self._process.close()

    def _started(self, kind: type[Any]) -> Any:
        answer = self._receive(_START_SECS, "starting")
        if not isinstance(answer, kind):
            self.end()
            raise SaverDiedError(
                "the process that saves did not start",
                rank=self._rank,
                found=repr(answer)[:300],
                remedy='a script that starts processes needs `if __name__ == "__main__":` around what it does',
            )
        return answer

    def _asked(self, head: bytes, body: bytes, run: SaveRun) -> Any:
        """The answer to a request, which a thread of its own sends: a process that is stopped does not empty the pipe."""

        def send() -> None:
            with contextlib.suppress(OSError):  # it has died, which is seen below
                self._connection.send_bytes(head)
                self._connection.send_bytes(body)

        sender = threading.Thread(target=send, name="dcp-engine-sender", daemon=True)
        sender.start()
        try:
            return self._receive(None, "saving", run)
        finally:
            sender.join()

    def _receive(self, limit_secs: float | None, doing: str, run: SaveRun | None = None) -> Any:
        """The next answer. What comes in between shows that the process is not stopped, and what it does."""
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
                if isinstance(answer, Alive):
                    self.progress = answer.progress
                elif isinstance(answer, Entered | Asks | Fails | Published):
                    assert run is not None, "it saves"
                    reaction = _reaction(answer, run)
                    with contextlib.suppress(OSError):  # it has died meanwhile, which is seen in the next round
                        self._connection.send(reaction)
                else:
                    return answer
            elif ready:
                raise self._died(doing)
            now = time.monotonic()
            limit = self._silent_secs if deadline is None else deadline - heard
            if now - heard > limit:
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


def _reaction(news: Entered | Asks | Fails | Published, run: SaveRun) -> DcpEngineError | None:
    """What the process is to raise: this save's ``SaveWatch`` is here, where the store of the training's process group is."""
    try:
        if isinstance(news, Entered):
            run.saw_attempt(news.attempt)
            run.enter(news.phase)
        elif isinstance(news, Asks):
            run.check()
        elif isinstance(news, Fails):
            run.fails(news.error)
        else:
            run.published()
    except DcpEngineError as error:
        return error
    except RuntimeError as error:  # the store's
        return BackgroundSaveError("the store of the process group does not answer", found=str(error)[:300])
    return None


def _unsendable(error: Exception, state: dict[str, Any], buffers: Sequence[SharedBuffer], rank: int | None) -> BackgroundSaveError:
    return BackgroundSaveError(
        "a value, the writer or the planner cannot be sent to the process that saves",
        rank=rank,
        tensor=next((key for key, value in state.items() if not _is_sendable(value, buffers)), None),
        found=f"{type(error).__name__}: {error}",
        remedy='use executor="thread", or define its class at the top level of a module',
    )


def _is_sendable(value: object, buffers: Sequence[SharedBuffer]) -> bool:
    try:
        packed(value, buffers)
    except Exception:  # noqa: BLE001  whatever a class of the user's raises
        return False
    return True
