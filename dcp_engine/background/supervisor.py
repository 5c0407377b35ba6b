"""Runs one save after the other in a thread that may hang, and ends each in bounded time with what is true of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_engine.background.exchange import Exchange
from dcp_engine.background.jobs import Executor, SaveJob, SaveOutcome
from dcp_engine.background.leaving import await_at_exit
from dcp_engine.background.outcome import Outcome, State
from dcp_engine.background.run import SaveRun
from dcp_engine.background.watch import Liveness, RankWatch, own_client
from dcp_engine.errors import CommitStateUnknownError, DcpEngineError, ExchangeBrokenError, RankLostError
from dcp_engine.storage import ShardReader, ShardWriter

__all__ = ["Supervisor"]

_LOG = logging.getLogger(__name__)
_POLL_SECS = 0.5
_EXIT_SECS = 2.0
"""For a thread that was left behind: where it waits for the store, it comes back when the watch does, which is awaited for longer."""

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Seat:
    """What the thread that saves works with, and takes along when it is left behind."""

    store: Any = None
    exchange: Exchange | None = None
    number: int = 0


class Supervisor:
    """The saves of one rank.

    Args:
        executor: where they run.
        store: for this saver alone, of all ranks that save.
        rank, size: of this rank among them.
        liveness: how fast a failure is found.

    Thread-safety: ``save`` and ``close`` from one thread; ``give_up`` from any.
    """

    def __init__(self, executor: Executor, store: Any, rank: int, size: int, liveness: Liveness) -> None:
        self._executor = executor
        self._store = store
        self._rank = rank
        self._size = size
        self._liveness = liveness
        self._number = 0
        self._seat = _Seat()
        self._watch = RankWatch(store, rank, size, liveness)
        self._worker: _Worker | None = None
        self._run: SaveRun | None = None

    def save(self, job: SaveJob, *, path: str, step: int | None) -> SaveOutcome:
        """Save. Every surviving rank's call ends alike.

        Raises:
            DcpEngineError: nothing was published, and nothing will be; or ``CommitStateUnknownError``.
        """
        self._number += 1
        run = SaveRun(
            self._number,
            self._watch,
            rank=self._rank,
            size=self._size,
            progress=lambda: self._executor.progress(job),
            path=path,
            step=step,
        )
        with self._watched(run):
            return _Supervision(self, job, run, path, step).result()

    def give_up(self, error: DcpEngineError) -> None:
        """End the save that runs, on all ranks, unless it is published already."""
        run = self._run
        if run is not None:
            run.report(error)
        self._executor.kill()

    def close(self) -> None:
        """End. What hangs is left behind."""
        self._watch.close()
        if self._worker is not None:
            self._worker.close()

    # -- for the supervision of one save ----------------------------------------------------------------------------------

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        """In the thread that saves."""
        if self._worker is None:
            self._worker = _Worker("dcp-engine-save")
        return self._worker.start(work)

    def leave_behind(self, *, thread: bool) -> None:
        """The group is lost, and maybe the thread hangs."""
        if self._seat.exchange is not None:
            self._seat.exchange.give_up()
        self._seat = _Seat(None if thread else self._seat.store, None, self._seat.number)
        if thread and self._worker is not None:
            self._worker.close()
            self._worker = None

    def work(self, job: SaveJob, run: SaveRun) -> SaveOutcome:
        """What the thread does."""
        seat = self._seat
        if seat.store is None:
            seat.store = own_client(self._store, self._liveness.failure_secs)  # here, since a store that is stopped answers to nobody
        seat.exchange, seat.number = run.join(seat.store, seat.exchange, seat.number, lambda number: self._exchange(seat.store, number))
        return self._executor.run(job, run, seat.exchange)

    def _exchange(self, store: Any, number: int) -> Exchange:
        prefixed = dist.PrefixStore(f"group/{number}", store)  # type: ignore[attr-defined]
        return Exchange.make(prefixed, self._rank, self._size, self._liveness.patience_secs + self._liveness.failure_secs)

    @property
    def executor(self) -> Executor:
        """Where saves run."""
        return self._executor

    @property
    def watch(self) -> RankWatch:
        """Of this rank."""
        return self._watch

    @property
    def liveness(self) -> Liveness:
        """As given."""
        return self._liveness

    @contextlib.contextmanager
    def _watched(self, run: SaveRun) -> Iterator[None]:
        self._run = run
        self._watch.begin(run)
        try:
            yield
        finally:
            self._watch.end()
            self._run = None


class _Supervision:
    """Of one save: waits for its thread and for news of the other ranks, and decides what they mean."""

    def __init__(self, supervisor: Supervisor, job: SaveJob, run: SaveRun, path: str, step: int | None) -> None:
        self._supervisor = supervisor
        self._job = job
        self._run = run
        self._path = path
        self._step = step
        self._grace_secs = supervisor.liveness.failure_secs / 8
        self._future: Future[SaveOutcome] = supervisor.start(lambda: supervisor.work(job, run))
        self._future.add_done_callback(lambda _: run.changed.set())
        self._has_reported = False
        self._found: Outcome | None = None

    def result(self) -> SaveOutcome:
        """See :meth:`Supervisor.save`."""
        run, patience = self._run, _Patience(self._supervisor)
        while True:
            run.changed.wait(_POLL_SECS)
            run.changed.clear()
            patience.look()
            if self._future.done():
                if self._future.exception() is None:
                    return self._future.result()
                self._hear(self._future.exception(), patience)
            if run.orphaned is not None:
                self._settle(run.orphaned)
            if run.outcome is not None and run.outcome.is_final:
                return self._ended(run.outcome)
            if patience.is_lost():
                return self._ended_alone()

    def _hear(self, error: BaseException | None, patience: _Patience) -> None:
        """The thread has failed: find out whether that is the failure, or a consequence of another rank's."""
        assert error is not None
        if isinstance(error, CheckpointException):
            raise error  # all ranks have it
        if self._has_reported:
            return
        is_consequence = isinstance(error, ExchangeBrokenError) or (not isinstance(error, DcpEngineError) and _is_of_store(error))
        if is_consequence and not patience.is_over():
            return  # whoever has failed says so, or is found
        self._has_reported = True
        self._run.report(error)

    def _settle(self, lost: RankLostError) -> None:
        """The coordinator is lost while it publishes: the storage tells how that ended, or ends it."""
        run, writer = self._run, self._job.writer
        run.orphaned = None
        attempt = run.attempt
        if attempt is None or not isinstance(writer, ShardWriter):
            outcome = Outcome.of(_unknown(lost, "a writer that is not ShardWriter cannot tell"), rank=lost.rank, phase=lost.phase or "")
        else:
            future = self._in_time(lambda: writer.revoke(attempt))
            if not future.done():
                outcome = Outcome.of(_unknown(lost, "the storage does not answer"), rank=lost.rank, phase=lost.phase or "")
            elif (error := future.exception()) is not None:
                outcome = Outcome.of(_unknown(lost, str(error)), rank=lost.rank, phase=lost.phase or "")
            elif future.result():
                outcome = Outcome.of(lost, rank=lost.rank, phase=lost.phase or "")
            else:
                outcome = Outcome(State.PUBLISHED, rank=lost.rank)
        run.put_reports([(outcome, True)])
        self._supervisor.watch.hurry()
        self._found = outcome

    def _ended(self, outcome: Outcome) -> SaveOutcome:
        """The store has the outcome: the thread may have more of it, or must end."""
        error = None if outcome.state is State.PUBLISHED else self._run.error()
        if outcome.state is State.PUBLISHED or outcome.is_told:
            wait([self._future], self._grace_secs)
        if self._future.done():
            if self._future.exception() is None:
                return self._future.result()
            if isinstance(self._future.exception(), CheckpointException) and outcome.is_told:
                raise self._future.exception()  # type: ignore[misc]
        cause = self._future.exception() if self._future.done() else None
        self._break_off(error or RankLostError("the save is published, and this rank was not told so", rank=self._run.rank))
        if error is None:
            return SaveOutcome(self._read_back(), getattr(self._job.writer, "phases", None))
        raise error from cause

    def _ended_alone(self) -> SaveOutcome:
        """The store does not answer: this rank can only say what it knows itself."""
        error = RankLostError(
            "the store of the process group does not answer",
            path=self._path or None,
            step=self._step,
            phase=self._run.phase,
            found=f"nothing for {self._supervisor.watch.silent_secs:.0f} s",
            remedy="its host, often rank 0, is dead or stopped: start the job again",
        )
        if self._break_off(error):
            raise error
        self._settle(error)
        outcome = self._found
        assert outcome is not None
        if outcome.state is State.PUBLISHED:
            return SaveOutcome(self._read_back(), getattr(self._job.writer, "phases", None))
        raise error if outcome.state is State.FAILED else outcome.error(path=self._path, step=self._step)

    def _break_off(self, error: DcpEngineError) -> bool:
        """End the thread, or leave it behind. Returns whether this rank's part is missing for good."""
        is_missing = self._run.break_off(error)
        if isinstance(self._job.writer, ShardWriter):
            self._job.writer.watch.break_off(error)
        if not self._future.done():
            self._supervisor.executor.kill()
            wait([self._future], self._grace_secs)
        hangs = not self._future.done()
        if hangs:
            _LOG.error("the save of %s hangs on rank %d; its thread is left behind", self._path, self._run.rank)
        self._supervisor.leave_behind(thread=hangs)
        return is_missing

    def _read_back(self) -> Metadata:
        """Of the checkpoint that was published while its coordinator could not tell. Empty where that cannot be read: published it is."""
        writer = self._job.writer
        if isinstance(writer, ShardWriter):
            reader = ShardReader(self._path, **writer.reader_options)
            future = self._in_time(reader.read_metadata)
            if future.done() and future.exception() is None:
                return future.result()
            _LOG.warning("the checkpoint %s was published, and cannot be read back now", self._path)
        return Metadata(state_dict_metadata={})

    def _in_time(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Of a call of the storage, which may hang; done, or left behind."""
        worker = _Worker("dcp-engine-look")
        future = worker.start(call)
        worker.close()
        wait([future], self._supervisor.liveness.failure_secs / 2)
        return future


class _Patience:
    """How long a rank waits for news, by its own clock; time in which the process was stopped does not count."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._watch = supervisor.watch
        self._liveness = supervisor.liveness
        self._looked_at = time.monotonic()
        self._broken_at: float | None = None

    def look(self) -> None:
        """Called at least every second or so."""
        now = time.monotonic()
        if now - self._looked_at > 4 * _POLL_SECS:
            self._watch.forgive()
            self._broken_at = None
        self._looked_at = now

    def is_over(self) -> bool:
        """Whether this rank has waited long enough for the reason why its exchange broke; begins with the first call."""
        self._broken_at = self._looked_at if self._broken_at is None else self._broken_at
        return self._looked_at - self._broken_at > self._liveness.failure_secs

    def is_lost(self) -> bool:
        """Whether the store has been silent for too long."""
        return self._watch.silent_secs > self._liveness.limits.stall_secs + self._liveness.beat_secs


class _Worker:
    """A thread that may be left behind. A daemon: what hangs in it must not keep the process from exiting."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        await_at_exit(thread, _EXIT_SECS)

    def start(self, work: Callable[[], _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._tasks.put((future, work))
        return future

    def close(self) -> None:
        """It ends when it has done what was started."""
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  DCP's own is a BaseException, and whoever supervises decides
                future.set_exception(error)
            del task, future, work  # else the staged tensors would live until the next save


def _is_of_store(error: BaseException) -> bool:
    return isinstance(error, dist.DistError)


def _unknown(lost: RankLostError, why: str) -> CommitStateUnknownError:
    return CommitStateUnknownError(
        "it cannot be told whether the checkpoint was or will be published: its coordinator is lost",
        rank=lost.rank,
        phase=lost.phase,
        found=f"{lost.found}; {why}",
        remedy="make sure that the lost process is gone, then look for COMPLETE",
    )
