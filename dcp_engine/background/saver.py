"""``BackgroundSaver``: saves beside training, one after the other, on a process group of their own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter

from dcp_engine.background.cut import Cut
from dcp_engine.background.failures import one_error
from dcp_engine.background.handle import SaveHandle, SaveTimings
from dcp_engine.background.jobs import Executor, SaveJob, SaveOutcome, read_split_tensors
from dcp_engine.background.members import members_of, store_of
from dcp_engine.background.priority import Priority
from dcp_engine.background.process import ProcessExecutor
from dcp_engine.background.supervisor import Supervisor
from dcp_engine.background.thread import ThreadExecutor
from dcp_engine.background.unchanged import UnchangedAlarm
from dcp_engine.background.watch import Liveness, check_duration
from dcp_engine.errors import (
    BackgroundSaveError,
    ClosedError,
    DcpEngineError,
    EarlierSaveFailedError,
    InvalidOptionError,
    SaveTimeoutError,
)
from dcp_engine.planners import BalancedSavePlanner
from dcp_engine.staging import DoubleBufferStager
from dcp_engine.staging.failure import failed_state, failures_in, untold

__all__ = ["BackgroundSaver"]

_LOG = logging.getLogger(__name__)
_JOIN_SECS = 10.0


@dataclass(frozen=True, slots=True)
class _Queued:
    job: SaveJob
    handle: SaveHandle
    wait_secs: float
    stage_secs: float
    submitted: float
    after: Callable[[], None] | None = None


class BackgroundSaver:
    """Stages a state, returns, and saves it while training goes on.

    Saves run one after the other, in the order of :meth:`submit`, on a gloo group of their own: their collectives never come between those
    of the training, whatever is called meanwhile. While one is written the next may be staged; the third waits for a buffer.

    All ranks make it, submit and close it alike. A failure on one rank is an error on every rank: the handle raises it, and if nobody has
    read it, the next ``submit`` does.

    A process that ends early (return, exception, ``sys.exit``) first gives saves under way ``exit_wait_secs``. What is not done then is
    not published. Where the process group's store does not answer, the end waits for it for ``failure_secs`` at most.

    Args:
        stager: None makes one that belongs to the saver, with shared memory where the executor is a process.
        executor: ``"thread"``, or ``"process"``: one long-lived process for each rank with a gloo group of its own, which reads staged
            tensors through shared memory, for training loops that a busy interpreter would slow.
        process_group: the ranks that save; None: all. Only its ranks are used.
        failure_secs: a rank that is dead or stopped, or whose write hangs, is an error on all others within this time. No single call of
            the storage, and no pause of all of a process's threads, may take as long as half of it. None: 60, or ``timeout_secs`` if less.
        timeout_secs: likewise for a rank that lives, but does not come to a save, or does not end work that shows no progress. No less.
        priority: of the background work.
        exit_wait_secs: see above.

    Attributes:
        stager: what copies the states: :meth:`~dcp_engine.staging.DoubleBufferStager.protect` an optimizer with it.

    Raises:
        InvalidOptionError: an option is out of range.

    Thread-safety: ``submit`` and ``close`` from one thread; handles from any.
    """

    def __init__(
        self,
        *,
        stager: DoubleBufferStager | None = None,
        executor: Literal["thread", "process"] | str = "thread",
        process_group: dist.ProcessGroup | None = None,
        failure_secs: float | None = None,
        timeout_secs: float = 1800.0,
        priority: Priority | None = None,
        exit_wait_secs: float = 60.0,
    ) -> None:
        if executor not in ("thread", "process"):
            raise InvalidOptionError("unknown executor", expected="thread or process", found=repr(executor))
        liveness = Liveness.checked(failure_secs, timeout_secs)
        check_duration("exit_wait_secs", exit_wait_secs)
        _require(stager, DoubleBufferStager, "stager", "a DoubleBufferStager")
        _require(priority, Priority, "priority", "a Priority, as in Priority(nice=10)")
        ranks = members_of(process_group)
        self._owns_stager = stager is None
        self.stager = stager or DoubleBufferStager(memory="shared" if executor == "process" else "auto")
        priority = priority or Priority()
        self._executor: Executor = (
            ThreadExecutor(priority) if executor == "thread" else ProcessExecutor(self.stager, liveness=liveness, priority=priority)
        )
        rank = 0 if ranks is None else ranks.index(dist.get_rank())
        self._has_group = ranks is not None
        size = 1 if ranks is None else len(ranks)
        self._supervisor = Supervisor(self._executor, store_of(ranks, rank), rank, size, liveness)
        self._exit_wait_secs = exit_wait_secs
        self._planner = BalancedSavePlanner()
        self._queue: SimpleQueue[_Queued | None] = SimpleQueue()
        self._handles: list[SaveHandle] = []
        self._alarm = UnchangedAlarm()
        self._closed = False
        self._given_up = False
        self._process = os.getpid()
        # A daemon: a save that hangs must not keep the process from exiting. At exit it is waited for, with a deadline.
        self._thread = threading.Thread(target=self._serve, name="dcp-engine-saver", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def submit(
        self,
        state_dict: Mapping[str, Any],
        *,
        writer: StorageWriter,
        planner: SavePlanner | None = None,
        step: int | None = None,
        cut: Cut | None = None,
        after: Callable[[], None] | None = None,
    ) -> SaveHandle:
        """Stage a state and queue its save.

        Args:
            state_dict: may be changed when this returns, but for CUDA tensors: see :class:`~dcp_engine.staging.DoubleBufferStager`.
            writer: where to; one of its own for each save.
            planner: None: one balanced planner for all saves, which remembers plans.
            step: for the handle and for messages.
            cut: where this rank stands: ranks that do not stand at one step publish nothing (``MixedStepsError``).
            after: called when the checkpoint is durable, in the saver's thread, before the handle tells so. What it raises is logged.

        Raises:
            DcpEngineError: of an earlier save, if nobody has read it: this state is not saved then, on any rank (a rank that had read it
                learns that from its handle: ``EarlierSaveFailedError``). Or staging failed, and there is no process group; with one, the
                handle has the error, on every rank.
            ClosedError: the saver is closed.
            InvalidOptionError: an argument is of no type that can be saved, or saved with.
        """
        if self._closed:
            raise ClosedError("the saver is closed", step=step, remedy="make a new one")
        if not isinstance(state_dict, Mapping):
            raise InvalidOptionError(
                "the state is no mapping",
                step=step,
                expected="a dict, as in {'state': train_state} or {'model': model.state_dict()}",
                found=type(state_dict).__name__,
            )
        _require(writer, StorageWriter, "writer", "a StorageWriter, as in ShardWriter(path)", optional=False)
        _require(planner, SavePlanner, "planner", "a SavePlanner")
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise InvalidOptionError("step is no step", expected="None or an int", found=repr(step)[:300])
        handle = SaveHandle(step=step, path=str(getattr(writer, "checkpoint_id", None) or ""))
        started = time.monotonic()
        earlier = self._unread_failure()
        if earlier is not None:
            # Other ranks may have read it, or not seen it yet, and save: they must get an error, and not be left waiting.
            self._enqueue(_failed_job(_refusal(earlier, step), writer, planner or self._planner), handle, (0.0, 0.0, started))
            raise earlier
        before = self.stager.last_report
        state = self._stage(state_dict, self._executor.sees_buffers and read_split_tensors(writer, planner or self._planner))
        report = self.stager.last_report
        waited = 0.0 if report is None else report.waited_secs
        job = SaveJob(state, writer, planner or self._planner, cut or Cut())
        self._enqueue(job, handle, (waited, time.monotonic() - started - waited, started), after)
        if report is not None and report is not before:  # else staging has failed
            self._alarm.add(step, report.content)
        self._alarm.ring()
        return handle

    def fail(self, error: DcpEngineError, *, writer: StorageWriter, step: int | None = None) -> None:
        """Take part in a save that fails on all ranks, with this error, since this rank has nothing to save: the others may wait for it.

        Nobody has to read the failure here. Nothing to do without a process group.
        """
        if self._closed or not self._has_group:
            return
        error.rank = dist.get_rank() if error.rank is None and dist.is_initialized() else error.rank
        handle = SaveHandle(step=step, path=str(getattr(writer, "checkpoint_id", None) or ""))
        handle.forgive()
        self._enqueue(_failed_job(error, writer, self._planner), handle, (0.0, 0.0, time.monotonic()))

    def wait(self, timeout_secs: float | None = None) -> None:
        """Wait for every save submitted so far.

        Raises:
            DcpEngineError: the first that failed and whose failure nobody had read.
            SaveTimeoutError: they are not done in time; names the one that it was waiting for.
        """
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        for handle in list(self._handles):
            if not handle.wait_done(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise SaveTimeoutError(
                    "a background save is not done yet", path=handle.path, step=handle.step, expected=f"its end within {timeout_secs:g} s"
                )
        error = self._unread_failure()
        if error is not None:
            raise error
        self._alarm.ring()

    def close(self, timeout_secs: float | None = None) -> None:
        """Wait for every save, then end. Idempotent.

        Args:
            timeout_secs: longest wait; what is not done then is given up, and will not be published if that can be helped.

        Raises:
            DcpEngineError: as :meth:`wait`; closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait(timeout_secs)
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except DcpEngineError as failure:
            if error is None:
                raise
            _LOG.error("a background save failed, too: %s", failure)  # the body's own exception is the one to see

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _unread_failure(self) -> DcpEngineError | None:
        """The first failure that nobody has read; all others count as read now. Saves that are over are forgotten."""
        failures = [failure for handle in self._handles if (failure := handle.unread_failure()) is not None]
        self._handles = [handle for handle in self._handles if not handle.done()]
        return failures[0] if failures else None

    def _stage(self, state_dict: Mapping[str, Any], may_split: bool) -> dict[str, Any] | Future[dict[str, Any]]:
        key = None
        try:
            given = {}
            # As dcp.async_save does it: ``Stateful`` values are asked for their state.
            for key, value in state_dict.items():
                given[key] = value.state_dict() if isinstance(value, Stateful) else value
        except Exception as error:  # noqa: BLE001  whatever a class in the state raises
            failure = untold(error, key)
            if not self._has_group:
                raise failure from (None if failure is error else error)
            failure.rank = dist.get_rank() if dist.is_initialized() else None
            return failed_state(failure)  # the other ranks save: they must get an error, and not be left waiting
        return self.stager.stage(given, may_split=may_split)

    def _enqueue(
        self, job: SaveJob, handle: SaveHandle, times: tuple[float, float, float], after: Callable[[], None] | None = None
    ) -> None:
        self._handles.append(handle)
        _resolve_staged(job.state, handle)
        self._queue.put(_Queued(job, handle, *times, after))

    def _serve(self) -> None:
        self._executor.begin()
        while (queued := self._queue.get()) is not None:
            self._save(queued)
            del queued  # else the staged tensors would live until the next save

    def _save(self, queued: _Queued) -> None:
        handle = queued.handle
        try:
            self._require_wanted(handle)
            began = time.monotonic()
            outcome = self._supervisor.save(queued.job, path=handle.path, step=handle.step)
        except BaseException as error:  # noqa: BLE001  DCP's own is a BaseException, and a thread that ended would leave every later save waiting
            handle.durable.set_exception(one_error(error, path=handle.path, step=handle.step))
            return
        finally:
            self.stager.release(queued.job.state)
        _report(handle, outcome, queued, began)
        if queued.after is not None:
            try:
                queued.after()
            except Exception as error:  # noqa: BLE001  the checkpoint is there: nothing may tell of a failed save now
                _LOG.error("%s is published, and what was to follow failed: %s", handle.path, error)
        handle.durable.set_result(outcome.metadata)

    def _require_wanted(self, handle: SaveHandle) -> None:
        if self._given_up:
            raise ClosedError("the saver was closed before this save began", path=handle.path, step=handle.step)

    def _leave(self) -> None:
        """At the interpreter's exit: time for saves under way, and no more than that."""
        if os.getpid() != self._process:
            return  # forked from the process that saves, which has no part in its saves
        self._closed = True
        self._queue.put(None)
        # Its end, not only that of its saves: what it frees while the interpreter ends would end the process by SIGABRT, from a destructor.
        self._thread.join(self._exit_wait_secs)
        late = next((handle for handle in self._handles if not handle.done()), None)
        if late is not None:
            _LOG.error("the process ends before the save of %s is done; it will not be published", late.path)
            self._give_up()
        elif (failure := self._unread_failure()) is not None:
            _LOG.error("a background save failed, and nobody has read its error: %s", failure)
        self._supervisor.close()  # the other ranks need not find out by its silence

    def _end(self) -> None:
        atexit.unregister(self._leave)
        self._queue.put(None)
        if not all(handle.done() for handle in self._handles):
            self._give_up()
        self._thread.join(_JOIN_SECS)
        self._supervisor.close()
        if self._thread.is_alive():
            _LOG.error("a background save hangs and was left behind; it holds its staging buffer")
            return
        self._executor.close()
        if self._owns_stager:
            self.stager.close()

    def _give_up(self) -> None:
        """What is under way shall end without a checkpoint, if it still can."""
        self._given_up = True
        self._supervisor.give_up(BackgroundSaveError("the saver was closed, or its process ended, before the save was done"))
        self._thread.join(_JOIN_SECS)


def _require(value: object, kind: type, name: str, expected: str, *, optional: bool = True) -> None:
    """What would only fail later, on a thread of its own, is refused now."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise InvalidOptionError(
            f"{name} is of the wrong type", expected=f"None or {expected}" if optional else expected, found=repr(value)[:300]
        )


def _failed_job(error: DcpEngineError, writer: StorageWriter, planner: SavePlanner) -> SaveJob:
    return SaveJob(failed_state(error), writer, planner, Cut())


def _refusal(earlier: DcpEngineError, step: int | None) -> EarlierSaveFailedError:
    return EarlierSaveFailedError(
        "this state was not saved, on any rank: the failure of an earlier save, which nobody had read, was raised instead",
        step=step,
        rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else None,
        found=str(earlier),
        remedy="save again",
    )


def _resolve_staged(state: dict[str, Any] | Future[dict[str, Any]], handle: SaveHandle) -> None:
    if isinstance(state, Future):
        state.add_done_callback(lambda done: _resolve(handle.staged, done.exception() or next(failures_in(done.result()), None)))
    else:
        _resolve(handle.staged, next(failures_in(state), None))


def _resolve(future: Future[None], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _report(handle: SaveHandle, outcome: SaveOutcome, queued: _Queued, began: float) -> None:
    ended = time.monotonic()
    phases = outcome.phases
    handle.timings = SaveTimings(
        wait_secs=queued.wait_secs,
        stage_secs=queued.stage_secs,
        queue_secs=began - queued.submitted - queued.wait_secs - queued.stage_secs,
        plan_secs=phases.plan_secs if phases else 0.0,
        write_secs=phases.write_secs if phases else ended - began,
        commit_secs=ended - began - phases.plan_secs - phases.write_secs if phases else 0.0,
    )
    if phases is not None:
        handle.raw_bytes, handle.stored_bytes = phases.raw_bytes, phases.stored_bytes
