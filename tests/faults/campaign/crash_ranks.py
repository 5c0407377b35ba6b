"""Ranks of one save as forked processes: they drive planner and writer in DCP's order, and exchange plans and results by socket pairs.

No process group has to be built for each of a hundred thousand deaths. A rank that dies closes its sockets, which the others see as DCP's
would see a broken group: the save ends there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final, NoReturn

import torch
from torch.distributed.checkpoint import LoadPlanner, SavePlanner, StorageReader, StorageWriter

from dcp_engine import BalancedSavePlanner
from dcp_engine.planners import save as planner_module

__all__ = ["BROKEN", "DONE", "STOPPED", "Link", "PeerGoneError", "Stage", "load_alone", "run_ranks", "save_as_rank", "save_in_turn"]

DONE: Final = 0
STOPPED: Final = 3
"""Exit status of a rank that saw another one go."""
BROKEN: Final = 4
"""Exit status of a rank that met an error of its own; its text is in the file that ``run_ranks`` was given."""
_HANG_SECS: Final = 120


class PeerGoneError(Exception):
    """Another rank died or gave up."""


class Link:
    """This rank's connections: of the coordinator to every other rank, of those to the coordinator. One call at a time."""

    def __init__(self, rank: int, peers: Sequence[Connection]) -> None:
        self.rank = rank
        self._peers = peers

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, in their order, on the coordinator; nothing elsewhere."""
        if self.rank:
            self._send(self._peers[0], value)
            return []
        values: list[Any] = [value]
        gone: PeerGoneError | None = None
        for peer in self._peers:  # all of them, as DCP's: one that still writes must not find its directory removed
            try:
                values.append(self._receive(peer))
            except PeerGoneError as error:
                gone = gone or error
        if gone is not None:
            raise gone
        return values

    def scatter(self, values: Sequence[Any]) -> Any:
        """This rank's of the coordinator's values."""
        if self.rank:
            return self._receive(self._peers[0])
        for peer, value in zip(self._peers, values[1:], strict=True):
            self._send(peer, value)
        return values[0]

    def give_up(self) -> NoReturn:
        """Leaves the save, as a rank does that met an error, and learns that all do."""
        if self.rank:
            self._send(self._peers[0], PeerGoneError("a rank gave up"))
            self._receive(self._peers[0])
        raise PeerGoneError("this rank gave up")

    def tell(self) -> None:
        """A coordinator that saw a rank fail tells the others; those that are gone need no telling."""
        for peer in self._peers if self.rank == 0 else ():
            with contextlib.suppress(PeerGoneError):
                self._send(peer, PeerGoneError("the save has failed"))

    def _send(self, peer: Connection, value: Any) -> None:
        try:
            peer.send_bytes(pickle.dumps(value))
        except OSError as error:
            raise PeerGoneError(str(error)) from error

    def _receive(self, peer: Connection) -> Any:
        try:
            value = pickle.loads(peer.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerGoneError(str(error)) from error
        if isinstance(value, PeerGoneError):
            raise value
        return value


@contextlib.contextmanager
def _one_of(world_size: int) -> Iterator[None]:
    """Planners take this process for a rank of so many, as they would in a process group of that size."""
    before = planner_module._num_ranks
    planner_module._num_ranks = lambda: world_size
    try:
        yield
    finally:
        planner_module._num_ranks = before


def save_as_rank(link: Link, state: dict[str, Any], writer: StorageWriter, *, give_up: bool = False) -> None:
    """One save on one rank, in the order of ``dcp.save``. ``give_up``: this rank leaves when its files are written.

    Raises:
        PeerGoneError: another rank did not come through, or this one gave up.
    """
    planner = BalancedSavePlanner()
    planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=link.rank == 0)
    writer.set_up_storage_writer(link.rank == 0, rank=link.rank, use_collectives=True)
    plans = link.gather(writer.prepare_local_plan(planner.create_local_plan()))
    metadata = None
    if link.rank == 0:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(link.scatter(plans)), planner).value()
    if give_up:
        link.give_up()
    results = link.gather(written)
    if link.rank == 0:
        assert metadata is not None
        writer.finish(metadata, results)
    link.scatter([True] * len(results))  # DCP sends the metadata, which nobody looks at here


def save_in_turn(states: Sequence[dict[str, Any]], make_writer: Callable[[], StorageWriter]) -> None:
    """The same with all ranks in this process, one after the other. Nobody may die."""
    writers = [make_writer() for _ in states]
    planners: list[SavePlanner] = [BalancedSavePlanner() for _ in states]
    plans = []
    with _one_of(len(states)):
        for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
            planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for plan, writer, planner in zip(plans, writers, planners, strict=True)
    ]
    writers[0].finish(metadata, results)


def load_alone(state: dict[str, Any], reader: StorageReader, planner: LoadPlanner) -> None:
    """One load on one rank, in the order of ``dcp.load``, into ``state``."""
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def run_ranks(world_size: int, job: Callable[[Link], None], errors: str, *, gate: Callable[[int], None] | None = None) -> list[int]:
    """Forks a process for each rank, in a process group of their own, and waits for all.

    Args:
        job: what each does with its connections.
        errors: a file that gets the text of what went wrong, beside a rank's death and ``PeerGoneError``.
        gate: is given the process of the first rank, before whose ``job`` it returns.

    Returns:
        for each rank, its status as ``os.waitpid`` gives it.
    """
    pairs = [Pipe() for _ in range(world_size - 1)]
    links = [[near for near, _ in pairs], *([far] for _, far in pairs)]
    pids: list[int] = []
    opened, opens = Pipe(duplex=False)
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            opens.close()
            _be(rank, pids, links, job if gate is None or rank else lambda link: job(_awaited(opened, link)), errors)
        pids.append(pid)
        os.setpgid(pid, pids[0])  # by both, since either may come first
    for connection in (opened, *(connection for connections in links for connection in connections)):
        connection.close()
    if gate is not None:
        gate(pids[0])
    opens.close()
    return [os.waitpid(pid, 0)[1] for pid in pids]


def _awaited(opened: Connection, link: Link) -> Link:
    """Returns when the other end is closed."""
    with contextlib.suppress(EOFError):
        opened.recv_bytes()
    return link


def _be(rank: int, before: Sequence[int], links: list[list[Connection]], job: Callable[[Link], None], errors: str) -> NoReturn:
    """The life of a rank, which never returns into the program that forked it."""
    status = BROKEN
    link = Link(rank, links[rank])
    try:
        os.setpgid(0, before[0] if before else 0)
        signal.alarm(_HANG_SECS)  # ends one that hangs
        gc.disable()  # it would copy pages that die soon
        for other, connections in enumerate(links):
            # The peer of a rank that dies sees the end only when nobody else holds that rank's sockets.
            for connection in connections if other != rank else ():
                connection.close()
        with _one_of(len(links)):
            job(link)
        status = DONE
    except PeerGoneError:
        link.tell()
        status = STOPPED
    except BaseException:
        with open(errors, "a", encoding="utf-8") as file:
            file.write(f"rank {rank}: {traceback.format_exc()}\n")
    finally:
        os._exit(status)


torch.set_num_threads(1)  # a process with threads must not fork


class Stage:
    """A process that has done all of a save up to its first system call, and forks from there whoever is to die.

    Half of a small save is planning, and most of what a fork costs is the memory that it writes to first.

    Args:
        job: of the one rank. It has to call ``serve`` of the stage that it is given where the forks are to begin.
        errors: as for ``run_ranks``.
    """

    def __init__(self, job: Callable[[Link, Stage], None], errors: str) -> None:
        self._errors = errors
        self._here, self._there = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._here.close()
            _be(0, [], [[]], lambda link: job(link, self), errors)
        self._there.close()

    def serve(self) -> Any:
        """Returns, in a new process each time, what was asked to be run; never in the stage itself."""
        signal.alarm(0)
        while True:
            try:
                asked = pickle.loads(self._there.recv_bytes())
            except EOFError:
                os._exit(DONE)
            pid = os.fork()
            if pid == 0:
                signal.alarm(_HANG_SECS)
                self._there.close()
                return asked
            self._there.send_bytes(pickle.dumps(os.waitpid(pid, 0)[1]))

    def run(self, asked: Any) -> int:
        """Has one more process go on from there, and returns how it ended, as ``os.waitpid`` gives it."""
        try:
            self._here.send_bytes(pickle.dumps(asked))
            status: int = pickle.loads(self._here.recv_bytes())
        except (EOFError, OSError) as error:
            raise ChildProcessError(f"the save ended before its first system call; {self._errors} says why") from error
        return status

    def close(self) -> None:
        """Ends the stage."""
        self._here.close()
        os.waitpid(self._pid, 0)
