"""Byte planes of floats by torch's operators, on whatever device they lie: the codec's layout, bit for bit.

Not on any save's path yet: ``docs/decisions/0022-splitting-on-the-device.md`` says what is missing.
"""

from __future__ import annotations

import torch

__all__ = ["split_blocks"]

_TOP_BIT = 7


def split_blocks(raw: torch.Tensor, itemsize: int, block_bytes: int, out: torch.Tensor) -> None:
    """Split floats into byte planes, block by block, so that no more than two blocks of memory are taken besides.

    Within a block the bytes of equal significance lie together, the least significant first; the top two bytes of each float were rotated
    left by one bit, which moves the sign below the exponent. Floats of one byte stay as they are.

    Args:
        raw: uint8 of shape ``(num_bytes,)``, the floats as they lie in memory, little-endian.
        itemsize: bytes of a float: 1 or an even number.
        block_bytes: length of a block, a multiple of ``itemsize``; the last one may be shorter.
        out: like ``raw``, on the same device; not the same memory.
    """
    for begin in range(0, raw.numel(), block_bytes):
        block = raw[begin : begin + block_bytes]
        planes = out[begin : begin + block_bytes].view(itemsize, -1)
        planes.copy_(block.view(-1, itemsize).t())
        if itemsize > 1:
            low, high = planes[-2], planes[-1]
            sign, carried = high >> _TOP_BIT, low >> _TOP_BIT
            torch.bitwise_or(low << 1, sign, out=low)
            torch.bitwise_or(high << 1, carried, out=high)
