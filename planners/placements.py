"""Which elements of a DTensor its placements leave to a rank. Pure: no tensors.

DTensor's own answer is one box per rank, which is wrong where a rank's rows are not contiguous. Here each dimension keeps the runs of
global indices that the rank holds, and every placement splits them, from the first mesh dimension to the last:

- ``Shard`` as ``torch.chunk`` does;
- ``_StridedShard`` first into ``split_factor`` pieces, then each piece over the mesh dimension, as torch 2.13's
  ``local_shard_size_and_offset`` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dcp_engine.planners.geometry import run_boxes

__all__ = ["Shape", "Split", "local_boxes", "local_runs", "split_orders"]

Shape = tuple[int, ...]
Runs = tuple[tuple[int, int], ...]
Boxes = tuple[tuple[Shape, Shape, Shape], ...]


@dataclass(frozen=True, slots=True)
class Split:
    """One placement that divides a dimension: ``dim`` over the mesh dimension, first into ``pieces`` (1: a plain ``Shard``)."""

    dim: int
    num_parts: int
    part: int
    pieces: int = 1


def local_runs(size: int, splits: Sequence[Split]) -> Runs:
    """Runs ``(start, length)`` of global indices that remain of ``range(size)`` after every split, in local order, none empty."""
    runs: Runs = ((0, size),) if size else ()
    for split in splits:
        length = sum(run[1] for run in runs)
        parts: list[tuple[int, int]] = []
        for piece in range(split.pieces):
            begin, end = _chunk(length, split.pieces, piece)
            first, last = _chunk(end - begin, split.num_parts, split.part)
            parts += _take(runs, begin + first, begin + last)
        runs = _merged(parts)
    return runs


def _chunk(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Begin and end of one chunk of ``torch.chunk``, which may be empty."""
    full = -(-length // num_chunks)
    return min(length, full * index), min(length, full * (index + 1))


def _take(runs: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The elements at local positions ``begin:end``."""
    taken = []
    position = 0
    for start, length in runs:
        first, last = max(begin - position, 0), min(end - position, length)
        if first < last:
            taken.append((start + first, last - first))
        position += length
    return taken


def _merged(parts: Sequence[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for start, length in parts:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


@lru_cache(maxsize=4096)
def local_boxes(global_shape: Shape, splits: tuple[Split, ...]) -> tuple[Shape, Boxes]:
    """Local shape, and per box its global offsets, sizes and local offsets. Pure."""
    runs = [local_runs(size, [split for split in splits if split.dim == dim]) for dim, size in enumerate(global_shape)]
    rows = zip(*(array.tolist() for array in run_boxes(runs)), strict=True)
    boxes = tuple((tuple(offsets), tuple(sizes), tuple(local)) for offsets, sizes, local in rows)
    return tuple(sum(run[1] for run in axis) for axis in runs), boxes


def split_orders(splits: tuple[Split, ...]) -> list[tuple[Split, ...]]:
    """The orders in which the placements may have divided the tensor.

    FSDP2 over TP divides the TP shard once more and records that as ``_StridedShard`` before the TP ``Shard``. Read from left to right,
    that gives other rows for a few uneven sizes (9 rows on 4 x 2: the last row moves to another TP rank). Where they differ, the local
    shape tells what was done.
    """
    for position, split in enumerate(splits):
        later = [other for other in splits[position + 1 :] if other.dim == split.dim]
        if split.pieces > 1 and split.pieces == math.prod([other.num_parts for other in later]):
            others = [other for other in splits if other is not split]
            return [(*others, Split(split.dim, split.num_parts, split.part)), splits]
    return [splits]
