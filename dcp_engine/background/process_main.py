"""The process that saves for a rank: what runs in it, and what travels between it and the training process."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor

from dcp_engine.background.priority import Priority
from dcp_engine.errors import BackgroundSaveError
from dcp_engine.planners import BalancedSavePlanner
from dcp_engine.staging.failure import failed_state
from dcp_engine.staging.state import leaves_of
from dcp_engine.storage import ShardWriter
from dcp_engine.types import WritePhases

__all__ = ["SILENT_SECS", "Alive", "ChildGroup", "Done", "Failed", "Ready", "Request", "main"]

_BEAT_SECS = 2.0
SILENT_SECS = 60.0
"""A process that has not been heard of for so long is stopped, or its machine is beyond help."""


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
class Request:
    """Save this. ``planner`` None: the one of the request before."""

    state: dict[str, Any]
    writer: StorageWriter
    planner: SavePlanner | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The process is in its group."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life during a save."""


@dataclass(frozen=True, slots=True)
class Done:
    """The save went well."""

    metadata: Metadata
    phases: WritePhases | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The save, or the start, did not."""

    error: BaseException


def main(connection: Connection, place: ChildGroup | None, priority: Priority) -> None:
    """Serve until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the training process decides
    priority.apply()
    answers = _Answers(connection)
    try:
        if place is not None:
            _join(place)
        answers.send(Ready())
    except BaseException as error:  # noqa: BLE001  the other side waits for an answer, whatever it is
        answers.send_failure(error)
        return
    with contextlib.suppress(EOFError, ConnectionResetError):
        _serve(connection, answers, grouped=place is not None)
    if place is not None:
        dist.destroy_process_group()


def _join(place: ChildGroup) -> None:
    timeout = timedelta(seconds=place.timeout_secs)
    store = dist.TCPStore(place.host, place.port, place.world_size, is_master=place.rank == 0, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def _serve(connection: Connection, answers: _Answers, *, grouped: bool) -> None:
    planner: SavePlanner | None = None
    mapped: dict[int, torch.Tensor] = {}
    while (request := _received(connection)) is not None:
        planner = request.planner or planner
        try:
            assert planner is not None, "the first request brings one"
            _keep_mapped(mapped, request.state)
            with answers.beating():
                metadata = save(request.state, storage_writer=request.writer, planner=planner, no_dist=not grouped)
            answer: Done | Failed = Done(metadata, getattr(request.writer, "phases", None))
        except BaseException as error:  # noqa: BLE001  DCP's own is a BaseException
            answers.send_failure(error)
            continue
        answers.send(answer)


def _received(connection: Connection) -> Request | None:
    """The next request. What cannot be read becomes one that fails: the other ranks are saving, and wait for this one."""
    data = connection.recv_bytes()
    try:
        request: Request | None = ForkingPickler.loads(data)
    except Exception as error:  # noqa: BLE001  whatever a class, or its absence, raises
        failure = BackgroundSaveError(
            "what is to be saved cannot be read by the process that saves",
            rank=dist.get_rank() if dist.is_initialized() else None,
            found=f"{type(error).__name__}: {error}",
            remedy='use executor="thread", or define classes where other processes can import them',
        )
        return Request(failed_state(failure), ShardWriter("unknown"), BalancedSavePlanner())
    return request


def _keep_mapped(mapped: dict[int, torch.Tensor], state: dict[str, Any]) -> None:
    """Hold one tensor of each staging buffer: while one lives, the buffer stays mapped, and the next save in it faults no page anew."""
    for value in leaves_of(state):
        if isinstance(value, DTensor):
            with torch.no_grad():
                value = value.to_local()
        if isinstance(value, torch.Tensor) and value.is_shared():  # type: ignore[no-untyped-call]
            storage = value.untyped_storage()
            if storage.data_ptr() not in mapped:
                if len(mapped) == 2:  # a buffer was replaced by a larger one
                    mapped.clear()
                mapped[storage.data_ptr()] = value
            return


class _Answers:
    """The way back, which the save and the signs of life share."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, answer: object) -> None:
        with self._lock:
            self._connection.send(answer)

    def send_failure(self, error: BaseException) -> None:
        try:
            self.send(Failed(error))
        except Exception:  # noqa: BLE001  an exception of any class that cannot be sent: its text can
            self.send(Failed(BackgroundSaveError("the save failed", found=f"{type(error).__name__}: {error}")))

    @contextlib.contextmanager
    def beating(self) -> Any:
        """Signs of life while this is open."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT_SECS):
                with contextlib.suppress(OSError):
                    self.send(Alive())

        thread = threading.Thread(target=beat, name="dcp-engine-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
