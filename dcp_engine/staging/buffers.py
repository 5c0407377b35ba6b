"""Two staging buffers and who has them: a small state machine with a lock, which knows nothing of tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dcp_engine.errors import ClosedError, StagingTimeoutError
from dcp_engine.staging.arena import Arena

__all__ = ["Buffer", "BufferInfo", "BufferPool", "BufferState"]

_SLICE_SECS = 1.0


class BufferState(Enum):
    """FREE -> FILLING (the caller copies) -> STAGED (waits for its writer) -> WRITING -> FREE. Any state may go back to FREE."""

    FREE = "free"
    FILLING = "filling"
    STAGED = "staged"
    WRITING = "writing"


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """What a buffer is doing.

    Attributes:
        state: see :class:`BufferState`.
        owner: who has it, in words; empty when free.
        since_secs: how long it has been in this state.
        num_bytes: of its memory; 0 before it was first used.
    """

    state: BufferState
    owner: str
    since_secs: float
    num_bytes: int


class Buffer:
    """One buffer. Its arena belongs to whoever holds it; the rest to the pool.

    ``turn`` counts its holders: what a former one still says about it is not heard.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.state = BufferState.FREE
        self.owner = ""
        self.since = 0.0
        self.turn = 0


class BufferPool:
    """Hands out buffers one holder at a time.

    Args:
        num_buffers: how many there are.
        clock: seconds, monotonic.

    Thread-safety: all methods may be called from any thread, and :meth:`release` from destructors, too.
    """

    def __init__(self, num_buffers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buffers = [Buffer() for _ in range(num_buffers)]
        # Its lock is reentrant: a destructor may release one buffer while this thread asks for another.
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, owner: str, wait_secs: float) -> tuple[Buffer, float]:
        """A free buffer, FILLING from now on: one that has memory already, where there is one.

        Returns:
            The buffer, and the seconds that were waited for it.

        Raises:
            StagingTimeoutError: none became free within ``wait_secs``; the message names the holders.
            ClosedError: the pool is closed, or was closed meanwhile.
        """
        started = self._clock()
        with self._changed:
            while True:
                if self._closed:
                    raise ClosedError("the stager is closed", remedy="make a new DoubleBufferStager")
                free = [buffer for buffer in self._buffers if buffer.state is BufferState.FREE]
                if free:
                    buffer = max(free, key=lambda buffer: buffer.arena is not None)
                    buffer.turn += 1
                    self._enter(buffer, BufferState.FILLING, owner)
                    return buffer, self._clock() - started
                left_secs = wait_secs - (self._clock() - started)
                if left_secs <= 0:
                    raise StagingTimeoutError(
                        "all staging buffers are busy",
                        expected=f"a free buffer within {wait_secs:g} s",
                        found="; ".join(self._describe(buffer) for buffer in self._buffers),
                        remedy="save less often, or find out why writing does not end; with a writer that is not ShardWriter, or saves in"
                        " another process, call stager.track(...) on what async_save returned",
                    )
                # In slices: a destructor that runs between the look above and this wait wakes nobody.
                self._changed.wait(min(left_secs, _SLICE_SECS))

    def enter(self, buffer: Buffer, turn: int, state: BufferState) -> None:
        """Move a held buffer on. A buffer that was given back meanwhile stays as it is."""
        with self._changed:
            if buffer.turn == turn and buffer.state is not BufferState.FREE:
                self._enter(buffer, state, buffer.owner)

    def release(self, buffer: Buffer, turn: int) -> None:
        """Give a buffer back. Idempotent, whoever has it by then."""
        with self._changed:
            if buffer.turn != turn or buffer.state is BufferState.FREE:
                return
            self._enter(buffer, BufferState.FREE, "")
            if self._closed:
                _drop(buffer)
            self._changed.notify_all()

    def arenas(self) -> list[Arena]:
        """The memory of all buffers that have some, busy or not."""
        with self._changed:
            return [buffer.arena for buffer in self._buffers if buffer.arena is not None]

    def info(self) -> tuple[BufferInfo, ...]:
        """What each buffer is doing."""
        with self._changed:
            now = self._clock()
            return tuple(
                BufferInfo(
                    buffer.state,
                    buffer.owner,
                    now - buffer.since if buffer.since else 0.0,
                    0 if buffer.arena is None else buffer.arena.num_bytes,
                )
                for buffer in self._buffers
            )

    def close(self) -> None:
        """No more buffers. The memory of free ones goes at once, that of others when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            for buffer in self._buffers:
                if buffer.state is BufferState.FREE:
                    _drop(buffer)
            self._changed.notify_all()

    def _enter(self, buffer: Buffer, state: BufferState, owner: str) -> None:
        buffer.state = state
        buffer.owner = owner
        buffer.since = self._clock()

    def _describe(self, buffer: Buffer) -> str:
        return f"{buffer.state.value} for {self._clock() - buffer.since:.1f} s by {buffer.owner}"


def _drop(buffer: Buffer) -> None:
    if buffer.arena is not None:
        buffer.arena.close()
        buffer.arena = None
