"""The loops of byte planes: floats split into bytes of equal significance, and joined again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcp_engine.storage.codecs.scratch import Scratch

__all__ = ["join_planes", "split_planes"]

_Bytes = npt.NDArray[np.uint8]

# Bits are moved piece by piece, so that all passes over a piece find it in the cache.
_PIECE_ELEMENTS = 64 << 10


def split_planes(elements: _Bytes, scratch: Scratch, purpose: str) -> _Bytes:
    """Byte planes of the elements, ``[num_planes, num_elements]``, the sign moved to the lowest bit of the top two bytes.

    The work is done on pairs of bytes: numpy moves and shifts 16-bit numbers at several times the speed of strided bytes.
    """
    num_elements, num_planes = elements.shape
    if num_planes == 1:
        return elements.reshape(1, -1)
    planes = scratch.buffer(purpose, elements.size).reshape(num_planes, -1)
    pairs = elements.view(np.uint16)
    spare, work = _spares(scratch)
    for start in range(0, num_elements, _PIECE_ELEMENTS):
        stop = min(start + _PIECE_ELEMENTS, num_elements)
        high, pair = spare[: stop - start], work[: stop - start]
        for index in range(num_planes // 2):
            np.copyto(pair, pairs[start:stop, index])
            if index == num_planes // 2 - 1:
                np.right_shift(pair, 15, out=high)
                np.left_shift(pair, 1, out=pair)
                np.bitwise_or(pair, high, out=pair)
            np.right_shift(pair, 8, out=high)
            np.copyto(planes[2 * index, start:stop], pair, casting="unsafe")
            np.copyto(planes[2 * index + 1, start:stop], high, casting="unsafe")
    return planes


def join_planes(planes: list[_Bytes], elements: _Bytes, scratch: Scratch) -> None:
    """The inverse of :func:`split_planes`."""
    num_elements, num_planes = elements.shape
    pairs = elements.view(np.uint16)
    low, high = _spares(scratch)
    for start in range(0, num_elements, _PIECE_ELEMENTS):
        stop = min(start + _PIECE_ELEMENTS, num_elements)
        lows, highs = low[: stop - start], high[: stop - start]
        for index in range(num_planes // 2):
            np.copyto(lows, planes[2 * index][start:stop])
            np.copyto(highs, planes[2 * index + 1][start:stop])
            np.left_shift(highs, 8, out=highs)
            if index == num_planes // 2 - 1:
                np.bitwise_or(highs, lows, out=highs)
                np.right_shift(highs, 1, out=lows)
                np.left_shift(highs, 15, out=highs)
            np.bitwise_or(highs, lows, out=pairs[start:stop, index])


def _spares(scratch: Scratch) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    both = scratch.buffer("pairs", 4 * _PIECE_ELEMENTS).view(np.uint16)
    return both[:_PIECE_ELEMENTS], both[_PIECE_ELEMENTS:]
