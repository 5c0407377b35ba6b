"""Writes one shard file: a pool of workers encodes, digests and writes blocks, each at its place in the file."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from dcp_engine.garbage import without_gc
from dcp_engine.storage.codec_gauge import CodecGauge
from dcp_engine.storage.codecs import NAMES
from dcp_engine.storage.envelope import FOOTER_MAGIC, header_bytes, pack_record
from dcp_engine.storage.footer import Footer, encode_footer
from dcp_engine.storage.limits import BLOCK_BYTES, PACK_BYTES
from dcp_engine.storage.records import ChunkSource, PipelineOptions, ShardReceipt
from dcp_engine.storage.table import TableBuilder
from dcp_engine.storage.workers import WorkerPool, settled
from dcp_engine.storage.write_batch import Batch, Places, write_encoded, write_raw
from dcp_engine.storage.write_blocks import Block, batches_of, blocks_of

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import WriteFile

__all__ = ["write_shard"]

_QUICK_BYTES = 64 * BLOCK_BYTES


def write_shard(
    file: WriteFile,
    *,
    name: str,
    component: str,
    rank: int,
    stripe: int = 0,
    world_size: int,
    nonce: str,
    sources: Sequence[ChunkSource],
    options: PipelineOptions,
    pool: WorkerPool,
) -> ShardReceipt:
    """Write one whole shard file: header, blocks, footer. The file is neither committed nor aborted here.

    Chunks of ``PACK_BYTES`` and more come first, in the given order; smaller ones follow, grouped by dtype, many to a block.

    Args:
        file: a new, empty file.
        name: its name in the checkpoint, as the header and the footer repeat it.
        component: what the file holds.
        rank: rank of this process.
        stripe: which of the rank's files of the component this is.
        world_size: number of ranks that write the checkpoint.
        nonce: hex nonce of the attempt.
        sources: the chunks. One of zero bytes makes its entry known, and stores nothing.
        options: ``codec``, ``level`` and ``bytes_in_flight`` are used.
        pool: does all the work; the calling thread hands it out.

    Returns:
        What the coordinator needs to know about the file.

    Raises:
        PlanError: a source delivered another number of bytes than it announced.
        StorageError: of the file.
        BaseException: whatever a source's ``load`` raised. After any error no worker touches the sources any more, and the pool is usable.

    Thread-safety: several calls may share a pool.
    """
    header = header_bytes(name, rank, nonce)
    file.write([header])
    batches = batches_of(blocks_of(sources), max(PACK_BYTES, min(BLOCK_BYTES, options.bytes_in_flight // 4)))
    with CodecGauge(file, len(header), pool.threads, options.size_target) if options.codec == "auto" else nullcontext() as gauge:
        writer = _BlockWriter(file, len(header), options, pool, gauge)
        # Records of many small chunks would set off collections of all that a process holds. A long write leaves the collector alone.
        with without_gc() if sum(source.nbytes for source in sources) <= _QUICK_BYTES else nullcontext():
            writer.write_all(batches)
    for source in sources:
        if not source.nbytes:
            # It has no chunk, but whoever rebuilds a lost manifest from the footers must know that the entry exists.
            writer.table.add_entry(source.name, source.dtype.code, source.shape)
    footer = encode_footer(Footer(nonce, component, rank, world_size, writer.table.build(), stripe))
    record, body = pack_record(FOOTER_MAGIC, footer)
    file.write([body, record])
    return ShardReceipt(
        name=name,
        component=component,
        rank=rank,
        nonce=nonce,
        size_bytes=file.position,
        footer=footer,
        footer_sha256=hashlib.sha256(body).digest(),
        raw_bytes=writer.raw_bytes,
        stored_bytes=writer.stored_bytes,
        raw_bytes_by_codec=dict(writer.raw_bytes_by_codec),
        stripe=stripe,
    )


class _BlockWriter:
    """Keeps the workers busy and the bytes in flight bounded, and records what was written, in order."""

    def __init__(self, file: WriteFile, position: int, options: PipelineOptions, pool: WorkerPool, gauge: CodecGauge | None) -> None:
        self._file = file
        self._options = options
        self._pool = pool
        self._places = Places(position)
        self._gauge = gauge
        # Enough to keep every worker busy while one of them writes what others have left to it.
        self._depth = 2 * pool.threads + 2
        self._bytes_in_flight = 0
        self._futures: deque[Future[Batch]] = deque()
        self.table = TableBuilder()
        self.raw_bytes = 0
        self.stored_bytes = 0
        self.raw_bytes_by_codec: Counter[str] = Counter()

    def write_all(self, batches: Iterable[list[Block]]) -> None:
        try:
            with settled(self._futures):
                for index, blocks in enumerate(batches):
                    cost = sum(map(self._cost, blocks))
                    while self._futures and not self._has_room(cost):
                        self._collect()
                    self._bytes_in_flight += cost
                    self._futures.append(self._pool.submit(self._task(Batch(index, blocks))))
                while self._futures:
                    self._collect()
        finally:
            # The traceback of an error holds this object: it must not hold the caller's tensors.
            self._futures.clear()
            self._places.clear()

    def _task(self, batch: Batch) -> partial[Batch]:
        if self._options.codec == "raw":
            # Its length is known now, so that those after it need not wait to hear where they begin.
            self._places.announce(batch, batch.raw_extent())
            return partial(write_raw, batch, self._file, self._places)
        if self._gauge is not None:
            batch.compress = self._gauge.compresses()
        return partial(write_encoded, batch, self._file, self._places, self._options, self._pool)

    def _has_room(self, cost: int) -> bool:
        return len(self._futures) < self._depth and self._bytes_in_flight + cost <= self._options.bytes_in_flight

    def _collect(self) -> None:
        """Wait for the oldest task. It is written then: by itself, or by one of those before it, which have all ended."""
        batch = self._futures[0].result()
        self._futures.popleft()
        for block, (stored_bytes, codec, digest) in zip(batch.blocks, batch.stored, strict=True):
            index = self.table.add_block(block.raw_bytes, stored_bytes, codec, digest)
            offset = 0
            for source in block.sources:
                self.table.add_chunk(source.name, source.dtype.code, source.shape, source.offsets, source.sizes, index, offset)
                offset += source.nbytes
            self.raw_bytes += block.raw_bytes
            self.stored_bytes += stored_bytes
            self.raw_bytes_by_codec[NAMES[codec]] += block.raw_bytes
            self._bytes_in_flight -= self._refund(block)
            if block.shared is not None and block.is_last:
                block.shared.drop()
        if self._gauge is not None:
            assert batch.position is not None
            raw_bytes = sum(block.raw_bytes for block in batch.blocks)
            stored_bytes = sum(stored_bytes for stored_bytes, _, _ in batch.stored)
            self._gauge.add(batch.work, raw_bytes, stored_bytes, batch.position + batch.extent())
        if batch.scratch is not None:
            self._pool.return_scratch(batch.scratch)

    def _cost(self, block: Block) -> int:
        """Bytes to reserve when a block is started: a chunk is loaded as a whole with its first block."""
        encoded = 0 if self._options.codec == "raw" else block.raw_bytes
        if block.shared is None:
            return block.raw_bytes + encoded
        return encoded + (self._loaded_bytes(block) if block.start == 0 else 0)

    def _refund(self, block: Block) -> int:
        """Bytes to free when a block is written: a chunk is held until its last block is."""
        encoded = 0 if self._options.codec == "raw" else block.raw_bytes
        if block.shared is None:
            return block.raw_bytes + encoded
        return encoded + (self._loaded_bytes(block) if block.is_last else 0)

    def _loaded_bytes(self, block: Block) -> int:
        assert block.shared is not None
        # The whole bound for one huge chunk would leave no room for its own encoded blocks, and the workers would take turns.
        return min(block.shared.source.nbytes, self._options.bytes_in_flight // 2)
