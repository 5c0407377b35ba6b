"""A cap on how fast a rank writes, so that a save in the background leaves storage and network to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import Buffer, WriteFile

__all__ = ["MIN_BYTES_PER_SEC", "CappedFile", "TokenBucket", "capped"]

MIN_BYTES_PER_SEC = 64 * 1024
"""A slower cap is a mistake of units: one block of 4 MiB takes a minute at this one."""


class TokenBucket:
    """Lets bytes pass at a steady rate, in the order in which they come.

    The bucket holds nothing in store: after a pause the next bytes pass at once, and whatever follows waits until they are paid for. So in
    any interval no more passes than its share and the last request.

    Args:
        bytes_per_sec: the rate.
        clock: seconds, monotonic.
        sleep: waits for some seconds.

    Thread-safety: :meth:`take` may be called from any number of threads, which share the rate.
    """

    def __init__(
        self, bytes_per_sec: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._bytes_per_sec = bytes_per_sec
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._paid_until = clock()

    def take(self, num_bytes: int) -> None:
        """Wait until these bytes may pass."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._paid_until)
            self._paid_until = begin + num_bytes / self._bytes_per_sec
        if begin > now:
            self._sleep(begin - now)


class CappedFile:
    """A ``WriteFile`` whose bytes pass through a bucket first. Thread-safety: that of the file."""

    def __init__(self, file: WriteFile, bucket: TokenBucket) -> None:
        self._file = file
        self._bucket = bucket

    @property
    def position(self) -> int:
        """See ``WriteFile``, as for all that follows."""
        return self._file.position

    def write_at(self, position: int, parts: Sequence[Buffer]) -> None:
        self._bucket.take(_num_bytes(parts))
        self._file.write_at(position, parts)

    def write_pieces(self, position: int, part: Buffer, seen: Callable[[memoryview], object]) -> None:
        self._bucket.take(_num_bytes([part]))
        self._file.write_pieces(position, part, seen)

    def write(self, parts: Sequence[Buffer]) -> None:
        self._bucket.take(_num_bytes(parts))
        self._file.write(parts)

    def settle(self, start: int, num_bytes: int) -> bool:
        return self._file.settle(start, num_bytes)

    def commit(self) -> None:
        self._file.commit()

    def abort(self) -> None:
        self._file.abort()


def _num_bytes(parts: Sequence[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def capped(
    create: Callable[[str], WriteFile], max_bytes_per_sec: float | None, sleep: Callable[[float], object] = time.sleep
) -> Callable[[str], WriteFile]:
    """What makes new files, under one cap for all that it makes; ``None``: as it is. ``sleep`` waits for some seconds."""
    if max_bytes_per_sec is None:
        return create
    bucket = TokenBucket(max_bytes_per_sec, sleep=sleep)
    return lambda name: CappedFile(create(name), bucket)
