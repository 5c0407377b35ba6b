"""The world of two writers, a reader and retention: a clock that jumps, calls into which another actor can slip, and what must hold.

Every call on names goes through :class:`World`, which judges it at the moment that it takes effect: who publishes has the newest claim,
what is retired is not being read and not the last, what is removed is trash or an attempt.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dcp_engine.storage.backends.calls import SystemCalls

__all__ = ["Actor", "BrokenPromise", "Killed", "Moment", "World"]

Moment: TypeAlias = tuple[str, int]
"""Before a call of a name, or before any if that is empty; and how many of them come first."""

_STEP = re.compile(r"step-([0-9]{8})")
_REMOVABLE = re.compile(r"(\.trash-[0-9a-f]{32}|\.tmp-step-[0-9]{8}-[0-9a-f]{32})(/.*)?")
_MADE = re.compile(r"\.epochs(/[0-9]{8})?|(\.trash-[0-9a-f]{32})|\.tmp-step-[0-9]{8}-[0-9a-f]{32}(/.*)?")


class BrokenPromise(Exception):
    """What must hold does not."""


class Killed(BaseException):
    """The process of an actor is gone: nothing of it runs any more, clean-up included."""


@dataclass(slots=True)
class Actor:
    """Whoever makes calls.

    Attributes:
        name: for messages.
        epoch: of its claim; 0 without one.
    """

    name: str
    epoch: int = 0


@dataclass  # without slots: their class is a copy, which ``super()`` does not know
class World(SystemCalls):
    """The system's calls on one root, judged.

    Attributes:
        root: its path.
        now: seconds by the clock of the file system's server.
        claimed: the highest epoch whose claim has returned.
        published: epoch under which each step that is visible was published.
        held: steps that somebody reads, once for each reader.
        slip: another actor's turn, and when it comes.
        die_before: what the acting process does not live to call.
        counts: what has happened.
    """

    root: str
    now: float = 1e9
    claimed: int = 0
    published: dict[int, int] = field(default_factory=dict)
    held: Counter[int] = field(default_factory=Counter)
    slip: tuple[Moment, Callable[[], None]] | None = None
    die_before: Moment | None = None
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    _actors: list[Actor] = field(default_factory=list)
    _dates: dict[int, float] = field(default_factory=dict)
    _dead: bool = False
    _main: int = field(default_factory=threading.get_ident)

    # -- who acts -----------------------------------------------------------------------------------------------------

    def act(self, actor: Actor, action: Callable[[], None]) -> None:
        """Has an actor do something. Its death ends here."""
        self._actors.append(actor)
        try:
            action()
        except BaseException:
            if not self._dead:
                raise
        finally:
            self._actors.pop()
            if self._dead:
                self._dead = False
                self.counts["killed"] += 1

    def settle(self) -> None:
        """No more of what was to come in the middle of an action."""
        self.slip = self.die_before = None

    def fail(self, text: str) -> None:
        """Notes a broken promise; it is raised by :meth:`judge`, since the code under test may swallow what its calls raise."""
        self.broken.append(text)

    def judge(self) -> None:
        """Raises what was noted."""
        if self.broken:
            raise BrokenPromise("; ".join(self.broken))

    def _turn(self, call: str) -> None:
        """Before each call on names of the acting thread."""
        if self._dead:
            raise Killed
        if not self._actors or threading.get_ident() != self._main:
            return
        self.now += 0.001
        if self.die_before is not None:
            self.die_before, due = _after(self.die_before, call)
            if due:
                self.die_before, self._dead = None, True
                raise Killed
        if self.slip is not None:
            moment, action = self.slip
            moment, due = _after(moment, call)
            self.slip = (moment, action)
            if due:
                # Its own calls are made in peace.
                self.slip, death, self.die_before = None, self.die_before, None
                self.counts["interleaved"] += 1
                action()
                self.die_before = death

    # -- calls --------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._turn("open")
        new = bool(flags & os.O_CREAT)
        if new:
            self._check_path(path, _MADE)
        fd = super().open(path, flags, mode)
        if new:
            self._date(path)
        return fd

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        if self._dead:
            raise Killed
        return super().pwritev(fd, views, position)

    def fsync(self, fd: int) -> None:
        self._turn("fsync")  # and no more: no power is lost here

    def flock(self, fd: int, operation: int) -> None:
        self._turn("flock")
        super().flock(fd, operation)

    def listdir(self, path: str) -> list[str]:
        self._turn("listdir")
        return super().listdir(path)

    def lstat(self, path: str) -> os.stat_result:
        self._turn("lstat")
        return self._dated(super().lstat(path))

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._turn("mkdir")
        self._check_path(path, _MADE)
        super().mkdir(path, mode)
        self._date(path)

    def rmdir(self, path: str) -> None:
        self._turn("rmdir")
        self._check_path(path, _REMOVABLE)
        super().rmdir(path)

    def unlink(self, path: str) -> None:
        self._turn("unlink")
        self._check_path(path, _REMOVABLE)
        super().unlink(path)

    def rename(self, source: str, target: str) -> None:
        self._turn("rename")
        super().rename(source, target)
        self._date(target)
        origin, goal = self._step(source), self._step(target)
        if goal is not None:
            self._note_published(goal)
        if origin is not None:
            self._note_retired(origin)
        if origin is None and goal is None and os.path.basename(target) != "LATEST":
            self._check_path(source, _REMOVABLE)

    def exchange(self, one: str, other: str) -> bool:
        self._turn("exchange")
        self.fail(f"{self._who()} replaced {os.path.basename(other)}, which nobody asked for")
        return super().exchange(one, other)

    # -- what must hold -------------------------------------------------------------------------------------------------

    def _note_published(self, step: int) -> None:
        actor = self._actors[-1]
        self.counts["published"] += 1
        if actor.epoch < self.claimed:
            self.fail(f"{self._who()} published step {step} after epoch {self.claimed} was claimed")
        if step in self.published:
            self.fail(f"{self._who()} published step {step} over another one")
        self.published[step] = actor.epoch

    def _note_retired(self, step: int) -> None:
        actor = self._actors[-1]
        self.counts["retired"] += 1
        if self.held[step]:
            self.fail(f"{self._who()} retired step {step} while somebody read it")
        if self.published.get(step, 0) > actor.epoch:
            self.fail(f"{self._who()} retired step {step}, which epoch {self.published[step]} has published")
        self.published.pop(step, None)
        if not self.published:
            self.fail(f"{self._who()} retired step {step}, the last one")

    def _check_path(self, path: str, allowed: re.Pattern[str]) -> None:
        name = os.path.relpath(path, self.root)
        if not allowed.fullmatch(name):
            self.fail(f"{self._who()} touched {name}")

    def _step(self, path: str) -> int | None:
        match = _STEP.fullmatch(os.path.relpath(path, self.root))
        return int(match[1]) if match else None

    def _who(self) -> str:
        return f"{self._actors[-1].name} of epoch {self._actors[-1].epoch}" if self._actors else "nobody"

    # -- the clock ------------------------------------------------------------------------------------------------------

    def _date(self, path: str) -> None:
        self._dates[os.lstat(path).st_ino] = self.now

    def _dated(self, found: os.stat_result) -> os.stat_result:
        """With the time by this clock. What nobody made here is as old as can be."""
        values = list(found)
        values[7] = values[8] = values[9] = int(self._dates.get(found.st_ino, 0.0))
        return os.stat_result(values)


def _after(moment: Moment, call: str) -> tuple[Moment, bool]:
    """What is left of a moment after one more call, and whether it has come."""
    name, left = moment
    if name and name != call:
        return moment, False
    return (name, left - 1), left == 0
