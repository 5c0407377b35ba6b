"""The leases of all staged memory of this process, by address. Knows nothing of tensors."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Lease", "SplitRun", "is_staged", "live_leases", "split_run_at"]


class SplitRun(NamedTuple):
    """A run of staged memory that holds floats taken apart, block by block from its beginning, and not as they are.

    Attributes:
        start: address of the first byte.
        num_bytes: length.
        code: of the element type, as stored: what it means is the storage's.
    """

    start: int
    num_bytes: int
    code: int


class Lease:
    """The right to one staged state's memory, from the call that staged it until somebody says that its bytes are no longer needed.

    Args:
        start: address of the first byte.
        num_bytes: length of the memory.
        owner: who has it, for messages.
        on_writing: called once, when writing begins.
        on_release: called once, when it ends.
        check: raises if the memory does not hold what was staged.
        split: runs of the memory that hold no plain bytes.

    Thread-safety: all methods may be called from any thread, and more than once; from destructors, too, which the garbage collector may
    run in the middle of any of them.
    """

    def __init__(
        self,
        start: int,
        num_bytes: int,
        *,
        owner: str,
        on_writing: Callable[[], None],
        on_release: Callable[[], None],
        check: Callable[[], None],
        split: tuple[SplitRun, ...] = (),
    ) -> None:
        self.start = start
        self.end = start + num_bytes
        self._split = tuple(sorted(split))
        self.owner = owner
        self.check = check
        self._on_writing = on_writing
        self._on_release = on_release
        self._state = "held"
        self._process = os.getpid()
        self._lock = threading.RLock()
        with _LOCK:
            _LEASES[id(self)] = self
            if split:
                _SPLIT[id(self)] = self

    def split_run_at(self, address: int) -> SplitRun | None:
        """The run that a byte lies in, of those that hold no plain bytes."""
        after = bisect_right(self._split, address, key=_start_of)
        run = self._split[after - 1] if after else None
        return run if run is not None and address < run.start + run.num_bytes else None

    @property
    def is_released(self) -> bool:
        """Whether it is over."""
        return self._state == "released"

    def begin_writing(self) -> None:
        """Somebody reads the staged bytes now."""
        with self._lock:
            if self._state != "held":
                return
            self._state = "writing"
        self._on_writing()

    def release(self) -> None:
        """Nobody will read the staged bytes any more: their owner may overwrite them at once."""
        with self._lock:
            if self._state == "released":
                return
            self._state = "released"
        with _LOCK:
            _LEASES.pop(id(self), None)
            _SPLIT.pop(id(self), None)
        on_release = self._on_release
        # What the callbacks refer to refers to this lease: the memory must not wait for the garbage collector.
        self._on_writing = self._on_release = self.check = _nothing
        on_release()

    def abandon(self) -> None:
        """The last tensor in the memory is gone. In a forked process, which has but a copy of them, that means nothing."""
        if os.getpid() == self._process:
            self.release()


def _start_of(run: SplitRun) -> int:
    return run.start


def _nothing() -> None:
    """What a lease does when it is over."""


# Reentrant: a tensor that dies while it is held releases its lease at once, in this very thread.
_LOCK = threading.RLock()
# Never many: a stager has two buffers.
_LEASES: dict[int, Lease] = {}
# Those of them that have split runs.
_SPLIT: dict[int, Lease] = {}


def _forget_in_child() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    _LEASES.clear()
    _SPLIT.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def live_leases() -> list[Lease]:
    """Those that are not over."""
    with _LOCK:
        return list(_LEASES.values())


def is_staged(address: int, num_bytes: int) -> bool:
    """Whether a run of memory lies in a staged state, which nobody changes before its lease is released."""
    return any(lease.start <= address and address + num_bytes <= lease.end for lease in live_leases())


def split_run_at(address: int) -> SplitRun | None:
    """The run of staged memory that a byte lies in, if what is there are floats taken apart; ``None`` for all other memory."""
    if not _SPLIT:  # it is asked for each tensor of a state that is written
        return None
    with _LOCK:
        leases = list(_SPLIT.values())
    for lease in leases:
        if lease.start <= address < lease.end:
            return lease.split_run_at(address)
    return None
