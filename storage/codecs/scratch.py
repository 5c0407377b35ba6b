"""What one worker thread reuses from block to block, so that no block costs an allocation of its own size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

from dcp_engine.storage.codecs.zstd import fast_compressor, level_compressor

__all__ = ["Scratch"]


class Scratch:
    """Buffers and zstd contexts of one thread.

    Thread-safety: none; one for each worker.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self._fast: zstandard.ZstdCompressor | None = None
        self.decompressor = zstandard.ZstdDecompressor()

    def buffer(self, purpose: str, num_bytes: int) -> npt.NDArray[np.uint8]:
        """An uninitialised buffer, the same memory at every call for one purpose unless it has to grow."""
        held = self._buffers.get(purpose)
        if held is None or held.nbytes < num_bytes:
            held = np.empty(num_bytes, dtype=np.uint8)
            self._buffers[purpose] = held
        return held[:num_bytes]

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        """The compressor of a level."""
        if level not in self._compressors:
            self._compressors[level] = level_compressor(level)
        return self._compressors[level]

    def exponent_compressor(self, level: int) -> zstandard.ZstdCompressor:
        """The compressor of byte planes: at level 1 the one tuned for exponents, above it that level."""
        if level > 1:
            return self.compressor(level)
        if self._fast is None:
            self._fast = fast_compressor()
        return self._fast
