"""Measures, for ``codec="auto"``, how fast a save encodes, copies and stores, while it does."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from dcp_engine.storage.codec_choice import Figures, compression_pays, is_over_target
from dcp_engine.storage.limits import HEADER_BYTES
from dcp_engine.storage.workers import WorkerPool

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import WriteFile

__all__ = ["CodecGauge", "Work"]

_SETTLE_BYTES: Final = 8 << 20
# Faster than any storage: such bytes stayed in memory.
_MEMORY_BYTES_PER_SEC: Final = 100e9


@dataclass(slots=True)
class Work:
    """What a worker did for one batch.

    Attributes:
        raw_bytes, stored_bytes, encode_secs: of the blocks that it encoded; zero where it left them raw.
        written_bytes, write_secs: of what it handed to the file, which digests what is left raw.
    """

    raw_bytes: int = 0
    stored_bytes: int = 0
    encode_secs: float = 0.0
    written_bytes: int = 0
    write_secs: float = 0.0


class CodecGauge:
    """Collects figures about one save of this rank, and says whether to compress what comes next. Not thread-safe, but for its own thread.

    Args:
        num_threads: workers that write.
        size_target: share of the raw bytes that the files may have before blocks are compressed whatever it takes; ``None``: no matter.
    """

    def __init__(self, num_threads: int, size_target: float | None) -> None:
        self._num_threads = num_threads
        self._size_target = size_target
        self._work = Work()
        self._all_raw_bytes = self._all_stored_bytes = 0
        # File -> up to where it was asked to settle.
        self._settled: dict[WriteFile, int] = {}
        self._asked = 0
        self._settled_bytes = 0
        self._settled_secs = 0.0
        self._settling: Future[float | None] | None = None
        self._is_visible = True
        self._thread = WorkerPool(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.close()

    def compresses(self) -> bool:
        """Whether the next blocks are to be compressed."""
        self._look()
        return is_over_target(self._size_target, self._all_raw_bytes, self._all_stored_bytes) or compression_pays(self.figures())

    def figures(self) -> Figures:
        """What is known by now."""
        work = self._work
        rate = 0.0
        if self._settled_bytes:
            rate = self._settled_bytes / max(self._settled_secs, 1e-9)
            rate = float("inf") if rate > _MEMORY_BYTES_PER_SEC else rate
        return Figures(
            num_threads=self._num_threads,
            encode_bytes_per_sec=work.raw_bytes / work.encode_secs if work.encode_secs else 0.0,
            stored_share=work.stored_bytes / work.raw_bytes if work.raw_bytes else 1.0,
            copy_bytes_per_sec=work.written_bytes / work.write_secs if work.write_secs else 0.0,
            storage_bytes_per_sec=rate,
        )

    def add(self, work: Work, raw_bytes: int, stored_bytes: int, file: WriteFile, position: int) -> None:
        """Take in a finished batch.

        Args:
            work: what its worker did.
            raw_bytes: of its blocks.
            stored_bytes: of its blocks.
            file: which holds them.
            position: where they end in the file, which is written up to there.
        """
        total = self._work
        total.raw_bytes += work.raw_bytes
        total.stored_bytes += work.stored_bytes
        total.encode_secs += work.encode_secs
        total.written_bytes += work.written_bytes
        total.write_secs += work.write_secs
        self._all_raw_bytes += raw_bytes
        self._all_stored_bytes += stored_bytes
        self._look()
        start = self._settled.setdefault(file, HEADER_BYTES)
        # Never two measurements at once, which would share the storage.
        if self._settling is None and self._is_visible and position - start >= _SETTLE_BYTES:
            self._settled[file] = position
            self._asked = position - start
            self._settling = self._thread.submit(partial(_settle, file, start, self._asked))

    def _look(self) -> None:
        """Note a measurement that has ended."""
        if self._settling is None or not self._settling.done():
            return
        secs = self._settling.result()
        self._settling = None
        if secs is not None:
            self._settled_bytes += self._asked
            self._settled_secs += secs
        elif not self._settled_bytes:
            self._is_visible = False  # else it was only too late: that file was closed


def _settle(file: WriteFile, start: int, num_bytes: int) -> float | None:
    begin = time.perf_counter()
    return time.perf_counter() - begin if file.settle(start, num_bytes) else None
