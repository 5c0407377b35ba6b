"""Small chunks that are wanted whole, as columns: thousands of them lie in one block, and go from it to as many places in memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dcp_engine.storage.limits import BLOCK_BYTES

if TYPE_CHECKING:
    from dcp_engine.storage.manifest import Manifest
    from dcp_engine.stored_tensors import WholeReads

__all__ = ["PackedReads"]


class PackedReads:
    """Whole chunks within one block each, and the memory that each is read into.

    Args:
        manifest: of the checkpoint.
        reads: of entries of this manifest, ``stored.rows`` being their ids.

    Attributes:
        chunks: id of each chunk.
        blocks: the block that holds it, among the blocks of all files.

    Thread-safety: ``fill`` may be called from any thread, for disjoint rows.
    """

    def __init__(self, manifest: Manifest, reads: WholeReads) -> None:
        table = manifest.table
        chunk_of = np.zeros(len(table.names), dtype=np.int64)
        chunk_of[table.chunk_entries] = np.arange(len(table.chunk_entries))
        self.chunks: NDArray[np.int64] = chunk_of[reads.rows]
        self.blocks: NDArray[np.int64] = table.chunk_first_block[self.chunks]
        self._offsets = table.chunk_block_offset[self.chunks]
        self._num_bytes = table.chunk_bytes[self.chunks]
        self._addresses = reads.addresses
        self._tensors = reads.tensors  # kept alive: their addresses are written to

    def __len__(self) -> int:
        return len(self.chunks)

    def fill(self, rows: NDArray[np.int64], raw: memoryview) -> None:
        """Copy some chunks out of their block.

        Args:
            rows: of chunks that all lie in one block.
            raw: the block's raw bytes.
        """
        offsets, num_bytes = self._offsets[rows], self._num_bytes[rows]
        assert int((offsets + num_bytes).max()) <= len(raw) <= BLOCK_BYTES, "a chunk reaches out of its block"
        sources = offsets + np.frombuffer(raw, dtype=np.uint8).ctypes.data
        # An array or a tensor for each place would cost several times the copy.
        move = ctypes.memmove
        for target, source, size in zip(self._addresses[rows].tolist(), sources.tolist(), num_bytes.tolist(), strict=True):
            move(target, source, size)
