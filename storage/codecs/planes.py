"""The planes codec: floats split into byte planes, so that only what compresses is compressed.

Of a trained weight the exponent is predictable and the mantissa is noise, but in memory their bits share bytes: the sign takes the top bit
and pushes the last bit of the exponent into the byte below (bfloat16, float32). So sign and that bit change places, the bytes of equal
significance are gathered into planes, and each plane is stored as one zstd frame or as it is, whichever is smaller.

Payload (``docs/format.md``): one byte number of planes, one byte mask of the compressed planes, two zero bytes, a u32 length for each
plane, then the planes, least significant first.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.codecs.zstd import decompress_into
from dcp_engine.storage.dtypes import DtypeInfo

__all__ = ["decode", "encode"]

_Bytes = npt.NDArray[np.uint8]

_SAMPLES = 8
_SAMPLE_ELEMENTS = 2048
_WORTH_IT = 0.97
# Bits are moved piece by piece, so that the six passes over a piece find it in the cache.
_PIECE_BYTES = 128 << 10


def encode(raw: memoryview, dtype: DtypeInfo, level: int, scratch: Scratch) -> tuple[memoryview, ...] | None:
    """The payload of a block in parts, or ``None`` where no plane is worth compressing.

    Args:
        raw: contiguous bytes, a multiple of the plane item size.
        dtype: a row with planes.
        level: 1 for the parameters tuned for exponents, else the zstd level.
        scratch: the parts point into it until it is used again.
    """
    num_planes = dtype.plane_itemsize
    elements = np.frombuffer(raw, dtype=np.uint8).reshape(-1, num_planes)
    wanted = _promising_planes(elements, num_planes, level, scratch)
    if not any(wanted):
        return None
    planes = scratch.buffer("planes", elements.size).reshape(num_planes, -1)
    _split(elements, planes, scratch)
    compressor = scratch.exponent_compressor(level)
    mask = 0
    parts = [memoryview(planes[index]) for index in range(num_planes)]
    for index in range(num_planes):
        if wanted[index]:
            frame = compressor.compress(parts[index])
            if len(frame) < _WORTH_IT * len(parts[index]):
                parts[index] = memoryview(frame)
                mask |= 1 << index
    if not mask:
        return None
    header = struct.pack(f"<BBH{num_planes}I", num_planes, mask, 0, *map(len, parts))
    return (memoryview(header), *parts)


def _promising_planes(elements: _Bytes, num_planes: int, level: int, scratch: Scratch) -> list[bool]:
    """Which planes look compressible, from samples: splitting and coding noise in full would cost more than it can win."""
    num_elements = len(elements)
    if num_elements > 2 * _SAMPLES * _SAMPLE_ELEMENTS:
        step = (num_elements - _SAMPLE_ELEMENTS) // (_SAMPLES - 1)
        sample = scratch.buffer("sample", _SAMPLES * _SAMPLE_ELEMENTS * num_planes).reshape(-1, num_planes)
        for index in range(_SAMPLES):
            sample[index * _SAMPLE_ELEMENTS : (index + 1) * _SAMPLE_ELEMENTS] = elements[index * step : index * step + _SAMPLE_ELEMENTS]
    else:
        sample = elements
    planes = scratch.buffer("sample planes", sample.size).reshape(num_planes, -1)
    _split(sample, planes, scratch)
    compressor = scratch.exponent_compressor(level)
    return [len(compressor.compress(memoryview(plane))) < _WORTH_IT * plane.nbytes for plane in planes]


def _split(elements: _Bytes, planes: _Bytes, scratch: Scratch) -> None:
    """Byte planes of the elements, sign and last bit of the top byte exchanged."""
    num_planes, num_elements = planes.shape
    spare = scratch.buffer("spare", min(num_elements, _PIECE_BYTES))
    for start in range(0, num_elements, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, num_elements)
        for index in range(num_planes):
            np.copyto(planes[index, start:stop], elements[start:stop, index])
        if num_planes > 1:
            _rotate(planes[-1, start:stop], planes[-2, start:stop], spare[: stop - start])


def _rotate(high: _Bytes, low: _Bytes, spare: _Bytes) -> None:
    """``high``: s e7..e1, ``low``: e0 m6..m0  ->  ``high``: e7..e0, ``low``: s m6..m0."""
    np.bitwise_xor(high, low, out=spare)
    np.bitwise_and(spare, 0x80, out=spare)
    # spare: the top bits differ. Exchanging them is flipping both where they do.
    np.bitwise_xor(low, spare, out=low)
    np.bitwise_xor(high, spare, out=high)
    # The top bit of ``high`` is now e0: rotate it to the bottom.
    np.right_shift(high, 7, out=spare)
    np.add(high, high, out=high)
    np.bitwise_or(high, spare, out=high)


def _rotate_back(high: _Bytes, low: _Bytes, spare: _Bytes) -> None:
    np.left_shift(high, 7, out=spare)
    np.right_shift(high, 1, out=high)
    np.bitwise_or(high, spare, out=high)
    np.bitwise_xor(high, low, out=spare)
    np.bitwise_and(spare, 0x80, out=spare)
    np.bitwise_xor(low, spare, out=low)
    np.bitwise_xor(high, spare, out=high)


def decode(stored: memoryview, out: memoryview, dtype: DtypeInfo, scratch: Scratch) -> None:
    """Decode a payload into exactly ``out``.

    Raises:
        MalformedCheckpointError: the payload breaks a rule of its layout.
    """
    num_planes = dtype.plane_itemsize
    header_bytes = 4 + 4 * num_planes
    if num_planes == 0 or len(out) % num_planes or len(stored) < header_bytes:
        raise MalformedCheckpointError("planes block of the wrong size or dtype", found=f"{len(stored)} bytes of {dtype.name}")
    found_planes, mask, zero, *lengths = struct.unpack_from(f"<BBH{num_planes}I", stored)
    if found_planes != num_planes or not 0 < mask < 1 << num_planes or zero or header_bytes + sum(lengths) != len(stored):
        raise MalformedCheckpointError(
            "planes block with an inconsistent header",
            expected=f"{num_planes} planes in {len(stored)} bytes",
            found=f"{found_planes} planes, mask {mask:#x}, lengths {lengths}",
        )
    num_elements = len(out) // num_planes
    elements = np.frombuffer(out, dtype=np.uint8).reshape(-1, num_planes)
    decoded = scratch.buffer("planes", len(out)).reshape(num_planes, -1)
    position = header_bytes
    for index, length in enumerate(lengths):
        plane = stored[position : position + length]
        position += length
        if mask >> index & 1:
            decompress_into(scratch.decompressor, plane, decoded[index])
        elif length != num_elements:
            raise MalformedCheckpointError("plane of another length", expected=num_elements, found=length)
        else:
            decoded[index] = np.frombuffer(plane, dtype=np.uint8)
    _join(decoded, elements, scratch)


def _join(planes: _Bytes, elements: _Bytes, scratch: Scratch) -> None:
    """The inverse of :func:`_split`; uses up ``planes``."""
    num_planes, num_elements = planes.shape
    spare = scratch.buffer("spare", min(num_elements, _PIECE_BYTES))
    for start in range(0, num_elements, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, num_elements)
        if num_planes > 1:
            _rotate_back(planes[-1, start:stop], planes[-2, start:stop], spare[: stop - start])
        for index in range(num_planes):
            np.copyto(elements[start:stop, index], planes[index, start:stop])
