"""The loops of the codecs that are worth compiling, and which of them this process runs: the compiled ones where they are there."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import numpy as np

from dcp_engine.storage.codecs.pairing import NumpyLoops, Outside, PairLoops, Pairs
from dcp_engine.storage.codecs.scratch import Scratch

try:
    import dcp_engine.storage._kernels as compiled
except ImportError:  # installed without a C compiler
    compiled = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from dcp_engine.storage.codecs.pairing import Positions, U8s, U16s

__all__ = ["CompiledLoops", "is_compiled", "pair_loops"]

VARIABLE = "DCP_ENGINE_KERNELS"
"""Environment variable that switches the compiled loops off with ``0``."""

_SIGNS = 0x8080


class CompiledLoops:
    """See :class:`~dcp_engine.storage.codecs.pairing.PairLoops`: one pass over the block, without the GIL."""

    def pair(self, raw: memoryview, pairs: Pairs, max_outside: int, scratch: Scratch) -> Outside | None:
        """Both halves may have all that is outside, so there is room for twice as many."""
        positions = scratch.buffer("paired positions", 16 * max_outside).view(np.int64)
        exponents = scratch.buffer("paired exponents", 2 * max_outside)
        num_outside, bits = compiled.pair(
            raw, pairs.itemsize, len(pairs.codes), pairs.base, pairs.low, pairs.rest, pairs.codes, positions, exponents
        )
        if not 0 <= num_outside <= max_outside:
            return None
        return Outside(positions[:num_outside], exponents[:num_outside], bool(bits & _SIGNS))

    def code(self, exponents: U8s, base: int, codes: U8s, max_outside: int, scratch: Scratch) -> tuple[Positions, U8s] | None:
        """As :meth:`pair`."""
        positions = scratch.buffer("paired positions", 16 * max_outside).view(np.int64)
        outside = scratch.buffer("paired exponents", 2 * max_outside)
        num_outside = compiled.code(exponents, len(codes), base, codes, positions, outside)
        return (positions[:num_outside], outside[:num_outside]) if 0 <= num_outside <= max_outside else None

    def unpair(self, pairs: Pairs, out: memoryview, scratch: Scratch) -> None:
        """Straight into ``out``."""
        compiled.unpair(out, pairs.itemsize, len(pairs.codes), pairs.base, pairs.low, pairs.rest, pairs.codes)

    def fold(self, rest: U16s, scratch: Scratch) -> U16s:
        """In place."""
        compiled.fold(rest)
        return rest[: len(rest) // 8 * 7]

    def unfold(self, folded: U16s, num_pairs: int, scratch: Scratch) -> U16s:
        """To the scratch."""
        rest = scratch.buffer("paired rest", 2 * num_pairs).view(np.uint16)
        compiled.unfold(folded, rest)
        return rest


def is_compiled() -> bool:
    """Whether the compiled loops are there and wanted."""
    return compiled is not None and sys.byteorder == "little" and os.environ.get(VARIABLE, "1") != "0"


pair_loops: PairLoops = CompiledLoops() if is_compiled() else NumpyLoops()
"""What the codec runs."""
