"""Chunks that are wanted whole, as columns: thousands of them may lie in one block, and go from it to as many places in memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.scattered import scatter

if TYPE_CHECKING:
    from dcp_engine.storage.manifest import Manifest
    from dcp_engine.stored_tensors import WholeReads

__all__ = ["WholeTargets"]


_memory_from = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_from.restype = ctypes.py_object
_memory_from.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE of CPython's object.h


def _memory_at(address: int, num_bytes: int) -> memoryview:
    """Memory by its address, which the caller keeps alive. A tenth of the time of a numpy view of a tensor, and there is one a block."""
    memory: memoryview = _memory_from(address, num_bytes, _WRITABLE)
    return memory


class WholeTargets:
    """Whole chunks, and the memory that each is read into.

    Args:
        manifest: of the checkpoint.
        reads: of entries of this manifest, ``stored.rows`` being their ids.

    Attributes:
        chunks: id of each chunk.

    Thread-safety: ``run`` and ``fill`` may be called from any thread, for disjoint rows or blocks.
    """

    def __init__(self, manifest: Manifest, reads: WholeReads) -> None:
        table = manifest.table
        chunk_of = np.zeros(len(table.names), dtype=np.int64)
        chunk_of[table.chunk_entries] = np.arange(len(table.chunk_entries))
        self.chunks: NDArray[np.int64] = chunk_of[reads.rows]
        self._first_blocks = table.chunk_first_block[self.chunks]
        self._num_blocks = table.chunk_num_blocks[self.chunks]
        self._offsets = table.chunk_block_offset[self.chunks]
        self._num_bytes = table.chunk_bytes[self.chunks]
        self._addresses = reads.addresses
        self._tensors = reads.tensors  # kept alive: their addresses are written to

    def __len__(self) -> int:
        return len(self.chunks)

    def blocks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Every block that holds bytes of a chunk, among the blocks of all files, once for each of its chunks; and the chunk's row."""
        rows = np.repeat(np.arange(len(self)), self._num_blocks)
        firsts = np.cumsum(self._num_blocks) - self._num_blocks
        return self._first_blocks[rows] + np.arange(len(rows)) - firsts[rows], rows

    def run(self, row: int, block: int) -> tuple[int, memoryview]:
        """Where in the raw bytes of a block a chunk's bytes begin, and the memory of all of them that lie in it."""
        skipped = (block - int(self._first_blocks[row])) * BLOCK_BYTES
        num_bytes = min(int(self._num_bytes[row]) - skipped, BLOCK_BYTES)
        return int(self._offsets[row]), _memory_at(int(self._addresses[row]) + skipped, num_bytes)

    def fill(self, rows: NDArray[np.int64], block: int, raw: memoryview) -> None:
        """Copy what a block holds of some chunks.

        Args:
            rows: of chunks that have bytes in the block.
            block: its index among the blocks of all files.
            raw: its raw bytes.
        """
        skipped = (block - self._first_blocks[rows]) * BLOCK_BYTES
        num_bytes = np.minimum(self._num_bytes[rows] - skipped, BLOCK_BYTES)
        assert len(raw) <= BLOCK_BYTES, "a block of another size"
        scatter(np.frombuffer(raw, dtype=np.uint8), self._offsets[rows], self._addresses[rows] + skipped, num_bytes)
