"""The paired layout of the planes codec: two exponents a byte, entropy-coded; signs and mantissas stored as they are, without their holes.

The exponents of nearly all values of a tensor lie within sixteen of each other. So an exponent becomes a code of four bits above a base,
two codes share a byte, and these bytes are one zstd frame: half as many symbols as there are floats, and an entropy coder takes its time by
the symbol. The few exponents outside follow in the same frame. Of two floats the sign and seven bits of mantissa fill the sixteen bits
where the exponents were; the lower sixteen bits of a float32 are stored as they are. Where no float is negative, which is so of Adam's
second moments, the bits of the signs hold the mantissas of an eighth of the floats.

Floats are paired over half a block, not side by side: everything is then shifts and masks of whole contiguous arrays, and casts that narrow
and widen them, which are numpy's fastest loops (up to ten times those over strided bytes).

Payload: ``docs/format.md``, section 9.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dcp_engine.errors import MalformedCheckpointError
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
_NUM_CODES = 16
_MAX_BASE = 256 - _NUM_CODES
_CODES = 0x0F0F0F0F0F0F0F0F
_REST = 0x807F
_SWAPPED_REST = 0x7F80
_SIGNS = 0x8080
_MANTISSAS = 0x7F7F
# How far each of seven parts of the rest takes a bit of the eighth to the place of a sign.
_FOLDS = np.arange(7, 0, -1, dtype=np.uint16)[:, None]
_MAX_GAP = 0xFFFF
# Pairs of one pass: what a tile needs stays in the cache of a core, and a call of numpy hardly counts.
_TILE = 64 << 10
# Floats outside the codes, of all: with more of them, byte planes are smaller and faster.
_MAX_OUTSIDE = 1 / 8

# Below it, the calls take longer than the bytes.
_MIN_BYTES = 128 << 10
# Many short ones: rows of zeros are found by their share.
_SAMPLES = 32
_SAMPLE_ELEMENTS = 64
_SAMPLE_COVERED = 7 / 8
_NOISE = 0.95


def _num_pairs(num_elements: int) -> int:
    """Whole 64-bit words of codes; what is left over, at most 15 floats, is stored as it is."""
    return num_elements // 16 * 8


def find_base(raw: memoryview, itemsize: int, level: int, scratch: Scratch) -> int | None:
    """The base for a block, by a sample of it; ``None`` where byte planes suit it better: small, exponents spread, mantissas shrink."""
    if len(raw) < _MIN_BYTES:
        return None
    words = np.frombuffer(raw, np.uint16).reshape(-1, itemsize // 2)
    per_sample = len(words) // _SAMPLES
    sample = words[: per_sample * _SAMPLES].reshape(_SAMPLES, per_sample, -1)[:, :_SAMPLE_ELEMENTS].reshape(-1, itemsize // 2)
    top = sample[:, -1]
    ends = np.cumsum(np.bincount(top >> 7 & 0xFF, minlength=256))
    covered = ends[_NUM_CODES - 1 :].copy()
    covered[1:] -= ends[:-_NUM_CODES]
    base = int(covered.argmax())
    if covered[base] < _SAMPLE_COVERED * len(sample):
        return None
    # Seven bits of mantissa and, to fill the byte, one of another's: a sign that is always the same must not look like a gain.
    noise = (top & 0x7F | top[::-1] << 7).astype(np.uint8)
    if itemsize == 4:
        noise = np.concatenate((noise, np.ascontiguousarray(sample[:, 0]).view(np.uint8)))
    return base if len(scratch.exponent_compressor(level).compress(noise.data)) >= _NOISE * noise.nbytes else None


def encode(raw: memoryview, itemsize: int, base: int, level: int, scratch: Scratch) -> tuple[memoryview, ...] | None:
    """The payload of a block in parts, or ``None`` where too many exponents lie outside the codes.

    Args:
        raw: contiguous bytes, a multiple of the item size.
        itemsize: of a float: 2 or 4.
        base: the smallest exponent that has a code.
        level: 1 for the parameters tuned for exponents, else the zstd level.
        scratch: the parts point into it until it is used again.
    """
    num_elements = len(raw) // itemsize
    num_pairs = _num_pairs(num_elements)
    low = scratch.buffer("paired low", 4 * num_pairs if itemsize == 4 else 0).view(np.uint16)
    rest = scratch.buffer("paired rest", 2 * num_pairs).view(np.uint16)
    content = scratch.buffer("paired content", num_pairs + 3 * int(2 * num_pairs * _MAX_OUTSIDE))
    tiles = _Tiles(scratch, num_pairs, base)
    for start in range(0, num_pairs, _TILE):
        stop = min(start + _TILE, num_pairs)
        first, second = (tiles.tops(raw, itemsize, begin, stop - start, low) for begin in (start, num_pairs + start))
        tiles.take_codes(first, second, start, content[start:stop])
        tiles.take_rest(first, second, rest[start:stop])
        if tiles.num_outside > 2 * num_pairs * _MAX_OUTSIDE:
            return None
    positions, exponents = tiles.outside(num_pairs)
    if len(positions) and np.diff(positions, prepend=-1).max() > _MAX_GAP + 1:
        # Two sorted runs: a stable sort merges them, where union1d would take longer than all else.
        positions = np.sort(np.concatenate((positions, np.arange(0, positions[-1], _MAX_GAP + 1))), kind="stable")
        positions = positions[np.diff(positions, prepend=-1) > 0]
        exponents = (np.frombuffer(raw, np.uint16)[positions * (itemsize // 2) + itemsize // 2 - 1] >> 7).astype(np.uint8)
    if 3 * len(positions) > len(content) - num_pairs:
        return None
    content = content[: num_pairs + 3 * len(positions)]
    gaps = np.diff(positions, prepend=-1) - 1
    listed = content[num_pairs:].reshape(3, -1)
    listed[0], listed[1], listed[2] = gaps & 0xFF, gaps >> 8, exponents
    frame = scratch.exponent_compressor(level).compress(content.data)
    is_folded = not np.bitwise_or.reduce(rest) & _SIGNS
    if is_folded:
        rest = _fold(rest, scratch)
    header = _HEADER.pack(itemsize, 0, base, is_folded, len(frame), len(positions), 0)
    parts = (memoryview(header), low.data, rest.data, raw[2 * num_pairs * itemsize :], memoryview(frame))
    return tuple(part.cast("B") for part in parts if part.nbytes)


class _Tiles:
    """The working memory of one pass; both floats of the pairs lie one after the other in it."""

    def __init__(self, scratch: Scratch, num_pairs: int, base: int) -> None:
        room = min(num_pairs, _TILE)
        self._base = base
        self._tops = scratch.buffer("paired tops", 4 * room).view(np.uint16).reshape(2, -1)
        self._spare = scratch.buffer("paired spare", 2 * room).view(np.uint16)
        self._codes = scratch.buffer("paired codes", 2 * room)
        self._is_outside = scratch.buffer("paired outside", room).view(np.bool_)
        self._found: list[tuple[Positions, U8s, U8s]] = []
        self.num_outside = 0

    def tops(self, raw: memoryview, itemsize: int, begin: int, count: int, low: U16s) -> U16s:
        """Upper halves of ``count`` floats from ``begin`` on; the lower ones go to their places in ``low``."""
        if itemsize == 2:
            return np.frombuffer(raw, np.uint16, count, 2 * begin)
        tops: U16s = self._tops[2 * begin // len(low)]
        np.copyto(low[begin : begin + count], np.frombuffer(raw, np.uint32, count, 4 * begin), casting="unsafe")
        # Read two bytes further, the upper half is the lower one: narrowing is fast where strides and shifts of 32 bits are not. The last
        # float has nothing behind it.
        np.copyto(tops[: count - 1], np.frombuffer(raw, np.uint32, count - 1, 4 * begin + 2), casting="unsafe")
        tops[count - 1] = int.from_bytes(raw[4 * (begin + count) - 2 : 4 * (begin + count)], "little")
        return tops[:count]

    def take_codes(self, first_tops: U16s, second_tops: U16s, start: int, out: U8s) -> None:
        """Codes of the pairs, of which the first is pair ``start`` of the block, to ``out``."""
        count = len(out)
        codes = self._codes[: 2 * count]
        first, second = codes[:count], codes[count:]
        for tops, part in ((first_tops, first), (second_tops, second)):
            np.right_shift(tops, 7, out=self._spare[:count])
            np.copyto(part, self._spare[:count], casting="unsafe")
        np.subtract(codes, self._base, out=codes)
        # Looked for by pairs: to find the few is a good part of the work.
        np.bitwise_or(first.view(np.uint64), second.view(np.uint64), out=out.view(np.uint64))
        is_outside = self._is_outside[:count]
        np.greater(out, _NUM_CODES - 1, out=is_outside)
        pairs = np.flatnonzero(is_outside)
        firsts, seconds = first[pairs], second[pairs]
        self._found.append((pairs + start, firsts, seconds))
        self.num_outside += len(pairs)
        first[pairs] = firsts & 0xF
        second[pairs] = seconds & 0xF
        np.left_shift(second.view(np.uint64), 4, out=second.view(np.uint64))
        np.bitwise_or(first.view(np.uint64), second.view(np.uint64), out=out.view(np.uint64))

    def take_rest(self, first_tops: U16s, second_tops: U16s, out: U16s) -> None:
        """Signs and mantissas of the pairs to ``out``."""
        spare = self._spare[: len(out)]
        np.copyto(spare.view(">u2"), second_tops)
        np.bitwise_and(spare, _SWAPPED_REST, out=spare)
        np.bitwise_and(first_tops, _REST, out=out)
        np.bitwise_or(out, spare, out=out)

    def outside(self, num_pairs: int) -> tuple[Positions, U8s]:
        """Which floats of the block have no code, and their exponents."""
        pairs, first, second = (np.concatenate(columns) for columns in zip(*self._found, strict=True))
        is_first, is_second = first >= _NUM_CODES, second >= _NUM_CODES
        positions = np.concatenate((pairs[is_first], pairs[is_second] + num_pairs))
        return positions, np.concatenate((first[is_first], second[is_second])) + np.uint8(self._base)


def _fold(rest: U16s, scratch: Scratch) -> U16s:
    """Without signs, the last eighth fits where the signs of the others were."""
    parts = rest.reshape(8, -1)
    moved = scratch.buffer("paired folds", rest.nbytes).view(np.uint16).reshape(8, -1)[:7]
    np.left_shift(parts[7], _FOLDS, out=moved)
    np.bitwise_and(moved, _SIGNS, out=moved)
    np.bitwise_or(parts[:7], moved, out=parts[:7])
    return parts[:7].reshape(-1)


def _unfold(folded: U16s, num_pairs: int, scratch: Scratch) -> U16s:
    """The inverse of :func:`_fold`."""
    rest = scratch.buffer("paired rest", 2 * num_pairs).view(np.uint16)
    parts, stored = rest.reshape(8, -1), folded.reshape(7, -1)
    np.bitwise_and(stored, _SIGNS, out=parts[:7])
    np.right_shift(parts[:7], _FOLDS, out=parts[:7])
    np.bitwise_or.reduce(parts[:7], axis=0, out=parts[7])
    np.bitwise_and(stored, _MANTISSAS, out=parts[:7])
    return rest


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
    num_pairs = _num_pairs(len(words))
    payload = _parse(stored, len(words), itemsize, num_pairs)
    rest = _unfold(payload.rest, num_pairs, scratch) if payload.is_folded else payload.rest
    content = scratch.buffer("paired content", num_pairs + 3 * payload.num_outside)
    decompress_into(scratch.decompressor, payload.frame, content.data)
    codes = scratch.buffer("paired codes", 2 * min(num_pairs, _TILE))
    tops = scratch.buffer("paired tops", 4 * min(num_pairs, _TILE)).view(np.uint16)
    spare = scratch.buffer("paired spare", 2 * min(num_pairs, _TILE)).view(np.uint16)
    for start in range(0, num_pairs, _TILE):
        stop = min(start + _TILE, num_pairs)
        count = stop - start
        places = (start, num_pairs + start)
        if itemsize == 2:
            first, second = (words[place : place + count, 0] for place in places)
        else:
            first, second = tops[:count], tops[count : 2 * count]
        _spread_codes(content[start:stop], payload.base, codes[: 2 * count])
        np.copyto(tops[: 2 * count], codes[: 2 * count])
        np.left_shift(tops[: 2 * count], 7, out=tops[: 2 * count])
        _join_tops(tops[: 2 * count], rest[start:stop], spare[:count], first, second)
        if itemsize == 4:
            for place, top in zip(places, (first, second), strict=True):
                _join_low(out, place, top, payload.low[place : place + count])
    out[2 * num_pairs * itemsize :] = payload.tail
    if payload.num_outside:
        _put_outside(content[num_pairs:].reshape(3, -1), words[: 2 * num_pairs, -1])


def _parse(stored: memoryview, num_elements: int, itemsize: int, num_pairs: int) -> _Payload:
    if len(stored) < _HEADER.size:
        raise MalformedCheckpointError("paired block without its header", found=f"{len(stored)} bytes")
    found_itemsize, layout, base, is_folded, frame_bytes, num_outside, zero = _HEADER.unpack_from(stored)
    low_bytes = 4 * num_pairs if itemsize == 4 else 0
    tail_bytes = (num_elements - 2 * num_pairs) * itemsize
    rest_at = _HEADER.size + low_bytes
    rest_words = num_pairs // 8 * 7 if is_folded else num_pairs
    tail_at = rest_at + 2 * rest_words
    frame_at = tail_at + tail_bytes
    if (
        (found_itemsize, layout, zero) != (itemsize, 0, 0)
        or is_folded > 1
        or base > _MAX_BASE
        or num_outside > 2 * num_pairs * _MAX_OUTSIDE
        or not num_pairs
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


def _spread_codes(pairs: U8s, base: int, out: U8s) -> None:
    """Exponents of first floats, then of second ones."""
    words = pairs.view(np.uint64)
    first, second = out[: len(pairs)].view(np.uint64), out[len(pairs) :].view(np.uint64)
    np.bitwise_and(words, _CODES, out=first)
    np.right_shift(words, 4, out=second)
    np.bitwise_and(second, _CODES, out=second)
    np.add(out, base, out=out)


def _join_tops(exponents: U16s, rest: U16s, spare: U16s, first: U16s, second: U16s) -> None:
    """Upper halves of both floats of the pairs, from exponents that are in their place. Targets may be halves of ``exponents``."""
    np.bitwise_and(rest, _REST, out=spare)
    np.bitwise_or(exponents[: len(rest)], spare, out=first)
    np.copyto(spare.view(">u2"), rest)
    np.bitwise_and(spare, _REST, out=spare)
    np.bitwise_or(exponents[len(rest) :], spare, out=second)


def _join_low(out: memoryview, begin: int, tops: U16s, low: U16s) -> None:
    """Floats from ``begin`` on. Widened two bytes further, upper halves land in their places, and clear the next float's lower half."""
    count = len(tops)
    floats = np.frombuffer(out, np.uint32, count, 4 * begin)
    np.copyto(np.frombuffer(out, np.uint32, count - 1, 4 * begin + 2), tops[:-1])
    out[4 * begin : 4 * begin + 2] = b"\0\0"
    out[4 * (begin + count) - 2 : 4 * (begin + count)] = int(tops[-1]).to_bytes(2, "little")
    np.bitwise_or(floats, low, out=floats)


def _put_outside(outside: U8s, tops: U16s) -> None:
    """Give the floats that have no code their exponents."""
    positions = np.cumsum(outside[0] + (outside[1].astype(np.int64) << 8) + 1) - 1
    if positions[-1] >= len(tops):
        raise MalformedCheckpointError(
            "paired block with exponents beyond its end", expected=f"within {len(tops)} floats", found=f"of float {positions[-1]}"
        )
    tops[positions] = tops[positions] & _REST | outside[2].astype(np.uint16) << 7
