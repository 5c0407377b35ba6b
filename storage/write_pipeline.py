"""Writes shard files by a pool of workers: each keeps to a file of its own as long as there are enough, and helps with another one then."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp_engine.garbage import without_gc
from dcp_engine.storage.codec_gauge import CodecGauge
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.records import PipelineOptions, ShardReceipt
from dcp_engine.storage.shard_write import ShardSpec, ShardWrite
from dcp_engine.storage.workers import WorkerPool, settled
from dcp_engine.storage.write_batch import Batch

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import WriteFile

__all__ = ["write_files"]

_QUICK_BYTES = 64 * BLOCK_BYTES


def write_files(
    specs: Sequence[ShardSpec],
    create: Callable[[str], WriteFile],
    options: PipelineOptions,
    *,
    pool: WorkerPool,
    written: Callable[[WriteFile], None],
) -> list[ShardReceipt]:
    """Write whole shard files: header, blocks, footer. They are not committed here.

    Large files are begun first, as many at once as there are workers; whoever finds none to begin helps with the one that has most left.
    So all end at about the same time, and a component of one file is written by all workers.

    Args:
        specs: the files.
        create: makes the new, empty file of a name.
        options: ``codec``, ``level``, ``bytes_in_flight`` (of all files together) and ``size_target`` are used.
        pool: does all the work.
        written: takes each file once it is whole, from any thread; it is the receiver's from then on.

    Returns:
        What the coordinator needs to know about each file, in the order of ``specs``.

    Raises:
        PlanError: a source delivered another number of bytes than it announced.
        StorageError: of a file.
        BaseException: whatever a source's ``load`` or ``written`` raised. After any error no worker touches the sources any more, the files
            that were not whole by then are removed, and the pool is usable.

    Thread-safety: several calls may share a pool.
    """
    # Each file in work needs room for a block.
    most = max(1, min(len(specs), pool.threads, options.bytes_in_flight // BLOCK_BYTES))
    shares = replace(options, bytes_in_flight=options.bytes_in_flight // most)
    with CodecGauge(pool.threads, options.size_target) if options.codec == "auto" else nullcontext() as gauge:
        shards = [ShardWrite(spec, create, shares, pool, gauge) for spec in specs]
        schedule = _Schedule(shards, most, written)
        # Records of many small chunks would set off collections of all that a process holds. A long write leaves the collector alone.
        with without_gc() if sum(shard.bytes_left for shard in shards) <= _QUICK_BYTES else nullcontext():
            schedule.run(pool)
    return [schedule.receipts[shard] for shard in shards]


class _Schedule:
    """Decides who writes what next.

    Args:
        shards: the files.
        most: how many may be in work at once.
        written: takes each file once it is whole.

    Attributes:
        receipts: of the files that are whole.
    """

    def __init__(self, shards: Iterable[ShardWrite], most: int, written: Callable[[WriteFile], None]) -> None:
        self._waiting = deque(sorted(shards, key=lambda shard: shard.bytes_left, reverse=True))
        self._in_work: list[ShardWrite] = []
        self._most = most
        self._written = written
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self.receipts: dict[ShardWrite, ShardReceipt] = {}

    def run(self, pool: WorkerPool) -> None:
        """Write all, and return when no worker is at it any more; raises the first error."""
        loops: list[Future[None]] = []
        try:
            with settled(loops, self._stop):
                for _ in range(pool.threads):  # one by one, so that an interrupt finds those that have begun
                    loops.append(pool.submit(self._work))
                wait(loops)
            if self._error is not None:
                raise self._error
        except BaseException:
            for shard in self._in_work:
                shard.abort()
            raise
        finally:
            # A future that holds the error, held by a frame that the error's traceback holds, would keep the caller's tensors alive.
            loops.clear()
            self._in_work.clear()
            self._waiting.clear()
            self._error = None

    def _work(self) -> None:
        shard: ShardWrite | None = None
        try:
            while (found := self._next(shard)) is not None:
                shard, batch = found
                shard.write(batch)
                with self._changed:
                    is_whole = shard.put_back(batch)
                    self._changed.notify_all()
                if is_whole:
                    self._finish(shard)
        except BaseException as error:  # noqa: BLE001 - raised by ``run``, once all workers have ended
            self._stop(error)

    def _next(self, last: ShardWrite | None) -> tuple[ShardWrite, Batch] | None:
        """What a worker that comes from ``last`` does now, waited for where all files are full; ``None`` where nothing is left."""
        with self._changed:
            if last is not None:
                last.num_workers -= 1
            while not self._stopped and (self._waiting or any(shard.has_more for shard in self._in_work)):
                shard = self._choose(last)
                if shard is not None:
                    shard.num_workers += 1
                    return shard, shard.take()
                self._changed.wait()
        return None

    def _choose(self, last: ShardWrite | None) -> ShardWrite | None:
        if last is not None and last.has_room:
            return last
        if self._waiting and len(self._in_work) < self._most:
            self._in_work.append(self._waiting.popleft())
            return self._in_work[-1]
        ready = [shard for shard in self._in_work if shard.has_room]
        return min(ready, key=lambda shard: (shard.num_workers, -shard.bytes_left), default=None)

    def _finish(self, shard: ShardWrite) -> None:
        receipt, file = shard.finish()
        with self._changed:
            self._in_work.remove(shard)
            self._changed.notify_all()
            self.receipts[shard] = receipt
        self._written(file)

    def _stop(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._stopped = True
            if self._error is None:
                self._error = error
            self._changed.notify_all()
