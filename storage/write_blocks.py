"""Cuts the chunks of one shard file into blocks, in the order of the file, and blocks into tasks. Nothing is loaded or written yet."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from dcp_engine.errors import PlanError
from dcp_engine.storage.limits import BLOCK_BYTES, PACK_BYTES
from dcp_engine.storage.records import Source
from dcp_engine.storage.split_memory import staged_block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcp_engine.storage.backends.base import Buffer
    from dcp_engine.storage.codecs import SplitFloats
    from dcp_engine.storage.dtypes import DtypeInfo

__all__ = ["Block", "blocks_of"]


class _Shared:
    """The bytes of a chunk of several blocks: loaded by the first worker that needs them, dropped after the last block is written."""

    __slots__ = ("_array", "_lock", "source")

    def __init__(self, source: Source) -> None:
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
class Block:
    """One block to be: some small chunks in a row, one chunk, or a part of one.

    Attributes:
        sources: chunks that begin in this block, in order.
        dtype: element type of everything in it.
        raw_bytes: length of the block.
        shared: set where the chunk has several blocks.
        start: first byte of this block within the shared chunk.
        is_last: no later block belongs to the shared chunk.
    """

    sources: Sequence[Source]
    dtype: DtypeInfo
    raw_bytes: int
    shared: _Shared | None = None
    start: int = 0
    is_last: bool = True

    def load(self) -> memoryview | SplitFloats:
        """The raw bytes: a view where the source gives one, joined where several chunks share the block; or floats that came apart."""
        if self.shared is not None:
            return staged_block(self.shared.get()[self.start : self.start + self.raw_bytes])
        if len(self.sources) == 1:
            return staged_block(_loaded(self.sources[0]).data)
        # Arrays are buffers as they are; a memoryview of each would take longer than to join them.
        return memoryview(b"".join(cast("Iterable[Buffer]", map(_loaded, self.sources))))


def blocks_of(sources: Sequence[Source]) -> Iterator[Block]:
    """Cut chunks into blocks, in the order of the file."""
    small: dict[int, list[Source]] = {}
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
                yield Block(group[first:index], source.dtype, total)
                first, total = index, 0
            total += source.nbytes
        yield Block(group[first:], source.dtype, total)


def _blocks_of_chunk(source: Source) -> Iterator[Block]:
    if source.nbytes <= BLOCK_BYTES:
        yield Block((source,), source.dtype, source.nbytes)
        return
    shared = _Shared(source)
    for start in range(0, source.nbytes, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, source.nbytes)
        yield Block((source,) if start == 0 else (), source.dtype, stop - start, shared, start, stop == source.nbytes)


def _loaded(source: Source) -> NDArray[np.uint8]:
    array = source.load()
    if array.nbytes != source.nbytes:
        raise PlanError(
            "a tensor's data is not as long as planned",
            tensor=source.name,
            expected=f"{source.nbytes} bytes",
            found=f"{array.nbytes} bytes",
            remedy="keep the state unchanged while it is being saved",
        )
    return array
