"""Writes all shard files of one rank: several at once, since a file system lets one thread at a time write to a file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from dcp_engine.storage.backends import Directory, WriteFile
from dcp_engine.storage.envelope import shard_name
from dcp_engine.storage.limits import BLOCK_BYTES, PACK_BYTES
from dcp_engine.storage.records import ChunkSource, PipelineOptions, ShardReceipt
from dcp_engine.storage.workers import WorkerPool, settled
from dcp_engine.storage.write_pipeline import write_shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Writer", "stripes_of", "write_shards"]

MAX_STRIPES: Final = 4
"""Files into which one rank puts one component, at most: every file costs whoever opens, lists or copies the checkpoint."""
STRIPE_BYTES: Final = 32 << 20
"""A component gets a further file for each of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who writes.

    Attributes:
        rank: rank of this process.
        world_size: number of ranks that write the checkpoint.
        nonce: hex nonce of the attempt.
    """

    rank: int
    world_size: int
    nonce: str


def stripes_of(sources: Sequence[ChunkSource], num_threads: int) -> list[list[ChunkSource]]:
    """Share the chunks of a component among files, about equally by bytes, in the given order within each.

    Args:
        sources: the chunks, not all of them empty.
        num_threads: threads that will write.

    Returns:
        The chunks of each file, none of which is without bytes. One file, where there are few bytes or one thread.
    """
    total = sum(source.nbytes for source in sources)
    num_stripes = max(1, min(MAX_STRIPES, num_threads, total // STRIPE_BYTES))
    stripes: list[list[ChunkSource]] = [[] for _ in range(num_stripes)]
    filled = [0] * num_stripes
    for source in sources:
        emptiest = filled.index(min(filled)) if source.nbytes else 0
        stripes[emptiest].append(source)
        filled[emptiest] += source.nbytes
    return [stripe for stripe, nbytes in zip(stripes, filled, strict=True) if nbytes]


def write_shards(
    directory: Directory, by_component: Mapping[str, Sequence[ChunkSource]], writer: Writer, options: PipelineOptions
) -> list[ShardReceipt]:
    """Write and commit this rank's files.

    Components come one after the other, the stripes of each at once. Raw bytes are moved by as many threads as there are stripes, each with
    a file of its own: two that write to one file take turns in the kernel. So with "auto", which may leave them raw. Compression, where it
    is asked for, goes into one file, whose blocks are encoded by all.

    Args:
        directory: of the attempt.
        by_component: component -> its chunks. One without bytes gets no file.
        writer: who writes.
        options: of the pipelines; the bound on memory holds for all files together.

    Returns:
        A receipt for each file.

    Raises:
        DcpEngineError: see :func:`write_shard`. A file that failed is removed, those that were whole by then are left; no worker touches
            the sources any more.
    """
    receipts: list[ShardReceipt] = []
    # fsync of one file runs beside the writing of the next: it is a third of a save to disk when it comes after. An error later on cancels
    # none: a file that is not committed would stay open.
    with WorkerPool(MAX_STRIPES) as syncing:
        commits: list[Future[None]] = []
        for component, sources in sorted(by_component.items()):
            if not any(source.nbytes for source in sources):
                continue  # tensors without elements are in the manifest alone: no load would check a file without blocks
            # Each file's pipeline needs room for a block.
            most = min(options.threads, options.bytes_in_flight // BLOCK_BYTES) if options.codec in ("raw", "auto") else 1
            stripes = stripes_of(sources, most)
            shares = replace(options, threads=-(-options.threads // len(stripes)), bytes_in_flight=options.bytes_in_flight // len(stripes))
            tasks = [partial(_write_file, directory, (component, index), stripe, writer, shares) for index, stripe in enumerate(stripes)]
            for receipt, file in _at_once(tasks):
                receipts.append(receipt)
                commits.append(syncing.submit(partial(_commit, file)))
        for future in commits:
            future.result()
    return receipts


_Written = tuple[ShardReceipt, WriteFile]


class _StoppedError(Exception):
    """A file is not wanted any more, since another one failed. Never leaves this module."""


def _at_once(tasks: Sequence[Callable[[threading.Event], _Written]]) -> list[_Written]:
    """Results of tasks that run at once; after the first error the others are told to stop, all end, and their files are removed."""
    stop = threading.Event()
    if len(tasks) == 1:
        return [tasks[0](stop)]
    with WorkerPool(len(tasks)) as pool:
        futures: list[Future[_Written]] = []
        try:
            with settled(futures, stop.set):
                for task in tasks:  # one by one, so that an interrupt finds those that have begun
                    futures.append(pool.submit(partial(_or_stop, task, stop)))
                wait(futures)
                # One that was stopped does not say why.
                return [future.result() for future in sorted(futures, key=_was_stopped)]
        except BaseException:
            for future in futures:
                if not future.cancelled() and future.exception() is None:
                    future.result()[1].abort()
            futures.clear()
            raise


def _or_stop(task: Callable[[threading.Event], _Written], stop: threading.Event) -> _Written:
    try:
        return task(stop)
    except BaseException:
        stop.set()
        raise


def _was_stopped(future: Future[_Written]) -> bool:
    return isinstance(future.exception(), _StoppedError)


def _write_file(
    directory: Directory,
    place: tuple[str, int],
    sources: list[ChunkSource],
    writer: Writer,
    options: PipelineOptions,
    stop: threading.Event,
) -> _Written:
    component, stripe = place
    name = shard_name(component, writer.rank, stripe)
    file = directory.create(name)
    try:
        with WorkerPool(options.threads) as pool:
            receipt = write_shard(
                file,
                name=name,
                component=component,
                rank=writer.rank,
                stripe=stripe,
                world_size=writer.world_size,
                nonce=writer.nonce,
                sources=_until(stop, sources),
                options=options,
                pool=pool,
            )
    except BaseException:
        file.abort()
        raise
    return receipt, file


def _until(stop: threading.Event, sources: Sequence[ChunkSource]) -> list[ChunkSource]:
    """Sources that give no more bytes once ``stop`` is set. Small ones need not be asked: a few blocks hold them all."""

    def load(source: ChunkSource) -> NDArray[np.uint8]:
        if stop.is_set():
            raise _StoppedError
        return source.load()

    return [replace(source, load=partial(load, source)) if source.nbytes >= PACK_BYTES else source for source in sources]


def _commit(file: WriteFile) -> None:
    try:
        file.commit()
    except BaseException:
        file.abort()
        raise
