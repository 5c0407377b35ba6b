"""The process that saves for a rank: what runs in it, and what it answers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcp_engine.background.cut import Cut
from dcp_engine.background.exchange import Exchange
from dcp_engine.background.failures import one_error
from dcp_engine.background.jobs import writer_progress
from dcp_engine.background.priority import Priority
from dcp_engine.background.steps import save_in_steps
from dcp_engine.background.wire import Request, mapped_buffers, unpacked
from dcp_engine.errors import BackgroundSaveError, DcpEngineError
from dcp_engine.planners import BalancedSavePlanner
from dcp_engine.staging.failure import failed_state
from dcp_engine.storage import ShardWriter
from dcp_engine.storage.attempts import AttemptRef
from dcp_engine.types import WritePhases

__all__ = ["END", "Alive", "Asks", "ChildGroup", "Done", "Entered", "Failed", "Fails", "Published", "Ready", "Up", "main"]

_BEAT_SECS = 0.5
_JOIN_SECS = 60.0
END = b""
"""Instead of a request's head: end."""


@dataclass(frozen=True, slots=True)
class ChildGroup:
    """The gloo group of the processes of all ranks.

    Attributes:
        rank, world_size: of this one.
        host, port: where the process of rank 0 listens.
        timeout_secs: of collectives.
    """

    rank: int
    world_size: int
    host: str
    port: int
    timeout_secs: float


@dataclass(frozen=True, slots=True)
class Up:
    """The process runs. ``port``: where it listens for the others, if it is the first rank's, else 0."""

    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The process is in its group."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life while there is something to do. ``progress``: see ``Executor.progress``."""

    progress: int | None


@dataclass(frozen=True, slots=True)
class Entered:
    """Call of ``SaveWatch.enter``, as those that follow are of its other methods. Each waits for the error to raise, or None."""

    phase: str
    attempt: AttemptRef | None


@dataclass(frozen=True, slots=True)
class Asks:
    """Of ``check``."""


@dataclass(frozen=True, slots=True)
class Fails:
    """Of ``fails``."""

    error: DcpEngineError


@dataclass(frozen=True, slots=True)
class Published:
    """Of ``published``."""


@dataclass(frozen=True, slots=True)
class Done:
    """The save went well."""

    metadata: Metadata
    phases: WritePhases | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The save, or the start, did not."""

    error: BaseException


def main(connection: Connection, rank: int | None, priority: Priority) -> None:
    """Serve until the other side hangs up, says :data:`END`, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the training process decides
    priority.apply()
    answers = _Answers(connection)
    try:
        store = _listen() if rank == 0 else None
        answers.send(Up(int(getattr(store, "port", 0))))
        place: ChildGroup | None = connection.recv()
        if place is not None:
            _join(place, store)
        answers.send(Ready())
    except (EOFError, ConnectionResetError):
        return
    except BaseException as error:  # noqa: BLE001  the other side waits for an answer, whatever it is
        answers.send_failure(error)
        return
    with contextlib.suppress(EOFError, ConnectionResetError):
        _serve(connection, answers)
    if place is not None:
        dist.destroy_process_group()


def _listen() -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_JOIN_SECS)
    )


def _join(place: ChildGroup, store: Any) -> None:
    if store is None:
        timeout = timedelta(seconds=_JOIN_SECS)
        store = dist.TCPStore(place.host, place.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=place.timeout_secs)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def _serve(connection: Connection, answers: _Answers) -> None:
    planner: SavePlanner | None = None
    while head := connection.recv_bytes():
        with answers.beating():
            request = _received(head, connection.recv_bytes())
            planner = request.planner or planner
            answer = _saved(request, planner, answers)
        del request  # else a buffer that was given up would stay mapped
        if isinstance(answer, Failed):
            answers.send_failure(answer.error)
        else:
            answers.send(answer)
        del answer


def _saved(request: Request, planner: SavePlanner | None, answers: _Answers) -> Done | Failed:
    try:
        assert planner is not None, "the first request brings one"
        with contextlib.ExitStack() as stack:
            if request.proof is not None:
                stack.enter_context(request.proof.registered(mapped_buffers()[request.proof.buffer]))
            exchange = Exchange(dist.group.WORLD if dist.is_initialized() else None, _nothing)
            answers.writer = request.writer
            metadata = save_in_steps(request.state, request.writer, planner, exchange, _AskingWatch(answers), cut=request.cut)
        return Done(metadata, getattr(request.writer, "phases", None))
    except BaseException as error:  # noqa: BLE001  DCP's own is a BaseException
        return Failed(error)


def _nothing() -> None:
    """What this process checks while it waits for others: it is killed when its save is over."""


class _AskingWatch:
    """A ``SaveWatch`` that asks the training process."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._attempt: AttemptRef | None = None

    def enter(self, phase: str) -> None:
        self._answers.ask(Entered(phase, self._attempt))

    def saw_attempt(self, attempt: AttemptRef | None) -> None:
        self._attempt = attempt

    def check(self) -> None:
        self._answers.ask(Asks())

    def fails(self, error: BaseException) -> None:
        self._answers.ask(Fails(one_error(error, path=None, step=None)))

    def published(self) -> None:
        self._answers.ask(Published())


def _received(head: bytes, body: bytes) -> Request:
    """The next request. What cannot be read becomes one that fails: the other ranks are saving, and wait for this one."""
    try:
        unpacked(head)
        request = unpacked(body)
        assert isinstance(request, Request)
    except Exception as error:  # noqa: BLE001  whatever a class, or its absence, raises
        failure = BackgroundSaveError(
            "what is to be saved cannot be read by the process that saves",
            rank=dist.get_rank() if dist.is_initialized() else None,
            found=f"{type(error).__name__}: {error}",
            remedy='use executor="thread", or define classes where other processes can import them',
        )
        return Request(failed_state(failure), ShardWriter("unknown"), BalancedSavePlanner(), None, Cut())
    return request


class _Answers:
    """The way back, which the save and the signs of life share, and an eye on the training process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self.writer: StorageWriter | None = None
        parent = multiprocessing.parent_process()
        self._parent = None if parent is None else parent.pid
        threading.Thread(target=self._watch, name="dcp-engine-alive", daemon=True).start()

    def send(self, answer: object) -> None:
        with self._lock:
            self._connection.send(answer)

    def ask(self, question: object) -> None:
        """Send, and raise what comes back, if an error does."""
        self.send(question)
        error = self._connection.recv()
        if error is not None:
            raise error

    def send_failure(self, error: BaseException) -> None:
        try:
            self.send(Failed(error))
        except OSError:
            raise
        except Exception:  # noqa: BLE001  an exception of any class that cannot be sent: its text can
            self.send(Failed(BackgroundSaveError("the save failed", found=f"{type(error).__name__}: {error}")))

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Signs of life while this is open."""
        self._busy.set()
        try:
            yield
        finally:
            self._busy.clear()
            self.writer = None

    def _watch(self) -> None:
        while True:
            time.sleep(_BEAT_SECS)
            # The end of the pipe tells too, but not while a save hangs, nor while a process forked from training holds the pipe open.
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(1)
            if self._busy.is_set():
                with contextlib.suppress(OSError):
                    self.send(Alive(None if self.writer is None else writer_progress(self.writer)))
