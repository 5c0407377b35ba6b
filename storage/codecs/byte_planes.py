"""The byte planes layout of the planes codec: floats split into bytes of equal significance.

In memory the bits of exponent and mantissa share bytes: the sign takes the top bit
and pushes the last bit of the exponent into the byte below (bfloat16, float32). So the top two bytes are rotated left by one bit, which
moves the sign to their bottom; the bytes of equal significance are gathered into planes; and each plane is stored as one zstd frame or as
it is, whichever is smaller. Floats of one byte are a single plane, unrotated.

Payload (``docs/format.md``): one byte number of planes, one byte mask of the compressed planes, two zero bytes, a u32 length for each
plane, then the planes, least significant first.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.codecs.zstd import WORTH_IT, decompress_into

__all__ = ["decode", "encode"]

_Bytes = npt.NDArray[np.uint8]

_SAMPLES = 8
_SAMPLE_ELEMENTS = 2048
# One sample for so many elements. Below two samples a block is coded without: they would cost as much as they can save.
_ELEMENTS_PER_SAMPLE = 16 << 10
# Bits are moved piece by piece, so that all passes over a piece find it in the cache.
_PIECE_ELEMENTS = 64 << 10


def encode(raw: memoryview, num_planes: int, level: int, scratch: Scratch) -> tuple[memoryview, ...] | None:
    """The payload of a block in parts, or ``None`` where no plane is worth compressing.

    Args:
        raw: contiguous bytes, a multiple of the plane item size.
        num_planes: bytes of a float.
        level: 1 for the parameters tuned for exponents, else the zstd level.
        scratch: the parts point into it until it is used again.
    """
    elements = np.frombuffer(raw, dtype=np.uint8).reshape(-1, num_planes)
    wanted = _promising_planes(elements, num_planes, level, scratch)
    if not any(wanted):
        return None
    planes = _split(elements, scratch, "planes")
    compressor = scratch.exponent_compressor(level)
    mask = 0
    parts = [memoryview(planes[index]) for index in range(num_planes)]
    for index in range(num_planes):
        if wanted[index]:
            frame = compressor.compress(parts[index])
            if len(frame) < WORTH_IT * len(parts[index]):
                parts[index] = memoryview(frame)
                mask |= 1 << index
    if not mask:
        return None
    header = struct.pack(f"<BBH{num_planes}I", num_planes, mask, 0, *map(len, parts))
    return (memoryview(header), *parts)


def _promising_planes(elements: _Bytes, num_planes: int, level: int, scratch: Scratch) -> list[bool]:
    """Which planes look compressible, from samples: splitting and coding noise in full would cost more than it can win."""
    num_elements = len(elements)
    num_samples = min(_SAMPLES, num_elements // _ELEMENTS_PER_SAMPLE)
    if num_samples < 2:
        return [True] * num_planes
    step = (num_elements - _SAMPLE_ELEMENTS) // (num_samples - 1)
    sample = scratch.buffer("sample", num_samples * _SAMPLE_ELEMENTS * num_planes).reshape(-1, num_planes)
    for index in range(num_samples):
        sample[index * _SAMPLE_ELEMENTS : (index + 1) * _SAMPLE_ELEMENTS] = elements[index * step : index * step + _SAMPLE_ELEMENTS]
    planes = _split(sample, scratch, "sample planes")
    compressor = scratch.exponent_compressor(level)
    return [len(compressor.compress(memoryview(plane))) < WORTH_IT * plane.nbytes for plane in planes]


def _split(elements: _Bytes, scratch: Scratch, purpose: str) -> _Bytes:
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


def _spares(scratch: Scratch) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    both = scratch.buffer("pairs", 4 * _PIECE_ELEMENTS).view(np.uint16)
    return both[:_PIECE_ELEMENTS], both[_PIECE_ELEMENTS:]


def decode(stored: memoryview, out: memoryview, num_planes: int, scratch: Scratch) -> None:
    """Decode a payload into exactly ``out``.

    Raises:
        MalformedCheckpointError: the payload breaks a rule of its layout.
    """
    header_bytes = 4 + 4 * num_planes
    if len(stored) < header_bytes:
        raise MalformedCheckpointError("planes block without its header", expected=f">= {header_bytes} bytes", found=f"{len(stored)} bytes")
    found_planes, mask, zero, *lengths = struct.unpack_from(f"<BBH{num_planes}I", stored)
    if found_planes != num_planes or not 0 < mask < 1 << num_planes or zero or header_bytes + sum(lengths) != len(stored):
        raise MalformedCheckpointError(
            "planes block with an inconsistent header",
            expected=f"{num_planes} planes in {len(stored)} bytes",
            found=f"{found_planes} planes, mask {mask:#x}, lengths {lengths}",
        )
    elements = np.frombuffer(out, dtype=np.uint8).reshape(-1, num_planes)
    if num_planes == 1:
        decompress_into(scratch.decompressor, stored[header_bytes:], out)
        return
    num_elements = len(elements)
    # A plane that is stored as it is needs no copy: it is joined from where it lies.
    planes = []
    position = header_bytes
    for index, length in enumerate(lengths):
        plane = stored[position : position + length]
        position += length
        if mask >> index & 1:
            target = scratch.buffer(f"plane {index}", num_elements)
            decompress_into(scratch.decompressor, plane, target.data)
            planes.append(target)
        elif length != num_elements:
            raise MalformedCheckpointError("plane of another length", expected=num_elements, found=length)
        else:
            planes.append(np.frombuffer(plane, dtype=np.uint8))
    _join(planes, elements, scratch)


def _join(planes: list[_Bytes], elements: _Bytes, scratch: Scratch) -> None:
    """The inverse of :func:`_split`."""
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
