"""Writes one shard file: blocks are encoded and digested by a pool while those before them are written, in order."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dcp_engine.errors import PlanError
from dcp_engine.storage.codecs import RAW, EncodedBlock, Scratch, encode_block
from dcp_engine.storage.digest import block_digest
from dcp_engine.storage.envelope import FOOTER_MAGIC, header_bytes, pack_record
from dcp_engine.storage.footer import Footer, encode_footer
from dcp_engine.storage.limits import ALIGN_BYTES, BLOCK_BYTES, PACK_BYTES
from dcp_engine.storage.records import ChunkSource, PipelineOptions, ShardReceipt
from dcp_engine.storage.table import TableBuilder
from dcp_engine.storage.workers import WorkerPool, settled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_engine.storage.backends.base import Buffer, WriteFile
    from dcp_engine.storage.dtypes import DtypeInfo

__all__ = ["write_shard"]

_ZEROS = memoryview(bytes(ALIGN_BYTES))


class _Shared:
    """The bytes of a chunk of several blocks: loaded by the first worker that needs them, dropped after the last block is written."""

    __slots__ = ("_array", "_lock", "source")

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._array: NDArray[np.uint8] | None = None

    def get(self) -> memoryview:
        # Whoever waits here waits for a worker that runs, never for one that is queued.
        with self._lock:
            if self._array is None:
                self._array = _loaded(self.source)
            return self._array.data

    def drop(self) -> None:
        self._array = None


@dataclass(frozen=True, slots=True)
class _Block:
    """One block to be: some small chunks in a row, one chunk, or a part of one.

    Attributes:
        sources: chunks that begin in this block, in order.
        dtype: element type of everything in it.
        raw_bytes: length of the block.
        shared: set where the chunk has several blocks.
        start: first byte of this block within the shared chunk.
        is_last: no later block belongs to the shared chunk.
    """

    sources: Sequence[ChunkSource]
    dtype: DtypeInfo
    raw_bytes: int
    shared: _Shared | None = None
    start: int = 0
    is_last: bool = True

    def load(self) -> memoryview:
        if self.shared is not None:
            return self.shared.get()[self.start : self.start + self.raw_bytes]
        if len(self.sources) == 1:
            return _loaded(self.sources[0]).data
        return memoryview(b"".join([_loaded(source).data for source in self.sources]))


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Blocks of one task, ready to be written. ``scratch`` holds some of their bytes and goes back to the pool afterwards."""

    blocks: list[tuple[EncodedBlock, int]]
    scratch: Scratch | None


def write_shard(
    file: WriteFile,
    *,
    name: str,
    component: str,
    rank: int,
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
        world_size: number of ranks that write the checkpoint.
        nonce: hex nonce of the attempt.
        sources: the chunks. One of zero bytes makes its entry known, and stores nothing.
        options: ``codec``, ``level`` and ``bytes_in_flight`` are used.
        pool: does encoding and digests; the calling thread writes.

    Returns:
        What the coordinator needs to know about the file.

    Raises:
        PlanError: a source delivered another number of bytes than it announced.
        StorageError: of the file.
        BaseException: whatever a source's ``load`` raised. After any error no worker touches the sources any more, and the pool is usable.

    Thread-safety: several calls may share a pool.
    """
    file.write([header_bytes(name, rank, nonce)])
    writer = _BlockWriter(file, options, pool)
    writer.write_all(_batches(_blocks(sources), max(PACK_BYTES, min(BLOCK_BYTES, options.bytes_in_flight // 4))))
    for source in sources:
        if not source.nbytes:
            # It has no chunk, but whoever rebuilds a lost manifest from the footers must know that the entry exists.
            writer.table.add_entry(source.name, source.dtype.code, source.shape)
    footer = encode_footer(Footer(nonce, component, rank, world_size, writer.table.build()))
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
    )


class _BlockWriter:
    """Keeps the workers busy and the bytes in flight bounded, and writes finished blocks in order."""

    def __init__(self, file: WriteFile, options: PipelineOptions, pool: WorkerPool) -> None:
        self._file = file
        self._options = options
        self._pool = pool
        # Enough to keep every worker busy while the gathered write of the half before it runs.
        self._depth = 2 * pool.threads + 2
        self._bytes_in_flight = 0
        self._batches: deque[list[_Block]] = deque()
        self._futures: deque[Future[_Encoded]] = deque()
        self.table = TableBuilder()
        self.raw_bytes = 0
        self.stored_bytes = 0

    def write_all(self, batches: Iterable[list[_Block]]) -> None:
        try:
            with settled(self._futures):
                for batch in batches:
                    cost = sum(map(self._cost, batch))
                    while self._futures and not self._has_room(cost):
                        self._write_finished()
                    self._bytes_in_flight += cost
                    self._batches.append(batch)
                    self._futures.append(self._pool.submit(partial(_encode, batch, self._options, self._pool)))
                while self._futures:
                    self._write_finished()
        finally:
            # The traceback of an error holds this object: it must not hold the caller's tensors.
            self._batches.clear()
            self._futures.clear()

    def _has_room(self, cost: int) -> bool:
        return len(self._futures) < self._depth and self._bytes_in_flight + cost <= self._options.bytes_in_flight

    def _write_finished(self) -> None:
        """Wait for the oldest task, then write it together with those after it that are finished, too."""
        group = [(self._batches[0], self._futures[0].result())]
        while len(group) < min(len(self._futures), self._depth // 2) and self._futures[len(group)].done():
            group.append((self._batches[len(group)], self._futures[len(group)].result()))
        parts: list[Buffer] = []
        for _, encoded in group:
            for block, _ in encoded.blocks:
                parts += block.parts
                if padding := -block.stored_bytes % ALIGN_BYTES:
                    parts.append(_ZEROS[:padding])
        self._file.write(parts)
        parts.clear()
        for batch, encoded in group:
            self._record(batch, encoded)
            self._batches.popleft()
            self._futures.popleft()

    def _record(self, batch: list[_Block], encoded: _Encoded) -> None:
        for block, (stored, digest) in zip(batch, encoded.blocks, strict=True):
            index = self.table.add_block(block.raw_bytes, stored.stored_bytes, stored.codec, digest)
            offset = 0
            for source in block.sources:
                self.table.add_chunk(source.name, source.dtype.code, source.shape, source.offsets, source.sizes, index, offset)
                offset += source.nbytes
            self.raw_bytes += block.raw_bytes
            self.stored_bytes += stored.stored_bytes
            self._bytes_in_flight -= self._refund(block)
            if block.shared is not None and block.is_last:
                block.shared.drop()
        if encoded.scratch is not None:
            self._pool.return_scratch(encoded.scratch)

    def _cost(self, block: _Block) -> int:
        """Bytes to reserve when a block is started: a chunk is loaded as a whole with its first block."""
        encoded = 0 if self._options.codec == "raw" else block.raw_bytes
        if block.shared is None:
            return block.raw_bytes + encoded
        return encoded + (self._loaded_bytes(block.shared) if block.start == 0 else 0)

    def _refund(self, block: _Block) -> int:
        """Bytes to free when a block is written: a chunk is held until its last block is."""
        encoded = 0 if self._options.codec == "raw" else block.raw_bytes
        if block.shared is None:
            return block.raw_bytes + encoded
        return encoded + (self._loaded_bytes(block.shared) if block.is_last else 0)

    def _loaded_bytes(self, shared: _Shared) -> int:
        # The whole bound for one huge chunk would leave no room for its own encoded blocks, and the workers would take turns.
        return min(shared.source.nbytes, self._options.bytes_in_flight // 2)


def _blocks(sources: Sequence[ChunkSource]) -> Iterator[_Block]:
    """Cut chunks into blocks, in the order of the file."""
    small: dict[int, list[ChunkSource]] = {}
    for source in sources:
        nbytes = source.nbytes
        if nbytes >= PACK_BYTES:
            yield from _blocks_of_chunk(source)
        elif nbytes:
            small.setdefault(source.dtype.code, []).append(source)
    for group in small.values():
        first = 0
        total = 0
        for index, source in enumerate(group):
            if total + source.nbytes > BLOCK_BYTES:
                yield _Block(group[first:index], source.dtype, total)
                first, total = index, 0
            total += source.nbytes
        yield _Block(group[first:], source.dtype, total)


def _blocks_of_chunk(source: ChunkSource) -> Iterator[_Block]:
    if source.nbytes <= BLOCK_BYTES:
        yield _Block((source,), source.dtype, source.nbytes)
        return
    shared = _Shared(source)
    for start in range(0, source.nbytes, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, source.nbytes)
        yield _Block((source,) if start == 0 else (), source.dtype, stop - start, shared, start, stop == source.nbytes)


def _batches(blocks: Iterable[_Block], batch_bytes: int) -> Iterator[list[_Block]]:
    """Group blocks into tasks of about ``batch_bytes``: a task for each of many small blocks would cost more than its work."""
    batch: list[_Block] = []
    total = 0
    for block in blocks:
        if batch and total + block.raw_bytes > batch_bytes:
            yield batch
            batch, total = [], 0
        batch.append(block)
        total += block.raw_bytes
    if batch:
        yield batch


def _loaded(source: ChunkSource) -> NDArray[np.uint8]:
    array = source.load()
    if array.nbytes != source.nbytes:
        raise PlanError(
            "a tensor's data is not as long as planned",
            tensor=source.name,
            expected=f"{source.nbytes} bytes for sizes {source.sizes}",
            found=f"{array.nbytes} bytes",
            remedy="keep the state unchanged while it is being saved",
        )
    return array


def _encode(batch: list[_Block], options: PipelineOptions, pool: WorkerPool) -> _Encoded:
    """Runs in a worker. The scratch is leased until the blocks are written, so that encoded bytes need not be copied out of it."""
    scratch = pool.lease_scratch()
    blocks: list[tuple[EncodedBlock, int]] = []
    held = False
    for index, block in enumerate(batch):
        encoded = encode_block(block.load(), block.dtype, options.codec, options.level, scratch)
        if encoded.codec != RAW:
            if index + 1 < len(batch):
                copy = memoryview(b"".join(encoded.parts))
                encoded = EncodedBlock(encoded.codec, (copy,), encoded.stored_bytes)
            else:
                held = True
        blocks.append((encoded, block_digest(*encoded.parts)))
    if held:
        return _Encoded(blocks, scratch)
    pool.return_scratch(scratch)
    return _Encoded(blocks, None)
