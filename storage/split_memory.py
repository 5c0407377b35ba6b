"""Floats in a staging buffer that a device has taken apart: found by their address, as leases are, and joined for whoever wants values.

A run of such memory is a tensor's bytes, block by block from its beginning. A chunk whose blocks are blocks of the run needs no more than
to be encoded; of every other one (a part of a tensor that begins within a block, columns) a plain copy is made.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from dcp_engine.leases import SplitRun, split_run_at
from dcp_engine.storage import dtypes
from dcp_engine.storage.codecs import Scratch, SplitFloats, split_floats
from dcp_engine.storage.limits import BLOCK_BYTES, PACK_BYTES

__all__ = ["chunk_tensor", "staged_block"]


def chunk_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What a chunk of a tensor may be loaded from.

    Args:
        tensor: any.

    Returns:
        ``tensor`` itself where its memory holds its values, or blocks that :func:`staged_block` knows; else a copy of its values.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
        return tensor
    run = split_run_at(tensor.data_ptr())
    if run is None or _begins_and_ends_with_blocks(tensor, run):
        return tensor
    return _values(tensor, run)


def staged_block(raw: memoryview) -> memoryview | SplitFloats:
    """A block of a chunk that was loaded from :func:`chunk_tensor`'s tensor: itself, or as the floats that a device has taken apart.

    Args:
        raw: the bytes where they lie, or a copy of plain ones.
    """
    run = split_run_at(np.frombuffer(raw, np.uint8).ctypes.data)
    return raw if run is None else split_floats(raw, dtypes.of_code(run.code))


def _begins_and_ends_with_blocks(tensor: torch.Tensor, run: SplitRun) -> bool:
    """Whether the blocks of its chunk are blocks of the run; smaller chunks than those that have blocks of their own are joined."""
    begin = tensor.data_ptr() - run.start
    ends_well = tensor.nbytes % BLOCK_BYTES == 0 or begin + tensor.nbytes == run.num_bytes
    return tensor.is_contiguous() and tensor.nbytes >= PACK_BYTES and begin % BLOCK_BYTES == 0 and ends_well


def _values(tensor: torch.Tensor, run: SplitRun) -> torch.Tensor:
    """A copy of a tensor whose memory lies in a run, from the blocks that it touches."""
    itemsize = tensor.dtype.itemsize
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    offset = tensor.data_ptr() - run.start
    first = offset // BLOCK_BYTES * BLOCK_BYTES
    stop = min(-(-(offset + span * itemsize) // BLOCK_BYTES) * BLOCK_BYTES, run.num_bytes)
    memory = memoryview((ctypes.c_uint8 * (stop - first)).from_address(run.start + first)).cast("B")
    out = np.empty(stop - first, np.uint8)
    scratch = Scratch()
    for begin in range(0, stop - first, BLOCK_BYTES):
        end = min(begin + BLOCK_BYTES, stop - first)
        split_floats(memory[begin:end], dtypes.of_code(run.code)).join(out.data[begin:end], scratch)
    return torch.from_numpy(out).view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), (offset - first) // itemsize)
