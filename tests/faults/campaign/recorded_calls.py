"""Records what saves do to a file system, call by call, while they really run; and puts an error into one call, where asked."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from faults.campaign.io_events import TOP, Change, Event, Flush, Link, Note, Spoil, Write

from dcp_engine.storage.backends.calls import SystemCalls

__all__ = ["Fault", "RecordedCalls"]


@dataclass(frozen=True, slots=True)
class Fault:
    """An EIO in one call.

    Attributes:
        call: ``pwritev``, ``fsync`` or ``close`` (of a file that was written).
        index: which of these calls of that act, from 0.
        swallowed: the caller is told that all went well: a mutant of the engine, which would ignore the error.
        act: which one, from 0: a save, or whatever else a scenario notes as ``acting``.
    """

    call: str
    index: int
    swallowed: bool
    act: int = 0


class RecordedCalls(SystemCalls):
    """Passes every call on, and notes those that change anything below ``top``.

    Attributes:
        events: what was done, in order.
        node: the machine that is calling, which a test sets.
        hit: the fault was really put.

    Thread-safety: calls are put in an order by a lock that each holds while it runs.
    """

    def __init__(self, top: str, *, can_exchange: bool = True, fault: Fault | None = None) -> None:
        self.events: list[Event] = []
        self.node = 0
        self.hit = False
        self._top = top
        self._can_exchange = can_exchange
        self._fault = fault
        self._num_calls: dict[str, int] = {}
        self._num_acts = 0
        self._tables: dict[int, dict[str, int]] = {TOP: {}}
        self._num_inodes = 1
        self._open: dict[int, tuple[int, str, bool]] = {}
        self._lock = threading.RLock()

    def note(self, what: str, path: str, content: str = "") -> None:
        """What the caller knows now, of a path below the top."""
        if what in ("saving", "acting"):
            self._num_acts += 1
            self._num_calls = {}
        self.events.append(Note(what, self._short(path), content))

    # -- files --------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            fd = super().open(path, flags, mode)
            inode = self._find(path)
            if inode is None and flags & os.O_CREAT and self._find(os.path.dirname(path)) is not None:
                inode = self._made("create", path)
            if inode is not None:
                self._open[fd] = (inode, self._short(path), bool(flags & os.O_WRONLY))
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            super().close(fd)
            inode, path, written = self._open.pop(fd, (-1, "", False))
            if written and self._is_hit("close"):
                self.events.append(Spoil(path, inode))
                self._fail()

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        with self._lock:
            num_bytes = super().pwritev(fd, views, position)
            inode, path, _ = self._open.get(fd, (-1, "", False))
            if inode >= 0:
                lost = self._is_hit("pwritev")
                self.events.append(Write(path, inode, position, b"".join(map(bytes, views))[:num_bytes], lost))
                if lost:
                    self._fail()
            return num_bytes

    def fsync(self, fd: int) -> None:
        with self._lock:
            super().fsync(fd)
            inode, path, _ = self._open.get(fd, (-1, "", False))
            if inode >= 0:
                failed = self._is_hit("fsync")
                self.events.append(Flush(path, inode, self.node, failed))
                if failed:
                    self._fail()

    # -- names --------------------------------------------------------------------------------------------------------

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        with self._lock:
            super().mkdir(path, mode)
            if self._find(os.path.dirname(path)) is not None:
                self._tables[self._made("mkdir", path)] = {}

    def rmdir(self, path: str) -> None:
        with self._lock:
            super().rmdir(path)
            self._change("rmdir", path, {path: None})

    def unlink(self, path: str) -> None:
        with self._lock:
            super().unlink(path)
            self._change("unlink", path, {path: None})

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            super().rename(source, target)
            self._change("rename", target, {source: None, target: self._find(source)})

    def exchange(self, one: str, other: str) -> bool:
        with self._lock:
            if not self._can_exchange or not super().exchange(one, other):
                return False
            self._change("exchange", other, {one: self._find(other), other: self._find(one)})
            return True

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_hit(self, call: str) -> bool:
        index = self._num_calls.get(call, 0)
        self._num_calls[call] = index + 1
        fault = self._fault
        hit = fault is not None and (fault.act + 1, fault.call, fault.index) == (self._num_acts, call, index)
        self.hit |= hit
        return hit

    def _fail(self) -> None:
        assert self._fault is not None
        if not self._fault.swallowed:
            raise OSError(errno.EIO, f"injected into {self._fault.call} {self._fault.index}")

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self._top)

    def _find(self, path: str) -> int | None:
        """Inode of a path; None for one that is not below the top, or was not made while this recorded."""
        if path == self._top:
            return TOP
        if not path.startswith(self._top + "/"):
            return None
        inode: int | None = TOP
        for name in path[len(self._top) + 1 :].split("/"):
            inode = None if inode is None else self._tables.get(inode, {}).get(name)
        return inode

    def _made(self, what: str, path: str) -> int:
        inode, self._num_inodes = self._num_inodes, self._num_inodes + 1
        self._change(what, path, {path: inode}, made=inode)
        return inode

    def _change(self, what: str, path: str, targets: dict[str, int | None], made: int | None = None) -> None:
        links = []
        for place, inode in targets.items():
            directory = self._find(os.path.dirname(place))
            if directory is None:
                return
            links.append(Link(directory, os.path.basename(place), inode))
        for link in links:
            if link.inode is None:
                self._tables[link.directory].pop(link.name, None)
            else:
                self._tables[link.directory][link.name] = link.inode
        self.events.append(Change(what, self._short(path), tuple(links), self.node, made))
