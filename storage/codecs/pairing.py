"""The loops of the paired layout in numpy: they run where the compiled ones are not there, and say what those must do.

Floats are paired over half a block, not side by side: everything is then shifts and masks of whole contiguous arrays, and casts that narrow
and widen them, which are numpy's fastest loops (up to ten times those over strided bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from dcp_engine.storage.codecs.scratch import Scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8s = NDArray[np.uint8]
    U16s = NDArray[np.uint16]
    Positions = NDArray[np.int64]

__all__ = ["NUM_CODES", "NumpyLoops", "Outside", "PairLoops", "Pairs", "joined_pairs"]

NUM_CODES: Final = 16
_CODES = 0x0F0F0F0F0F0F0F0F
_REST = 0x807F
_SWAPPED_REST = 0x7F80
_SIGNS = 0x8080
_MANTISSAS = 0x7F7F
# How far each of seven parts of the rest takes a bit of the eighth to the place of a sign.
_FOLDS = np.arange(7, 0, -1, dtype=np.uint16)[:, None]
# Pairs of one pass: what a tile needs stays in the cache of a core, and a call of numpy hardly counts.
_TILE = 64 << 10


@dataclass(frozen=True, slots=True)
class Pairs:
    """A block's floats taken apart, but for those that :class:`Outside` lists.

    Attributes:
        itemsize: of a float: 2 or 4.
        base: the smallest exponent that has a code.
        codes: two codes a byte, ``[num_pairs]``.
        low: lower halves of 4-byte floats, ``[2 * num_pairs]``; empty otherwise.
        rest: signs and mantissas, ``[num_pairs]``.
    """

    itemsize: int
    base: int
    codes: U8s
    low: U16s
    rest: U16s


@dataclass(frozen=True, slots=True)
class Outside:
    """The floats whose exponents have no code, and what else was seen on the way.

    Attributes:
        positions: of these floats, ascending.
        exponents: of these floats.
        has_signs: whether any float of the block is negative.
    """

    positions: Positions
    exponents: U8s
    has_signs: bool


class PairLoops(Protocol):
    """The loops over a block. Thread-safe with a scratch for each thread."""

    def pair(self, raw: memoryview, pairs: Pairs, max_outside: int, scratch: Scratch) -> Outside | None:
        """Takes floats apart.

        Args:
            raw: contiguous bytes of at least ``2 * num_pairs`` floats.
            pairs: its arrays receive them.
            max_outside: floats without a code that are worth listing.
            scratch: of this thread.

        Returns:
            ``None`` where there are more of them.
        """
        ...

    def code(self, exponents: U8s, base: int, codes: U8s, max_outside: int, scratch: Scratch) -> tuple[Positions, U8s] | None:
        """What :meth:`pair` does with the exponents, of floats that came apart.

        Args:
            exponents: of all floats of the block that have a pair, ``[2 * num_pairs]``.
            base: the smallest one that has a code.
            codes: receives two of them a byte, ``[num_pairs]``.
            max_outside: floats without a code that are worth listing.
            scratch: of this thread.

        Returns:
            Positions and exponents of the floats without a code; ``None`` where there are more of them.
        """
        ...

    def unpair(self, pairs: Pairs, out: memoryview, scratch: Scratch) -> None:
        """The inverse of :meth:`pair`, but for floats without a code."""
        ...

    def fold(self, rest: U16s, scratch: Scratch) -> U16s:
        """Without signs, the last eighth fits where the signs of the others were: what is left of ``rest``, in its own memory."""
        ...

    def unfold(self, folded: U16s, num_pairs: int, scratch: Scratch) -> U16s:
        """The inverse of :meth:`fold`, in memory of the scratch."""
        ...


class NumpyLoops:
    """See :class:`PairLoops`."""

    def pair(self, raw: memoryview, pairs: Pairs, max_outside: int, scratch: Scratch) -> Outside | None:
        """Tile by tile."""
        num_pairs = len(pairs.codes)
        tiles = _Tiles(scratch, num_pairs, pairs.base)
        for start in range(0, num_pairs, _TILE):
            stop = min(start + _TILE, num_pairs)
            first, second = (tiles.tops(raw, pairs.itemsize, begin, stop - start, pairs.low) for begin in (start, num_pairs + start))
            tiles.take_codes(first, second, start, pairs.codes[start:stop])
            tiles.take_rest(first, second, pairs.rest[start:stop])
            if tiles.num_outside > max_outside:
                return None
        positions, exponents = tiles.outside(num_pairs)
        if len(positions) > max_outside:
            return None
        return Outside(positions, exponents, bool(np.bitwise_or.reduce(pairs.rest) & _SIGNS))

    def code(self, exponents: U8s, base: int, codes: U8s, max_outside: int, scratch: Scratch) -> tuple[Positions, U8s] | None:
        """Tile by tile."""
        num_pairs = len(codes)
        tiles = _Tiles(scratch, num_pairs, base)
        for start in range(0, num_pairs, _TILE):
            stop = min(start + _TILE, num_pairs)
            tiles.pack_codes(exponents[start:stop], exponents[num_pairs + start : num_pairs + stop], start, codes[start:stop])
            if tiles.num_outside > max_outside:
                return None
        positions, found = tiles.outside(num_pairs)
        return None if len(positions) > max_outside else (positions, found)

    def unpair(self, pairs: Pairs, out: memoryview, scratch: Scratch) -> None:
        """Tile by tile."""
        num_pairs, itemsize = len(pairs.codes), pairs.itemsize
        words = np.frombuffer(out, np.uint16).reshape(-1, itemsize // 2)
        exponents = scratch.buffer("paired codes", 2 * min(num_pairs, _TILE))
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
            _spread_codes(pairs.codes[start:stop], pairs.base, exponents[: 2 * count])
            np.copyto(tops[: 2 * count], exponents[: 2 * count])
            np.left_shift(tops[: 2 * count], 7, out=tops[: 2 * count])
            _join_tops(tops[: 2 * count], pairs.rest[start:stop], spare[:count], first, second)
            if itemsize == 4:
                for place, top in zip(places, (first, second), strict=True):
                    _join_low(out, place, top, pairs.low[place : place + count])

    def fold(self, rest: U16s, scratch: Scratch) -> U16s:
        """Part by part."""
        parts = rest.reshape(8, -1)
        moved = scratch.buffer("paired folds", rest.nbytes).view(np.uint16).reshape(8, -1)[:7]
        np.left_shift(parts[7], _FOLDS, out=moved)
        np.bitwise_and(moved, _SIGNS, out=moved)
        np.bitwise_or(parts[:7], moved, out=parts[:7])
        return parts[:7].reshape(-1)

    def unfold(self, folded: U16s, num_pairs: int, scratch: Scratch) -> U16s:
        """Part by part."""
        rest = scratch.buffer("paired rest", 2 * num_pairs).view(np.uint16)
        parts, stored = rest.reshape(8, -1), folded.reshape(7, -1)
        np.bitwise_and(stored, _SIGNS, out=parts[:7])
        np.right_shift(parts[:7], _FOLDS, out=parts[:7])
        np.bitwise_or.reduce(parts[:7], axis=0, out=parts[7])
        np.bitwise_and(stored, _MANTISSAS, out=parts[:7])
        return rest


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
        first, second = self._codes[:count], self._codes[count : 2 * count]
        for tops, part in ((first_tops, first), (second_tops, second)):
            np.right_shift(tops, 7, out=self._spare[:count])
            np.copyto(part, self._spare[:count], casting="unsafe")
        self.pack_codes(first, second, start, out)

    def pack_codes(self, first_exponents: U8s, second_exponents: U8s, start: int, out: U8s) -> None:
        """As :meth:`take_codes`, of exponents."""
        count = len(out)
        first, second = self._codes[:count], self._codes[count : 2 * count]
        np.subtract(first_exponents, self._base, out=first)
        np.subtract(second_exponents, self._base, out=second)
        # Looked for by pairs: to find the few is a good part of the work.
        np.bitwise_or(first.view(np.uint64), second.view(np.uint64), out=out.view(np.uint64))
        is_outside = self._is_outside[:count]
        np.greater(out, NUM_CODES - 1, out=is_outside)
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
        is_first, is_second = first >= NUM_CODES, second >= NUM_CODES
        positions = np.concatenate((pairs[is_first], pairs[is_second] + num_pairs))
        return positions, np.concatenate((first[is_first], second[is_second])) + np.uint8(self._base)


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


def joined_pairs(exponents: U8s, rest: U16s, low: U16s, out: memoryview, scratch: Scratch) -> None:
    """Whole floats of exponents, rests and lower halves that nothing is missing of; ``low`` is empty for floats of two bytes.

    Args:
        exponents: ``[2 * num_pairs]``.
        rest: ``[num_pairs]``.
        low: ``[2 * num_pairs]`` or none.
        out: contiguous bytes of exactly these floats.
        scratch: of this thread.
    """
    num_pairs = len(rest)
    floats = np.frombuffer(out, np.uint16)
    room = min(num_pairs, _TILE)
    tops = scratch.buffer("paired tops", 4 * room).view(np.uint16)
    spare = scratch.buffer("paired spare", 2 * room).view(np.uint16)
    for start in range(0, num_pairs, _TILE):
        stop = min(start + _TILE, num_pairs)
        count = stop - start
        first, second = tops[:count], tops[count : 2 * count]
        np.copyto(first, exponents[start:stop])
        np.copyto(second, exponents[num_pairs + start : num_pairs + stop])
        np.left_shift(tops[: 2 * count], 7, out=tops[: 2 * count])
        _join_tops(tops[: 2 * count], rest[start:stop], spare[:count], first, second)
        for place, top in ((start, first), (num_pairs + start, second)):
            if len(low):
                _join_low(out, place, top, low[place : place + count])
            else:
                np.copyto(floats[place : place + count], top)


def _join_low(out: memoryview, begin: int, tops: U16s, low: U16s) -> None:
    """Floats from ``begin`` on. Widened two bytes further, upper halves land in their places, and clear the next float's lower half."""
    count = len(tops)
    floats = np.frombuffer(out, np.uint32, count, 4 * begin)
    np.copyto(np.frombuffer(out, np.uint32, count - 1, 4 * begin + 2), tops[:-1])
    out[4 * begin : 4 * begin + 2] = b"\0\0"
    out[4 * (begin + count) - 2 : 4 * (begin + count)] = int(tops[-1]).to_bytes(2, "little")
    np.bitwise_or(floats, low, out=floats)
