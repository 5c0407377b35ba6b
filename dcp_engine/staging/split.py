"""Takes the floats of large slots apart on their device, so that the host has only to compress them. Knows nothing of streams.

What comes out are the layouts of ``storage.codecs.floats``, block by block. Bytes only move: no sizes depend on what is in them, so that
nothing has to be waited for. All is done by torch's operators, which do the same on every device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

import torch

from dcp_engine.planners.local_shards import may_be_replicated
from dcp_engine.staging.layout import SMALL_BYTES, StagePlan, is_packed
from dcp_engine.staging.state import StagedTensor
from dcp_engine.storage.codecs import split_layout
from dcp_engine.storage.codecs.floats import num_pairs
from dcp_engine.storage.dtypes import DtypeInfo, of_tensor_dtype
from dcp_engine.storage.limits import BLOCK_BYTES

__all__ = ["PIECE_BYTES", "SplitSlots", "pieces", "slots_to_split", "split_blocks"]

PIECE_BYTES = 8 * BLOCK_BYTES
"""What is taken apart at once: bounds the memory that it takes on the device, to about four times as much."""

SplitSlots = Mapping[int, DtypeInfo]
"""Offset of a slot in the buffer -> the floats that it holds, for slots that are taken apart."""

# As the signed numbers that torch shifts and masks.
_REST = 0x807F - 0x10000
_MANTISSA = 0x7F
_LOWER_SIGN = 0x80


def slots_to_split(plan: StagePlan, tensors: Sequence[StagedTensor]) -> dict[int, DtypeInfo]:
    """Which slots can be taken apart.

    Large ones from a device, whose tensors are all of the slot, row by row: then the blocks of the slot are those of the file. And none
    that another rank may hold as well: planners compare what such tensors hold, and cut them where they like.

    Args:
        plan: of the state.
        tensors: the plan's tensors, in its order.
    """
    large = [slot for slot in plan.elsewhere if slot.num_bytes > SMALL_BYTES]
    offsets = [slot.offset for slot in large]
    found: dict[int, DtypeInfo] = {}
    refused: set[int] = set()
    for tensor, view in zip(tensors, plan.views, strict=True):
        index = bisect_right(offsets, view.offset) - 1
        if index < 0 or not tensor.local.numel() or view.offset >= offsets[index] + large[index].num_bytes:
            continue
        slot = large[index]
        is_all = view.offset == slot.offset and tensor.local.nbytes == slot.num_bytes and is_packed(tensor.local.shape, view.stride)
        info = of_tensor_dtype(tensor.local.dtype, tensor=tensor.name)
        fits = is_all and split_layout(info) is not None and not may_be_replicated(tensor.value)
        if not fits or found.setdefault(slot.offset, info) != info:
            refused.add(slot.offset)
    return {offset: info for offset, info in found.items() if offset not in refused}


def pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of what is taken apart at once, of a slot of this length."""
    for begin in range(0, num_bytes, PIECE_BYTES):
        yield begin, min(begin + PIECE_BYTES, num_bytes)


def split_blocks(raw: torch.Tensor, info: DtypeInfo, out: torch.Tensor) -> None:
    """Take floats apart, block by block.

    Args:
        raw: the floats as they lie in memory, little-endian, uint8 of shape ``(num_bytes,)``, contiguous; it begins with a block.
        info: of a dtype that has a layout.
        out: receives them; like ``raw``, on the same device, other memory.
    """
    split_rows = _split_pairs if split_layout(info) == "paired" else _split_planes
    whole = raw.numel() // BLOCK_BYTES * BLOCK_BYTES
    for begin, end, row_bytes in ((0, whole, BLOCK_BYTES), (whole, raw.numel(), raw.numel() - whole)):
        if begin < end:
            split_rows(raw[begin:end].view(-1, row_bytes), info.plane_itemsize, out[begin:end].view(-1, row_bytes))


def _split_pairs(raw: torch.Tensor, itemsize: int, out: torch.Tensor) -> None:
    """Rows to the layout ``"paired"``: lower halves, rests, exponents, tail."""
    count = num_pairs(raw.shape[1] // itemsize)
    words = raw.view(torch.int16).view(len(raw), -1, itemsize // 2)[:, : 2 * count]
    tops = words[:, :, -1]
    rest_at = 0
    if itemsize == 4:
        rest_at = 4 * count
        out[:, :rest_at].view(torch.int16).copy_(words[:, :, 0])
    first, second = tops[:, :count], tops[:, count:]
    # Sign and mantissa of the first float, and of the second with its bytes swapped, so that they share no bit.
    rest = out[:, rest_at : rest_at + 2 * count].view(torch.int16)
    rest.copy_(first & _REST)
    rest |= (second & _MANTISSA) << 8
    rest |= (second >> 8) & _LOWER_SIGN
    exponents_at = rest_at + 2 * count
    out[:, exponents_at : exponents_at + 2 * count].copy_((tops >> 7).bitwise_and_(0xFF))
    out[:, exponents_at + 2 * count :].copy_(raw[:, exponents_at + 2 * count :])


def _split_planes(raw: torch.Tensor, itemsize: int, out: torch.Tensor) -> None:
    """Rows to byte planes, the upper 16 bits of each float rotated left by one, which moves the sign below the exponent."""
    planes = out.view(len(out), itemsize, -1)
    planes.copy_(raw.view(len(raw), -1, itemsize).transpose(1, 2))
    low, high = planes[:, -2], planes[:, -1]
    sign, carried = high >> 7, low >> 7
    torch.bitwise_or(low << 1, sign, out=low)
    torch.bitwise_or(high << 1, carried, out=high)
