"""System calls that are counted, and of which one ends the process by SIGKILL: before it, after it, or in the middle of a write."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp_engine.storage.backends.calls import SystemCalls

__all__ = ["MODES", "NAMES", "Board", "Fault", "KillingCalls"]

MODES: Final = ("before", "after", "torn")
"""Where in a call the process dies. ``torn``: of a write, its first half was taken."""

NAMES: Final = tuple(sorted(name for name, value in vars(SystemCalls).items() if callable(value) and not name.startswith("_")))
"""Every call there is, whatever is added to them."""

_SLOTS: Final = 8
_CALLS, _FINISHED, _ASKED, _PUBLISHED, _ASIDE, _TORN, _RETIRED = range(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One death.

    Attributes:
        rank: who dies.
        call: at which of its system calls, from 1 on.
        mode: of ``MODES``.
        alone: the others live on and see that a peer is gone; else all ranks of the save die at that moment.
    """

    rank: int
    call: int
    mode: str
    alone: bool

    def __str__(self) -> str:
        return f"rank {self.rank} {'alone' if self.alone else 'and all others'} killed {self.mode} call {self.call}"


class Board:
    """What the ranks have done, in memory that they share with the process that forked them, so that it outlives them."""

    def __init__(self, max_ranks: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 8 * _SLOTS * max_ranks)).cast("q")

    def clear(self) -> None:
        """Nobody has done anything."""
        for index in range(len(self._words)):
            self._words[index] = 0

    def add_call(self, rank: int) -> int:
        """Counts a call that begins; its number."""
        self._words[rank * _SLOTS + _CALLS] += 1
        return self._words[rank * _SLOTS + _CALLS]

    def calls(self, rank: int) -> int:
        """How many calls a rank began."""
        return self._words[rank * _SLOTS + _CALLS]

    def set_asked(self) -> None:
        """The call that publishes begins."""
        self._words[_ASKED] = 1

    def set_published(self) -> None:
        """It was made."""
        self._words[_PUBLISHED] = 1
        self._words[_ASIDE] = 0

    def set_aside(self) -> None:
        """The old checkpoint was moved away, to make room."""
        self._words[_ASIDE] = 1

    def set_retired(self) -> None:
        """A step that has had its time lost its name."""
        self._words[_RETIRED] = 1

    def set_torn(self) -> None:
        """A rank died in the middle of a write."""
        self._words[_TORN] = 1

    def set_finished(self, rank: int) -> None:
        """A rank was told that the save succeeded."""
        self._words[rank * _SLOTS + _FINISHED] = 1

    def progress(self) -> tuple[bool, ...]:
        """How far the save came, as far as a reader might see it."""
        return self.asked, self.published, self.aside, self.retired, self.finished(0)

    @property
    def retired(self) -> bool:
        """Whether a step was retired."""
        return bool(self._words[_RETIRED])

    @property
    def torn(self) -> bool:
        """Whether a rank died in the middle of a write."""
        return bool(self._words[_TORN])

    @property
    def asked(self) -> bool:
        """Whether the call that publishes was begun."""
        return bool(self._words[_ASKED])

    @property
    def published(self) -> bool:
        """Whether it was made."""
        return bool(self._words[_PUBLISHED])

    @property
    def aside(self) -> bool:
        """Whether the old checkpoint was moved away, and the new one not yet put there."""
        return bool(self._words[_ASIDE])

    def finished(self, rank: int) -> bool:
        """Whether a rank was told that the save succeeded."""
        return bool(self._words[rank * _SLOTS + _FINISHED])


class KillingCalls(SystemCalls):
    """The system's calls until the fault; with ``exchange=False`` on a file system that cannot swap two names.

    Args:
        rank: of this process.
        target: path that the save publishes; the call that gives it its name is noted on the board.
        board: where calls are counted.
        retires: path of a step that has had its time; noted likewise.
        fault: None: nobody dies, and ``names`` keeps what was called.

    Thread-safety: any number of threads; the numbers are exact, and the process ends within the call of the fault.
    """

    def __init__(
        self, rank: int, target: str, board: Board, fault: Fault | None, *, retires: str | None = None, exchange: bool = True
    ) -> None:
        self._rank = rank
        self._target = target
        self._retires = retires
        self._board = board
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._can_exchange = exchange
        self._lock = threading.Lock()
        self._first: Callable[[], Fault] | None = None
        self.names: list[str] = []

    def pause(self, first: Callable[[], Fault]) -> None:
        """Before the first call, ``first`` is called, perhaps to return in another process, and says what fault there is."""
        self._first = first

    def _enter(self, name: str, args: Sequence[Any]) -> bool:
        """Counts, and dies if it is time. Returns whether to die after the call."""
        with self._lock:
            if self._first is not None:
                first, self._first = self._first, None
                self._fault = first()
            number = self._board.add_call(self._rank)
            if self._fault is None:
                self.names.append(name)
                return False
            if number != self._fault.call:
                return False
            if (
                self._fault.mode == "torn" and name == "pwritev"
            ):  # threads may have taken turns in another order than when they were counted
                self._board.set_torn()
                SystemCalls.pwritev(self, args[0], _first_half(args[1]), args[2])
            if self._fault.mode != "after":
                die(self._fault)
            return True

    def _called(self, name: str, args: Sequence[Any], result: object) -> None:
        """Notes what has happened to the target."""
        if (name == "rename" and args[1] == self._target) or (name == "exchange" and args[1] == self._target and result):
            self._board.set_published()
        elif name == "rename" and args[0] == self._target:
            self._board.set_aside()
        elif name == "rename" and args[0] == self._retires:
            self._board.set_retired()


def die(fault: Fault) -> None:
    """Ends this process, or all ranks of its group."""
    if fault.alone:
        signal.raise_signal(signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)
    signal.pause()  # never reached by the one thread; with several, until the kernel has ended them all


def _first_half(views: Sequence[memoryview]) -> list[memoryview]:
    """At least one byte of a write, and not all of it, if it has several."""
    data = b"".join([bytes(view) for view in views])
    return [memoryview(data)[: max(1, len(data) // 2)]]


def _counted(name: str) -> Callable[..., Any]:
    plain = getattr(SystemCalls, name)

    def call(self: KillingCalls, *args: Any) -> Any:
        last = self._enter(name, args)
        try:
            if name in ("rename", "exchange") and args[1] == self._target:
                self._board.set_asked()
            result = False if name == "exchange" and not self._can_exchange else plain(self, *args)
            self._called(name, args, result)
            return result
        finally:
            if last:
                die(self._fault)  # type: ignore[arg-type]

    call.__name__ = name
    return call


for _name in NAMES:
    setattr(KillingCalls, _name, _counted(_name))
