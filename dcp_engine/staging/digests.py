"""Digests of a staged buffer, taken when it is filled and held against it when it was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["Place", "Thoroughness", "place_digests"]

Place = tuple[int, int]
"""First byte in the buffer, number of bytes."""
Thoroughness = Literal["off", "sample", "full"]

_SAMPLE_BYTES = 1024


def place_digests(memory: NDArray[np.uint8], places: Sequence[Place], thoroughness: Thoroughness) -> list[int]:
    """xxh3-64 of each place: of all its bytes, or of its first, middle and last KiB.

    Args:
        memory: the buffer, shape ``(num_bytes,)``.
        places: in it.
        thoroughness: ``"off"`` gives no digests.
    """
    if thoroughness == "off":
        return []
    view = memory.data
    digests = []
    for begin, num_bytes in places:
        end = begin + num_bytes
        if thoroughness == "full" or num_bytes <= 3 * _SAMPLE_BYTES:
            digests.append(_digest(view, begin, end))
        else:
            middle = (begin + end - _SAMPLE_BYTES) // 2
            digest = xxhash.xxh3_64(view[begin : begin + _SAMPLE_BYTES])
            digest.update(view[middle : middle + _SAMPLE_BYTES])
            digest.update(view[end - _SAMPLE_BYTES : end])
            digests.append(digest.intdigest())
    return digests


_PIECE_BYTES = 1024**2


def _digest(view: memoryview, begin: int, end: int) -> int:
    if end - begin <= _PIECE_BYTES:
        return xxhash.xxh3_64_intdigest(view[begin:end])
    digest = xxhash.xxh3_64()
    for position in range(begin, end, _PIECE_BYTES):  # update releases the interpreter's lock, the one-call form does not
        digest.update(view[position : min(end, position + _PIECE_BYTES)])
    return digest.intdigest()
