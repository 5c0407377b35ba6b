"""One shard file on its way to storage: hands out batches of blocks, records what became of them, and ends with the footer."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from dcp_engine.storage.codec_gauge import CodecGauge
from dcp_engine.storage.codecs import NAMES
from dcp_engine.storage.envelope import FOOTER_MAGIC, header_bytes, pack_record, shard_name
from dcp_engine.storage.footer import Footer, encode_footer
from dcp_engine.storage.limits import BLOCK_BYTES, HEADER_BYTES, PACK_BYTES, TAG_BYTES
from dcp_engine.storage.packed_table import PackedTable
from dcp_engine.storage.ranges import grouped_by_size
from dcp_engine.storage.records import ChunkSource, PipelineOptions, ShardReceipt, Source
from dcp_engine.storage.table import TableBuilder
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.storage.write_batch import Batch, Places, write_encoded, write_raw
from dcp_engine.storage.write_blocks import Block, blocks_of

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import WriteFile

__all__ = ["ShardSpec", "ShardWrite"]

_WORKERS_OF_A_RAW_FILE = 2
# Handing out costs the interpreter's cache, too. A batch that is encoded is smaller: its blocks are held until they are written.
_RAW_BATCH_BYTES = 4 * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A shard file to be written.

    Attributes:
        component: what the file holds.
        rank: rank of this process.
        stripe: which of the rank's files of the component it is.
        world_size: number of ranks that write the checkpoint.
        nonce: hex nonce of the attempt.
        sources: the chunks. One of zero bytes makes its entry known, and stores nothing.
    """

    component: str
    rank: int
    world_size: int
    nonce: str
    sources: Sequence[Source]
    stripe: int = 0

    @property
    def name(self) -> str:
        """Of the file; header and footer repeat it."""
        return shard_name(self.component, self.rank, self.stripe)

    @property
    def raw_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(source.nbytes for source in self.sources)


class ShardWrite:
    """A shard file in work.

    Chunks of ``PACK_BYTES`` and more come first, in the given order; smaller ones follow, grouped by dtype, many to a block. Places in the
    file follow from that order and the stored lengths alone, not from who writes when.

    Args:
        spec: what to write.
        create: makes the new, empty file of a name. Called once, with the first batch.
        options: ``codec``, ``level``, ``digest``, ``cipher`` and ``bytes_in_flight`` (of this file alone) are used.
        pool: lends scratch memory; its threads write.
        gauge: says for every batch whether to compress; ``None``: always, unless the codec is raw.

    Attributes:
        num_workers: threads that write batches of it just now. Kept by whoever hands them out.
        bytes_left: raw bytes of what was not taken yet.

    Thread-safety: ``write`` and ``finish`` may run beside anything; all else is called under one lock.
    """

    def __init__(
        self, spec: ShardSpec, create: Callable[[str], WriteFile], options: PipelineOptions, pool: WorkerPool, gauge: CodecGauge | None
    ) -> None:
        self.num_workers = 0
        self.bytes_left = spec.raw_bytes
        self._spec = spec
        self._create = create
        self._options = options
        self._pool = pool
        self._gauge = gauge
        self._cipher = None if options.cipher is None else options.cipher.of_file(spec.name)
        # What is encrypted takes the way of what is encoded: through memory of ours.
        self._is_raw = options.codec == "raw" and self._cipher is None
        # Writers of one file take turns in the kernel: a second one only loads and digests meanwhile.
        self._most_workers = min(_WORKERS_OF_A_RAW_FILE, pool.threads) if self._is_raw else pool.threads
        # Enough to keep every worker busy while one of them writes what others have left to it.
        self._most_batches = 2 * self._most_workers + 2
        self._bytes_in_flight = 0
        self._file: WriteFile | None = None
        self._opening = threading.Lock()
        self._places = Places(HEADER_BYTES)
        batch_bytes = max(PACK_BYTES, min(_RAW_BATCH_BYTES if self._is_raw else BLOCK_BYTES, options.bytes_in_flight // 4))
        self._batches = _batches_of(spec.sources, batch_bytes, 0 if self._cipher is None else TAG_BYTES)
        self._taken: deque[Batch] = deque()
        # A file without blocks has one batch without blocks, so that somebody writes its header and its footer.
        self._next: Batch | None = next(self._batches, None) or Batch(0, [])
        self._table = TableBuilder(options.digest, b"" if options.cipher is None else options.cipher.key_id)
        self._raw_bytes = self._stored_bytes = 0
        self._raw_bytes_by_codec: Counter[str] = Counter()

    # -- handing out ------------------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether a batch is left to be taken."""
        return self._next is not None

    @property
    def has_room(self) -> bool:
        """Whether one more worker may take a batch now: its bytes fit, or nothing else is in flight."""
        if self._next is None:
            return False
        if not self._taken:
            return True
        fits = self._bytes_in_flight + sum(map(self._cost, self._next.blocks)) <= self._options.bytes_in_flight
        return fits and self.num_workers < self._most_workers and len(self._taken) < self._most_batches

    def take(self) -> Batch:
        """The next batch, to be given to :meth:`write` and then to :meth:`put_back`."""
        batch = self._next
        assert batch is not None
        self._next = next(self._batches, None)
        for block in batch.blocks:
            self.bytes_left -= block.raw_bytes
            self._bytes_in_flight += self._cost(block)
        batch.compress = self._options.codec != "raw" and (self._gauge is None or self._gauge.compresses())
        if not batch.compress and self._cipher is None:
            # Its length is known now: those after it need not wait to hear where they begin.
            self._places.place_next(batch, batch.raw_extent())
        self._taken.append(batch)
        return batch

    def write(self, batch: Batch) -> None:
        """Encode, digest and write a batch. It is on its way then: written by this call, or by that of a batch before it."""
        file = self._opened()
        if batch.position is None:
            write_encoded(batch, file, self._places, self._options, self._pool, self._cipher)
        else:
            write_raw(batch, file, self._options.digest)

    def put_back(self, batch: Batch) -> bool:
        """Record what became of a batch; returns whether the whole file is written, but for its footer: call :meth:`finish` then."""
        batch.is_done = True
        while self._taken and self._taken[0].is_done:
            self._record(self._taken.popleft())
        return not self._taken and self._next is None

    # -- ending -----------------------------------------------------------------------------------------------------------

    def finish(self) -> tuple[ShardReceipt, WriteFile]:
        """Write the footer. The file is neither committed nor aborted.

        Returns:
            What the coordinator needs to know about the file, and the file.
        """
        spec, file = self._spec, self._opened()
        for source in spec.sources:
            if isinstance(source, ChunkSource) and not source.nbytes:
                # It has no chunk, but whoever rebuilds a lost manifest from the footers must know that the entry exists.
                self._table.add_entry(source.name, source.dtype.code, source.shape)
        table = self._table.build()
        footer = Footer(spec.nonce, spec.component, spec.rank, spec.world_size, table, spec.stripe)
        record, body = pack_record(FOOTER_MAGIC, encode_footer(footer))
        file.write([body, record])
        receipt = ShardReceipt(
            name=spec.name,
            component=spec.component,
            rank=spec.rank,
            world_size=spec.world_size,
            nonce=spec.nonce,
            size_bytes=file.position,
            table=PackedTable.of(table),
            footer_sha256=hashlib.sha256(body).digest(),
            raw_bytes=self._raw_bytes,
            stored_bytes=self._stored_bytes,
            raw_bytes_by_codec=dict(self._raw_bytes_by_codec),
            stripe=spec.stripe,
        )
        return receipt, file

    def abort(self) -> None:
        """Remove the file, once no worker writes to it any more, and let go of the caller's tensors: an error's traceback holds this."""
        self._taken.clear()
        self._places.clear()
        self._next = None
        self._batches.close()
        if self._file is not None:
            self._file.abort()

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _opened(self) -> WriteFile:
        with self._opening:
            if self._file is None:
                self._file = self._create(self._spec.name)
                self._file.write([header_bytes(self._spec.name, self._spec.rank, self._spec.nonce)])
            return self._file

    def _record(self, batch: Batch) -> None:
        for block, (encoded_bytes, codec, digest) in zip(batch.blocks, batch.stored, strict=True):
            index = self._table.add_block(block.raw_bytes, encoded_bytes, codec, digest)
            offset = 0
            for source in block.sources:
                source.record(self._table, index, offset)
                offset += source.nbytes
            self._raw_bytes += block.raw_bytes
            self._stored_bytes += encoded_bytes + batch.tag_bytes
            self._raw_bytes_by_codec[NAMES[codec]] += block.raw_bytes
            self._bytes_in_flight -= self._refund(block)
            if block.shared is not None and block.is_last:
                block.shared.drop()
        if self._gauge is not None:
            assert batch.position is not None
            assert self._file is not None
            raw_bytes = sum(block.raw_bytes for block in batch.blocks)
            stored_bytes = sum(encoded_bytes for encoded_bytes, _, _ in batch.stored)
            self._gauge.add(batch.work, raw_bytes, stored_bytes, self._file, batch.position + batch.extent())
        if batch.scratch is not None:
            self._pool.return_scratch(batch.scratch)

    def _cost(self, block: Block) -> int:
        """Bytes to reserve when a block is started: a chunk is loaded as a whole with its first block."""
        encoded = 0 if self._is_raw else block.raw_bytes
        if block.shared is None:
            return block.raw_bytes + encoded
        return encoded + (self._loaded_bytes(block) if block.start == 0 else 0)

    def _refund(self, block: Block) -> int:
        """Bytes to free when a block is written: a chunk is held until its last block is."""
        encoded = 0 if self._is_raw else block.raw_bytes
        if block.shared is None:
            return block.raw_bytes + encoded
        return encoded + (self._loaded_bytes(block) if block.is_last else 0)

    def _loaded_bytes(self, block: Block) -> int:
        assert block.shared is not None
        # The whole bound for one huge chunk would leave no room for its own encoded blocks, and the workers would take turns.
        return min(block.shared.source.nbytes, self._options.bytes_in_flight // 2)


def _batches_of(sources: Sequence[Source], batch_bytes: int, tag_bytes: int) -> Generator[Batch, None, None]:
    first_block = 0
    for index, blocks in enumerate(grouped_by_size(blocks_of(sources), attrgetter("raw_bytes"), batch_bytes)):
        yield Batch(index, blocks, first_block, tag_bytes=tag_bytes)
        first_block += len(blocks)
