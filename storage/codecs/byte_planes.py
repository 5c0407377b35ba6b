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
from dcp_engine.storage.codecs.floats import PlaneFloats, RawFloats
from dcp_engine.storage.codecs.plane_loops import join_planes, split_planes
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.codecs.zstd import WORTH_IT, decompress_into

__all__ = ["decode", "encode"]

_Bytes = npt.NDArray[np.uint8]

_SAMPLES = 8
_SAMPLE_ELEMENTS = 2048
# One sample for so many elements. Below two samples a block is coded without: they would cost as much as they can save.
_ELEMENTS_PER_SAMPLE = 16 << 10


def encode(floats: RawFloats | PlaneFloats, level: int, scratch: Scratch) -> tuple[memoryview, ...] | None:
    """The payload of a block in parts, or ``None`` where no plane is worth compressing.

    Args:
        floats: the block.
        level: 1 for the parameters tuned for exponents, else the zstd level.
        scratch: the parts point into it until it is used again.
    """
    num_planes = floats.itemsize
    wanted = _promising_planes(floats, level, scratch)
    if not any(wanted):
        return None
    planes = floats.planes(scratch)
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


def _promising_planes(floats: RawFloats | PlaneFloats, level: int, scratch: Scratch) -> list[bool]:
    """Which planes look compressible, from samples: splitting and coding noise in full would cost more than it can win."""
    num_samples = min(_SAMPLES, floats.num_floats // _ELEMENTS_PER_SAMPLE)
    if num_samples < 2:
        return [True] * floats.itemsize
    step = (floats.num_floats - _SAMPLE_ELEMENTS) // (num_samples - 1)
    sample = floats.sample(range(0, num_samples * step, step), _SAMPLE_ELEMENTS, scratch)
    planes = split_planes(sample, scratch, "sample planes")
    compressor = scratch.exponent_compressor(level)
    return [len(compressor.compress(memoryview(plane))) < WORTH_IT * plane.nbytes for plane in planes]


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
    join_planes(planes, elements, scratch)
