"""Shares the chunks of one rank among shard files, since a file system lets one thread at a time write to a file, and commits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from dcp_engine.storage.backends import Directory, WriteFile
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.records import PipelineOptions, ShardReceipt, Source
from dcp_engine.storage.shard_write import ShardSpec
from dcp_engine.storage.throttle import capped
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.storage.write_pipeline import write_files
from dcp_engine.storage.write_watch import WriteWatch, watched

__all__ = ["Writer", "stripes_of", "write_shards"]

MAX_STRIPES: Final = 4
"""Files into which one rank puts one component, at most: every file costs whoever opens, lists or copies the checkpoint."""
STRIPE_BYTES: Final = 32 << 20
"""A component gets a further file for each of these."""
_SYNCING_THREADS: Final = 4


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


def stripes_of(sources: Sequence[Source], num_threads: int) -> list[list[Source]]:
    """Share the chunks of a component among files, about equally by bytes, in the given order within each.

    Args:
        sources: the chunks, not all of them empty.
        num_threads: threads that will write.

    Returns:
        The chunks of each file, none of which is without bytes. One file, where there are few bytes or one thread.
    """
    total = sum(source.nbytes for source in sources)
    num_stripes = max(1, min(MAX_STRIPES, num_threads, total // STRIPE_BYTES))
    stripes: list[list[Source]] = [[] for _ in range(num_stripes)]
    filled = [0] * num_stripes
    for source in sources:
        emptiest = filled.index(min(filled)) if source.nbytes else 0
        stripes[emptiest].append(source)
        filled[emptiest] += source.nbytes
    return [stripe for stripe, nbytes in zip(stripes, filled, strict=True) if nbytes]


def write_shards(
    directory: Directory,
    by_component: Mapping[str, Sequence[Source]],
    writer: Writer,
    options: PipelineOptions,
    watch: WriteWatch | None = None,
) -> list[ShardReceipt]:
    """Write and commit this rank's files.

    Raw bytes are moved into a file for each thread, since two that write to one file take turns in the kernel. So with "auto", which may
    leave them raw. Compression, where it is asked for, goes into one file for each component, whose blocks are encoded by all.

    Args:
        directory: of the attempt.
        by_component: component -> its chunks. One without bytes gets no file.
        writer: who writes.
        options: of the pipelines; the bound on memory holds for all files together.
        watch: sees each write, and may break off.

    Returns:
        A receipt for each file.

    Raises:
        DcpEngineError: see :func:`write_files`. A file that failed is removed, those that were whole by then are left; no worker touches
            the sources any more.
    """
    watch = watch or WriteWatch()
    specs = []
    for component, sources in sorted(by_component.items()):
        if not any(source.nbytes for source in sources):
            continue  # tensors without elements are in the manifest alone: no load would check a file without blocks
        # Each file in work needs room for a block.
        most = min(options.threads, options.bytes_in_flight // BLOCK_BYTES) if options.codec in ("raw", "auto") else 1
        specs += [_spec(component, index, stripe, writer) for index, stripe in enumerate(stripes_of(sources, most))]
    if not specs:
        return []
    # fsync of one file runs beside the writing of the next: it is a third of a save to disk when it comes after. An error later on cancels
    # none: a file that is not committed would stay open.
    with WorkerPool(min(_SYNCING_THREADS, len(specs))) as syncing, WorkerPool(options.threads) as pool:
        commits: list[Future[None]] = []
        create = capped(watched(directory.create, watch), options.max_bytes_per_sec, watch.sleep)
        receipts = write_files(
            specs, create, options, pool=pool, written=lambda file: commits.append(syncing.submit(partial(_commit, file)))
        )
        for future in commits:
            future.result()
    return receipts


def _spec(component: str, stripe: int, sources: Sequence[Source], writer: Writer) -> ShardSpec:
    return ShardSpec(
        component=component,
        rank=writer.rank,
        stripe=stripe,
        world_size=writer.world_size,
        nonce=writer.nonce,
        sources=sources,
    )


def _commit(file: WriteFile) -> None:
    try:
        file.commit()
    except BaseException:
        file.abort()
        raise
