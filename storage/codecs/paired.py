"""The paired layout of the planes codec: two exponents a byte, entropy-coded; signs and mantissas stored as they are, without their holes.

The exponents of nearly all values of a tensor lie within sixteen of each other. So an exponent becomes a code of four bits above a base,
two codes share a byte, and these bytes are one zstd frame: half as many symbols as there are floats, and an entropy coder takes its time by
the symbol. The few exponents outside follow in the same frame. Of two floats the sign and seven bits of mantissa fill the sixteen bits
where the exponents were; the lower sixteen bits of a float32 are stored as they are. Where no float is negative, which is so of Adam's
second moments, the bits of the signs hold the mantissas of an eighth of the floats.

Floats are paired over half a block, not side by side, so that whole contiguous arrays are shifted and masked, by compiled loops or numpy.

Payload: ``docs/format.md``, section 9.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage.codecs.floats import Floats, PairedFloats, RawFloats, num_pairs
from dcp_engine.storage.codecs.kernels import pair_loops
from dcp_engine.storage.codecs.pairing import NUM_CODES, Pairs
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.codecs.zstd import decompress_into

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8s = NDArray[np.uint8]
    U16s = NDArray[np.uint16]
    Positions = NDArray[np.int64]

__all__ = ["ITEMSIZES", "decode", "encode", "find_base"]

ITEMSIZES: Final = (2, 4)
"""Bytes of a float that has eight bits of exponent below its sign, or is treated as if it had."""

_HEADER = struct.Struct("<BBBBIII")
_MAX_BASE = 256 - NUM_CODES
_REST = 0x807F
_MAX_GAP = 0xFFFF
# Floats outside the codes, of all: with more of them, byte planes are smaller and faster.
_MAX_OUTSIDE = 1 / 8

# Below it, the calls take longer than the bytes.
_MIN_BYTES = 128 << 10
# Many short ones: rows of zeros are found by their share.
_SAMPLES = 32
_SAMPLE_ELEMENTS = 64
_SAMPLE_COVERED = 7 / 8
_NOISE = 0.95


def find_base(floats: Floats, level: int, scratch: Scratch) -> int | None:
    """The base for a block, by a sample of it; ``None`` where byte planes suit it better: small, exponents spread, mantissas shrink."""
    if floats.num_bytes < _MIN_BYTES:
        return None
    per_sample = floats.num_floats // _SAMPLES
    sample = floats.sample(range(0, _SAMPLES * per_sample, per_sample), _SAMPLE_ELEMENTS, scratch).view(np.uint16)
    top = sample[:, -1]
    ends = np.cumsum(np.bincount(top >> 7 & 0xFF, minlength=256))
    covered = ends[NUM_CODES - 1 :].copy()
    covered[1:] -= ends[:-NUM_CODES]
    base = int(covered.argmax())
    if covered[base] < _SAMPLE_COVERED * len(sample):
        return None
    # Seven bits of mantissa and, to fill the byte, one of another's: a sign that is always the same must not look like a gain.
    noise = (top & 0x7F | top[::-1] << 7).astype(np.uint8)
    if floats.itemsize == 4:
        noise = np.concatenate((noise, np.ascontiguousarray(sample[:, 0]).view(np.uint8)))
    return base if len(scratch.exponent_compressor(level).compress(noise.data)) >= _NOISE * noise.nbytes else None


def encode(floats: RawFloats | PairedFloats, base: int, level: int, scratch: Scratch) -> tuple[memoryview, ...] | None:
    """The payload of a block in parts, or ``None`` where too many exponents lie outside the codes.

    Args:
        floats: the block, of an item size of 2 or 4.
        base: the smallest exponent that has a code.
        level: 1 for the parameters tuned for exponents, else the zstd level.
        scratch: the parts point into it, or into the block, until either is used again.
    """
    count = num_pairs(floats.num_floats)
    max_outside = int(2 * count * _MAX_OUTSIDE)
    content = scratch.buffer("paired content", count + 3 * max_outside)
    taken = floats.pair(base, content[:count], max_outside, scratch)
    if taken is None:
        return None
    pairs, found = taken
    positions, exponents = found.positions, found.exponents
    if len(positions) and np.diff(positions, prepend=-1).max() > _MAX_GAP + 1:
        # Two sorted runs: a stable sort merges them, where union1d would take longer than all else.
        positions = np.sort(np.concatenate((positions, np.arange(0, positions[-1], _MAX_GAP + 1))), kind="stable")
        positions = positions[np.diff(positions, prepend=-1) > 0]
        exponents = floats.exponents_of(positions)
    if 3 * len(positions) > len(content) - count:
        return None
    content = content[: count + 3 * len(positions)]
    gaps = np.diff(positions, prepend=-1) - 1
    listed = content[count:].reshape(3, -1)
    listed[0], listed[1], listed[2] = gaps & 0xFF, gaps >> 8, exponents
    frame = scratch.exponent_compressor(level).compress(content.data)
    is_folded = not found.has_signs
    rest = pair_loops.fold(pairs.rest, scratch) if is_folded else pairs.rest
    header = _HEADER.pack(floats.itemsize, 0, base, is_folded, len(frame), len(positions), 0)
    parts = (memoryview(header), pairs.low.data, rest.data, floats.tail, memoryview(frame))
    return tuple(part.cast("B") for part in parts if part.nbytes)


@dataclass(frozen=True, slots=True)
class _Payload:
    base: int
    low: U16s
    rest: U16s
    is_folded: bool
    tail: memoryview
    frame: memoryview
    num_outside: int


def decode(stored: memoryview, out: memoryview, itemsize: int, scratch: Scratch) -> None:
    """Decode a payload into exactly ``out``.

    Raises:
        MalformedCheckpointError: the payload breaks a rule of its layout.
    """
    words = np.frombuffer(out, np.uint16).reshape(-1, itemsize // 2)
    count = num_pairs(len(words))
    payload = _parse(stored, len(words), itemsize, count)
    rest = pair_loops.unfold(payload.rest, count, scratch) if payload.is_folded else payload.rest
    content = scratch.buffer("paired content", count + 3 * payload.num_outside)
    decompress_into(scratch.decompressor, payload.frame, content.data)
    pair_loops.unpair(Pairs(itemsize, payload.base, content[:count], payload.low, rest), out, scratch)
    out[2 * count * itemsize :] = payload.tail
    if payload.num_outside:
        _put_outside(content[count:].reshape(3, -1), words[: 2 * count, -1])


def _parse(stored: memoryview, num_elements: int, itemsize: int, count: int) -> _Payload:
    if len(stored) < _HEADER.size:
        raise MalformedCheckpointError("paired block without its header", found=f"{len(stored)} bytes")
    found_itemsize, layout, base, is_folded, frame_bytes, num_outside, zero = _HEADER.unpack_from(stored)
    low_bytes = 4 * count if itemsize == 4 else 0
    tail_bytes = (num_elements - 2 * count) * itemsize
    rest_at = _HEADER.size + low_bytes
    rest_words = count // 8 * 7 if is_folded else count
    tail_at = rest_at + 2 * rest_words
    frame_at = tail_at + tail_bytes
    if (
        (found_itemsize, layout, zero) != (itemsize, 0, 0)
        or is_folded > 1
        or base > _MAX_BASE
        or num_outside > 2 * count * _MAX_OUTSIDE
        or not count
        or frame_at + frame_bytes != len(stored)
    ):
        raise MalformedCheckpointError(
            "paired block with an inconsistent header",
            expected=f"{num_elements} floats of {itemsize} bytes in {len(stored)} bytes",
            found=f"{found_itemsize} bytes, layout {layout}, base {base}, frame of {frame_bytes} bytes, {num_outside} outside",
        )
    low = np.frombuffer(stored, np.uint16, low_bytes // 2, _HEADER.size)
    rest = np.frombuffer(stored, np.uint16, rest_words, rest_at)
    return _Payload(base, low, rest, bool(is_folded), stored[tail_at:frame_at], stored[frame_at:], num_outside)


def _put_outside(outside: U8s, tops: U16s) -> None:
    """Give the floats that have no code their exponents."""
    positions = np.cumsum(outside[0] + (outside[1].astype(np.int64) << 8) + 1) - 1
    if positions[-1] >= len(tops):
        raise MalformedCheckpointError(
            "paired block with exponents beyond its end", expected=f"within {len(tops)} floats", found=f"of float {positions[-1]}"
        )
    tops[positions] = tops[positions] & _REST | outside[2].astype(np.uint16) << 7
