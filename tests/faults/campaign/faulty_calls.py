"""System calls that fail at one place: every call is named and counted, and one of them, or all from then on, goes wrong as asked."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dcp_engine.storage.backends import linux
from dcp_engine.storage.backends.calls import SystemCalls

__all__ = ["ERRNOS", "Call", "Fault", "FaultyCalls", "RunawayError", "faults_of"]

ERRNOS = {name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EDQUOT", "ESTALE")}
_HINTS = ("start_writeback", "await_writeback")  # report nothing by contract
_METHODS = tuple(name for name in vars(SystemCalls) if not name.startswith("_") and name not in _HINTS)
# Python itself repeats the others when a signal interrupts them (PEP 475).
_INTERRUPTIBLE = {
    **{name: (os, name) for name in ("lstat", "stat", "statvfs", "listdir", "mkdir", "rmdir", "unlink", "rename")},
    "exchange": (linux, "exchange"),
}
_MAY_BE_DONE = ("mkdir", "rmdir", "unlink", "rename", "exchange")
_INTERRUPTS = 100
_MOST_CALLS = 20_000
_NONCE = re.compile(r"[0-9a-f]{32}")


class RunawayError(BaseException):
    """Code calls the system without end. Not an ``Exception``, so that no handler takes it for an error of the storage."""


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """One call of a run: the ``nth`` of this method on this name, counted from 0. The same in every run, however threads take turns."""

    method: str
    name: str
    nth: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong where.

    Attributes:
        call: the call that it begins with.
        kind: an errno's name, "EINTR", "short" (half of the bytes), "nothing" (no bytes; of an exchange: not supported here).
        lasts: "once"; "sticky": every later call of this method, too; "gone": every later call of any method.
        done: the call takes effect, and reports the error all the same, as a network file system may.
    """

    call: Call
    kind: str
    lasts: str = "once"
    done: bool = False

    def __str__(self) -> str:
        done = ", done all the same" if self.done else ""
        return f"{self.kind} {self.lasts} at {self.call.method} {self.call.nth} of {self.call.name}{done}"


def faults_of(calls: Sequence[Call]) -> Iterator[Fault]:
    """Every fault that can be put at these calls."""
    for call in calls:
        for kind in ERRNOS:
            for lasts in ("once", "sticky", "gone"):
                yield Fault(call, kind, lasts)
        if call.method in _MAY_BE_DONE:
            yield from (Fault(call, kind, "once", True) for kind in ("EIO", "ESTALE"))
        if call.method in _INTERRUPTIBLE:
            yield from (Fault(call, "EINTR", lasts) for lasts in ("once", "sticky"))
        if call.method in ("pwritev", "preadv"):
            yield from (Fault(call, kind, lasts) for kind in ("short", "nothing") for lasts in ("once", "sticky"))
        if call.method == "exchange":
            yield Fault(call, "nothing")


class FaultyCalls(SystemCalls):
    """Calls of the system below a directory, of which those that a fault names fail.

    Args:
        root: names are told relative to it.
        fault: what goes wrong; None: nothing, calls are counted.
        exchanges: False: names cannot be swapped here.

    Attributes:
        num_fired: calls that went wrong.
    """

    def __init__(self, root: str, fault: Fault | None = None, *, exchanges: bool = True) -> None:
        self.num_fired = 0
        self._root = root
        self._fault = fault
        self._exchanges = exchanges
        self._seen: Counter[tuple[str, str]] = Counter()
        self._names: dict[int, str] = {}
        self._begun = False
        self._interrupts_left = 1 if fault is not None and fault.lasts == "once" else _INTERRUPTS
        self._lock = threading.Lock()

    @property
    def calls(self) -> list[Call]:
        """All that were made, sorted by method and name."""
        return [Call(method, name, nth) for (method, name), count in sorted(self._seen.items()) for nth in range(count)]

    def make(self, method: str, args: tuple[Any, ...]) -> Any:
        """One call, good or bad."""
        with self._lock:
            name = self._names.get(args[0], "?") if isinstance(args[0], int) else self._label(args[0])
            nth = self._seen[method, name]
            self._seen[method, name] += 1
            if sum(self._seen.values()) > _MOST_CALLS:
                raise RunawayError(f"more than {_MOST_CALLS} calls; the last is {method} of {name}")
            fails = self._fails(Call(method, name, nth))
            self.num_fired += fails
        if method == "exchange" and not self._exchanges:
            return False
        return self._fail(method, args) if fails else self._real(method, args)

    def _fails(self, call: Call) -> bool:
        fault = self._fault
        if fault is None:
            return False
        if call == fault.call:
            self._begun = fault.lasts != "once"
            return True
        return self._begun and (call.method == fault.call.method or fault.lasts == "gone")

    def _fail(self, method: str, args: tuple[Any, ...]) -> Any:
        fault = self._fault
        assert fault is not None
        if fault.kind == "nothing":
            return False if method == "exchange" else 0
        if fault.kind == "short":
            return self._real(method, (args[0], _half(args[1]), args[2]))
        if fault.kind == "EINTR":
            module, attribute = _INTERRUPTIBLE[method]
            with mock.patch.object(module, attribute, self._interrupted(getattr(module, attribute))):
                return self._real(method, args)
        if method == "close" or fault.done:  # a descriptor is free after close, whatever that reports
            self._real(method, args)
        raise OSError(ERRNOS[fault.kind], os.strerror(ERRNOS[fault.kind]))

    def _interrupted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, after the interrupts that are left."""

        def call(*args: Any) -> Any:
            if self._interrupts_left:
                self._interrupts_left -= 1
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            return function(*args)

        return call

    def _real(self, method: str, args: tuple[Any, ...]) -> Any:
        result = getattr(SystemCalls, method)(self, *args)
        if method == "open":
            with self._lock:
                self._names[result] = self._label(args[0])
        return result

    def _label(self, path: str) -> str:
        return _NONCE.sub("*", os.path.relpath(path, self._root))


def _half(views: Sequence[memoryview]) -> list[memoryview]:
    """The first half of the bytes, at least one."""
    left = max(1, sum(view.nbytes for view in views) // 2)
    taken: list[memoryview] = []
    for view in views:
        taken.append(view.cast("B")[:left])
        left -= taken[-1].nbytes
        if not left:
            break
    return taken


def _method(name: str) -> Any:
    def call(self: FaultyCalls, *args: Any) -> Any:
        return self.make(name, args)

    return call


for _name in _METHODS:
    setattr(FaultyCalls, _name, _method(_name))
