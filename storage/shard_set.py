"""Writes all shard files of one rank: several at once, since a file system lets one thread at a time write to a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from dcp_engine.storage.backends import Directory, WriteFile
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.records import ChunkSource, PipelineOptions, ShardReceipt
from dcp_engine.storage.workers import WorkerPool, settled
from dcp_engine.storage.write_pipeline import write_shard

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


def stripes_of(component: str, sources: Sequence[ChunkSource], num_threads: int) -> dict[str, list[ChunkSource]]:
    """Share the chunks of a component among files, about equally by bytes, in the given order within each.

    Args:
        component: the first file's component; further ones are ``<component>__1`` and so on.
        sources: the chunks.
        num_threads: threads that will write.

    Returns:
        Component of each file -> its chunks. One file, where there are few bytes or one thread.
    """
    total = sum(source.nbytes for source in sources)
    names = [component]
    while len(names) < min(MAX_STRIPES, num_threads, total // STRIPE_BYTES):
        names.append(f"{component}__{len(names)}")
    if len(names[-1]) > 32:
        names = [component]  # the format's limit
    stripes: list[list[ChunkSource]] = [[] for _ in names]
    filled = [0] * len(names)
    for source in sources:
        emptiest = filled.index(min(filled))
        stripes[emptiest].append(source)
        filled[emptiest] += source.nbytes
    return {name: stripe for name, stripe in zip(names, stripes, strict=True) if stripe}


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
            stripes = stripes_of(component, sources, options.threads if options.codec in ("raw", "auto") else 1)
            shares = replace(options, threads=-(-options.threads // len(stripes)), bytes_in_flight=_share(options, len(stripes)))
            tasks = [partial(_write_file, directory, name, stripe, writer, shares) for name, stripe in stripes.items()]
            for receipt, file in _at_once(tasks):
                receipts.append(receipt)
                commits.append(syncing.submit(partial(_commit, file)))
        for future in commits:
            future.result()
    return receipts


def _share(options: PipelineOptions, num_stripes: int) -> int:
    return max(BLOCK_BYTES, options.bytes_in_flight // num_stripes)


_Written = tuple[ShardReceipt, WriteFile]


def _at_once(tasks: Sequence[Callable[[], _Written]]) -> list[_Written]:
    """Results of tasks that run at once; after the first error the files of the others are removed, too, and all have ended."""
    if len(tasks) == 1:
        return [tasks[0]()]
    with WorkerPool(len(tasks)) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            with settled(futures):
                return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                if not future.cancelled() and future.exception() is None:
                    future.result()[1].abort()
            futures.clear()
            raise


def _write_file(directory: Directory, component: str, sources: list[ChunkSource], writer: Writer, options: PipelineOptions) -> _Written:
    name = f"{component}-{writer.rank:05d}.shard"
    file = directory.create(name)
    try:
        with WorkerPool(options.threads) as pool:
            receipt = write_shard(
                file,
                name=name,
                component=component,
                rank=writer.rank,
                world_size=writer.world_size,
                nonce=writer.nonce,
                sources=sources,
                options=options,
                pool=pool,
            )
    except BaseException:
        file.abort()
        raise
    return receipt, file


def _commit(file: WriteFile) -> None:
    try:
        file.commit()
    except BaseException:
        file.abort()
        raise
