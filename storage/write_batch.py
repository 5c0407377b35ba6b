"""What a worker does with a few blocks of a shard file: encode and digest them, find their place, write them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dcp_engine.storage.codec_gauge import Work
from dcp_engine.storage.codecs import RAW, EncodedBlock, Scratch, encode_block, whole
from dcp_engine.storage.digest import DigestKind, DigestValue
from dcp_engine.storage.limits import ALIGN_BYTES, TAG_BYTES
from dcp_engine.storage.records import PipelineOptions
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.storage.write_blocks import Block

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import Buffer, WriteFile
    from dcp_engine.storage.encryption import FileCipher

__all__ = ["Batch", "Places", "write_encoded", "write_raw"]

_ZEROS = memoryview(bytes(ALIGN_BYTES))
# Blocks are gathered up to this: a system call does not count then, and what was copied to the file is digested from the cache.
_GATHERED_BYTES = 512 << 10


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks that one worker writes, one after the other.

    Attributes:
        index: which batch of the file it is.
        blocks: what is in it.
        first_block: number of the first of them in the file.
        position: where it begins in the file, in bytes; ``None`` until the lengths of all before it are known.
        stored: of each block that is done: bytes as the codec has made them, codec, digest.
        parts: encoded bytes and padding, as long as they wait for their place.
        compress: encode the blocks with the codec that was asked for; else they are stored raw.
        work: what its worker did, for whoever measures.
        scratch: holds some of the parts, and goes back to the pool once they are written.
        is_done: its worker has ended. Once those of all batches before it have, too, it is written.
        tag_bytes: what encryption adds to each block.
    """

    index: int
    blocks: list[Block]
    first_block: int = 0
    position: int | None = None
    stored: list[tuple[int, int, DigestValue]] = field(default_factory=list)
    parts: list[Buffer] = field(default_factory=list)
    compress: bool = True
    work: Work = field(default_factory=Work)
    scratch: Scratch | None = None
    is_done: bool = False
    tag_bytes: int = 0

    def raw_extent(self) -> int:
        """Bytes in the file, padding included, if no block is compressed."""
        return sum(block.raw_bytes + -block.raw_bytes % ALIGN_BYTES for block in self.blocks)

    def extent(self) -> int:
        """Bytes in the file, padding included, once all blocks are encoded."""
        lengths = (encoded_bytes + self.tag_bytes for encoded_bytes, _, _ in self.stored)
        return sum(length + -length % ALIGN_BYTES for length in lengths)


class Places:
    """Gives batches their places in a file, back to back in the order of their indices, whatever the order in which they become ready.

    Args:
        position: where the first one begins, in bytes.

    Thread-safety: any thread may announce.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._next = 0
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Batch, int]] = {}

    def place_next(self, batch: Batch, num_bytes: int) -> None:
        """Give a batch its place before it is worked on, if all before it have theirs. Else it is to be announced, as any other."""
        with self._lock:
            if batch.index == self._next:
                batch.position = self._position
                self._position += num_bytes
                self._next += 1

    def announce(self, batch: Batch, num_bytes: int) -> list[Batch]:
        """Say how long a batch is, once.

        Returns:
            Batches whose places are known by this: nobody else will be told of them.
        """
        placed = []
        with self._lock:
            self._waiting[batch.index] = (batch, num_bytes)
            while (found := self._waiting.pop(self._next, None)) is not None:
                found[0].position = self._position
                self._position += found[1]
                self._next += 1
                placed.append(found[0])
        return placed

    def clear(self) -> None:
        """Forget what still waits."""
        with self._lock:
            self._waiting.clear()


def write_raw(batch: Batch, file: WriteFile, digest: DigestKind) -> None:
    """Write blocks as they are, at a place that is known. Runs in a worker.

    Bytes pass through the cache once: each piece is digested right after it was copied to the file. All blocks are loaded before the first
    is written: what that takes of the interpreter is in the cache once, and would have to come back for each.
    """
    assert batch.position is not None, "whoever has no place yet is encoded"
    out = _Gatherer(file, batch.position, digest)
    loaded = [block.load() for block in batch.blocks]
    begin = time.perf_counter()
    # Floats that came apart are joined within the time: that is what leaving them raw costs.
    for raw in (whole(block).cast("B") for block in loaded):
        batch.stored.append((len(raw), RAW, out.write(raw)))
    out.flush()
    batch.work.write_secs = time.perf_counter() - begin
    batch.work.written_bytes = batch.extent()


class _Gatherer:
    """Writes blocks back to back, small ones together, and digests them."""

    def __init__(self, file: WriteFile, position: int, digest: DigestKind) -> None:
        self._file = file
        self._position = position
        self._digest_of, self._begin_digest = digest.of, digest.begin
        self._parts: list[Buffer] = []
        self._num_bytes = 0

    def write(self, raw: memoryview) -> DigestValue:
        """Takes a block; returns its digest."""
        if len(raw) < _GATHERED_BYTES:
            self._add(raw)
            digest = self._digest_of(raw)
        else:
            self.flush()
            state = self._begin_digest()
            self._file.write_pieces(self._position, raw, state.update)
            self._position += len(raw)
            digest = state.value()
        if padding := -len(raw) % ALIGN_BYTES:
            self._add(_ZEROS[:padding])
        return digest

    def _add(self, piece: memoryview) -> None:
        self._parts.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes >= _GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            self._file.write_at(self._position, self._parts)
            self._position += self._num_bytes
            self._parts.clear()
            self._num_bytes = 0


def write_encoded(
    batch: Batch, file: WriteFile, places: Places, options: PipelineOptions, pool: WorkerPool, cipher: FileCipher | None
) -> None:
    """Encode blocks, encrypt them where there is a cipher, and write all batches whose places are known by that. Runs in a worker.

    The scratch is leased until the batch is written, so that encoded bytes need not be copied out of it.
    """
    scratch = batch.scratch = pool.lease_scratch()
    kept = 0
    for index, block in enumerate(batch.blocks):
        loaded = block.load()
        begin = time.perf_counter()
        encoded = encode_block(loaded, block.dtype, options.codec if batch.compress else "raw", options.level, scratch)
        if batch.compress:
            batch.work.encode_secs += time.perf_counter() - begin
            batch.work.raw_bytes += block.raw_bytes
            batch.work.stored_bytes += encoded.stored_bytes
        parts = encoded.parts
        if cipher is not None:
            parts, kept = _sealed(encoded, scratch, kept, batch, cipher, batch.first_block + index)
        batch.stored.append((encoded.stored_bytes, encoded.codec, options.digest.of(*parts)))
        if cipher is None and encoded.codec != RAW and index + 1 < len(batch.blocks):
            # The next block needs the scratch for itself.
            parts, kept = _kept(encoded, scratch, kept, batch)
        batch.parts += parts
        if padding := -(encoded.stored_bytes + batch.tag_bytes) % ALIGN_BYTES:
            batch.parts.append(_ZEROS[:padding])
    for placed in places.announce(batch, batch.extent()):
        assert placed.position is not None
        begin = time.perf_counter()
        file.write_at(placed.position, placed.parts)
        batch.work.write_secs += time.perf_counter() - begin
        batch.work.written_bytes += placed.extent()
        placed.parts.clear()


def _kept(encoded: EncodedBlock, scratch: Scratch, start: int, batch: Batch) -> tuple[tuple[memoryview, ...], int]:
    """The parts of a block, with those that lie in buffers of the codec moved to one that is reused only after the batch is written."""
    buffer = scratch.buffer("kept", sum(block.raw_bytes for block in batch.blocks))
    parts = []
    for part in encoded.parts:
        if isinstance(part.obj, bytes):
            parts.append(part)
            continue
        stop = start + len(part)
        np.copyto(buffer[start:stop], np.frombuffer(part, np.uint8))
        parts.append(buffer[start:stop].data)
        start = stop
    return tuple(parts), start


def _sealed(
    encoded: EncodedBlock, scratch: Scratch, start: int, batch: Batch, cipher: FileCipher, block: int
) -> tuple[tuple[memoryview, ...], int]:
    """A block as it is encrypted, in a buffer that is reused only after the batch is written."""
    stop = start + encoded.stored_bytes + TAG_BYTES
    out = scratch.buffer("kept", sum(part.raw_bytes + TAG_BYTES for part in batch.blocks))[start:stop].data
    parts = encoded.parts
    if len(parts) > 1:
        joined = scratch.buffer("joined", encoded.stored_bytes)
        begin = 0
        for part in parts:
            np.copyto(joined[begin : begin + len(part)], np.frombuffer(part, np.uint8))
            begin += len(part)
        parts = (joined.data,)
    cipher.seal(block, parts[0], out)
    return (out,), stop
