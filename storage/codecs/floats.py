"""The floats of a block as a codec takes them: as they lie in memory, or as a device has taken them apart before they came to the host.

A device moves the bytes of a block of floats to where a layout of the planes codec wants them, without knowing what is in them: the result
is as long as the block, and the block can be had back. What depends on the content (which layout, which base, what is compressed) is
decided by the codec, so that the same bytes are stored whichever way a block came.
``docs/decisions/0025-floats-taken-apart-on-the-device.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from dcp_engine.storage.codecs.kernels import pair_loops
from dcp_engine.storage.codecs.pairing import Outside, Pairs, joined_pairs
from dcp_engine.storage.codecs.plane_loops import join_planes, split_planes
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.dtypes import DtypeInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8s = NDArray[np.uint8]
    U16s = NDArray[np.uint16]

__all__ = ["Floats", "PairedFloats", "PlaneFloats", "RawFloats", "SplitFloats", "SplitLayout", "num_pairs", "split_floats", "split_layout"]

SplitLayout: TypeAlias = Literal["paired", "planes"]
"""How a device takes a block of ``n`` floats apart; bits are named as in ``docs/format.md``, section 9.

``"paired"``, with ``h`` pairs: the lower 16 bits of the ``2h`` floats where they have 4 bytes, the rests of the pairs, the exponents of the
``2h`` floats, one byte each, and the tail. ``"planes"``: the byte planes, plane 0 first.
"""

_SIGNS = 0x8080
_REST = 0x807F
# Where nothing is negative all rests have to be looked at; where floats have signs, the first few show one.
_FEW_WORDS: Final = 4096


def num_pairs(num_floats: int) -> int:
    """Whole 64-bit words of codes; what is left over, at most 15 floats, is the tail, stored as it is."""
    return num_floats // 16 * 8


def split_layout(dtype: DtypeInfo) -> SplitLayout | None:
    """What nearly all blocks of a dtype are stored as; ``None`` where nothing is to be taken apart."""
    if dtype.plane_itemsize < 2:
        return None
    return "paired" if dtype.name == "bfloat16" or dtype.plane_itemsize == 4 else "planes"


class RawFloats:
    """Floats as they lie in memory.

    Args:
        raw: contiguous bytes, a multiple of the item size.
        itemsize: bytes of a float.
    """

    def __init__(self, raw: memoryview, itemsize: int) -> None:
        self.raw = raw
        self.itemsize = itemsize
        self.num_floats = len(raw) // itemsize

    @property
    def num_bytes(self) -> int:
        """Of the block."""
        return len(self.raw)

    @property
    def tail(self) -> memoryview:
        """The floats that have no pair."""
        return self.raw[2 * num_pairs(self.num_floats) * self.itemsize :]

    def sample(self, starts: Sequence[int], count: int, scratch: Scratch) -> U8s:
        """Runs of ``count`` floats, as bytes ``[len(starts) * count, itemsize]``; for item sizes of 2 and 4 none in the tail."""
        elements = np.frombuffer(self.raw, np.uint8).reshape(-1, self.itemsize)
        return np.concatenate([elements[start : start + count] for start in starts])

    def pair(self, base: int, codes: U8s, max_outside: int, scratch: Scratch) -> tuple[Pairs, Outside] | None:
        """Take them apart for the paired layout: see :class:`~dcp_engine.storage.codecs.pairing.PairLoops`. ``rest`` may be overwritten
        where nothing has a sign.
        """
        count = len(codes)
        low = scratch.buffer("paired low", 4 * count if self.itemsize == 4 else 0).view(np.uint16)
        rest = scratch.buffer("paired rest", 2 * count).view(np.uint16)
        pairs = Pairs(self.itemsize, base, codes, low, rest)
        found = pair_loops.pair(self.raw, pairs, max_outside, scratch)
        return None if found is None else (pairs, found)

    def exponents_of(self, positions: NDArray[np.int64]) -> U8s:
        """Bits 14 to 7 of the upper 16 bits of single floats."""
        words = np.frombuffer(self.raw, np.uint16)
        width = self.itemsize // 2
        return (words[positions * width + width - 1] >> 7).astype(np.uint8)

    def planes(self, scratch: Scratch) -> U8s:
        """Their byte planes, ``[itemsize, num_floats]``."""
        return split_planes(np.frombuffer(self.raw, np.uint8).reshape(-1, self.itemsize), scratch, "planes")

    def for_pairs(self, scratch: Scratch) -> RawFloats:
        """Itself."""
        return self

    def for_planes(self, scratch: Scratch) -> RawFloats:
        """Itself."""
        return self


class PairedFloats:
    """Floats taken apart for the paired layout.

    Args:
        split: contiguous bytes in the layout ``"paired"``. Read only.
        itemsize: bytes of a float: 2 or 4.
    """

    def __init__(self, split: memoryview, itemsize: int) -> None:
        self.itemsize = itemsize
        self.num_bytes = len(split)
        self.num_floats = len(split) // itemsize
        self._num_pairs = count = num_pairs(self.num_floats)
        low_words = 2 * count if itemsize == 4 else 0
        self._low = np.frombuffer(split, np.uint16, low_words)
        self._rest = np.frombuffer(split, np.uint16, count, 2 * low_words)
        self._exponents = np.frombuffer(split, np.uint8, 2 * count, 2 * low_words + 2 * count)
        self.tail = split[2 * count * itemsize :]

    def sample(self, starts: Sequence[int], count: int, scratch: Scratch) -> U8s:
        """See :class:`RawFloats`."""
        positions = (np.array(starts)[:, None] + np.arange(count)).reshape(-1)
        is_second = positions >= self._num_pairs
        rests = self._rest[positions - self._num_pairs * is_second]
        words = np.empty((len(positions), self.itemsize // 2), np.uint16)
        words[:, -1] = np.where(is_second, rests.byteswap(), rests) & _REST | self._exponents[positions].astype(np.uint16) << 7
        if self.itemsize == 4:
            words[:, 0] = self._low[positions]
        return words.view(np.uint8)

    def pair(self, base: int, codes: U8s, max_outside: int, scratch: Scratch) -> tuple[Pairs, Outside] | None:
        """See :class:`RawFloats`. What the device has made is used as it lies, unless it is going to be overwritten."""
        found = pair_loops.code(self._exponents, base, codes, max_outside, scratch)
        if found is None:
            return None
        rest = self._rest
        has_signs = _any_sign(rest[:_FEW_WORDS]) or _any_sign(rest)
        if not has_signs:
            rest = scratch.buffer("paired rest", rest.nbytes).view(np.uint16)
            np.copyto(rest, self._rest)
        return Pairs(self.itemsize, base, codes, self._low, rest), Outside(*found, has_signs)

    def exponents_of(self, positions: NDArray[np.int64]) -> U8s:
        """See :class:`RawFloats`."""
        return self._exponents[positions]

    def join(self, out: memoryview, scratch: Scratch) -> None:
        """The block as it was, to ``out``."""
        joined_pairs(self._exponents, self._rest, self._low, out[: self.num_bytes - len(self.tail)], scratch)
        out[self.num_bytes - len(self.tail) :] = self.tail

    def for_pairs(self, scratch: Scratch) -> PairedFloats:
        """Itself."""
        return self

    def for_planes(self, scratch: Scratch) -> RawFloats:
        """As they were, in memory of the scratch."""
        return _joined(self, scratch)


class PlaneFloats:
    """Floats taken apart into byte planes.

    Args:
        split: contiguous bytes in the layout ``"planes"``. Read only.
        itemsize: bytes of a float: even.
    """

    def __init__(self, split: memoryview, itemsize: int) -> None:
        self.itemsize = itemsize
        self.num_bytes = len(split)
        self.num_floats = len(split) // itemsize
        self._planes = np.frombuffer(split, np.uint8).reshape(itemsize, -1)

    def sample(self, starts: Sequence[int], count: int, scratch: Scratch) -> U8s:
        """See :class:`RawFloats`."""
        planes = np.concatenate([self._planes[:, start : start + count] for start in starts], axis=1)
        elements = np.empty((planes.shape[1], self.itemsize), np.uint8)
        join_planes(list(planes), elements, scratch)
        return elements

    def planes(self, scratch: Scratch) -> U8s:
        """See :class:`RawFloats`."""
        return self._planes

    def join(self, out: memoryview, scratch: Scratch) -> None:
        """The block as it was, to ``out``."""
        join_planes(list(self._planes), np.frombuffer(out, np.uint8).reshape(-1, self.itemsize), scratch)

    def for_pairs(self, scratch: Scratch) -> RawFloats:
        """As they were, in memory of the scratch."""
        return _joined(self, scratch)

    def for_planes(self, scratch: Scratch) -> PlaneFloats:
        """Itself."""
        return self


SplitFloats: TypeAlias = PairedFloats | PlaneFloats
"""A block that a device has taken apart."""
Floats: TypeAlias = RawFloats | SplitFloats


def split_floats(split: memoryview, dtype: DtypeInfo) -> SplitFloats:
    """A block that a device has taken apart, in the layout of its dtype, which has one."""
    layout = split_layout(dtype)
    assert layout is not None, "only floats of several bytes are taken apart"
    return PairedFloats(split, dtype.plane_itemsize) if layout == "paired" else PlaneFloats(split, dtype.plane_itemsize)


def _joined(floats: SplitFloats, scratch: Scratch) -> RawFloats:
    raw = scratch.buffer("joined floats", floats.num_bytes).data
    floats.join(raw, scratch)
    return RawFloats(raw, floats.itemsize)


def _any_sign(rest: U16s) -> bool:
    return bool(np.bitwise_or.reduce(rest.view(np.uint64) if len(rest) % 4 == 0 else rest) & _ALL_SIGNS)


_ALL_SIGNS = np.uint64(_SIGNS * 0x0001000100010001)
