"""Which chunks of a large checkpoint meet the boxes that a rank wants, found for all tensors at once.

What ``load_items`` does tensor by tensor, from records, is done here from columns, to the same items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_engine.planners.catalogue import Entry
from dcp_engine.planners.load_items import tensor_items
from dcp_engine.planners.local_shards import LocalTensor
from dcp_engine.stored_chunks import StoredChunks

__all__ = ["items_of_tensors"]

Int64s = NDArray[np.int64]

_MANY_BOXES = 64
"""A tensor of more boxes than this on one rank is planned alone: every chunk would be held against each of them."""
_PAIRS_AT_ONCE = 1 << 20


def items_of_tensors(reads: Sequence[tuple[LocalTensor, Entry]], stored: StoredChunks | None) -> list[list[ReadItem]]:
    """The reads that fill every box of some tensors once, as of :func:`dcp_engine.planners.load_items.tensor_items`.

    Args:
        reads: what this rank wants, and where it is stored; shapes already agree.
        stored: the chunks of the checkpoint; ``None``: the metadata's records alone tell.

    Returns:
        For each tensor its items, by box.

    Raises:
        CorruptCheckpointError: stored chunks do not cover a wanted box exactly.

    Pure and thread-safe; near linear in boxes and chunks.
    """
    items: list[list[ReadItem]] = [[] for _ in reads]
    alone = set(range(len(reads)))
    if stored is not None:
        few = [number for number, (local, _) in enumerate(reads) if len(local.shards) <= _MANY_BOXES]
        for num_dims in sorted({len(reads[number][0].global_shape) for number in few}):
            same = [number for number in few if len(reads[number][0].global_shape) == num_dims]
            alone -= _add_items(items, reads, same, stored, num_dims)
    for number in sorted(alone):
        local, entry = reads[number]
        assert isinstance(entry.stored, TensorStorageMetadata)
        items[number] = tensor_items(local, entry.owner, entry.stored)
    return items


def _add_items(
    items: list[list[ReadItem]], reads: Sequence[tuple[LocalTensor, Entry]], numbers: Sequence[int], stored: StoredChunks, num_dims: int
) -> set[int]:
    """Add the items of those tensors whose boxes are covered. Returns their numbers; what is wrong with others is not looked at here."""
    boxes = [(number, shard) for number in numbers for shard in range(len(reads[number][0].shards))]
    held = [reads[number][0].shards[shard] for number, shard in boxes]
    offsets = np.array([shard.offsets for shard in held], dtype=np.int64).reshape(len(boxes), num_dims)
    sizes = np.array([shard.sizes for shard in held], dtype=np.int64).reshape(len(boxes), num_dims)
    rows = np.array([stored.rows[reads[number][1].owner] for number, _ in boxes], dtype=np.int64)
    found = [_overlaps(stored, rows[some], offsets[some], sizes[some], some.start) for some in _portions(stored, rows)]
    num_found = np.zeros(len(boxes), dtype=np.int64)
    for overlap in found:
        np.add.at(num_found, overlap.boxes, overlap.sizes.prod(axis=1))
    # The chunks tile the tensor: they cover a box just where what they have of it adds up.
    holes = {boxes[box][0] for box in np.flatnonzero(num_found != sizes.prod(axis=1)).tolist()}
    for overlap in found:
        into_box = (overlap.offsets - offsets[overlap.boxes]).tolist()
        into_chunk = (overlap.offsets - overlap.chunk_offsets).tolist()
        columns = (overlap.boxes.tolist(), into_box, overlap.numbers.tolist(), overlap.chunk_offsets.tolist(), into_chunk)
        for box, dest_offsets, number, chunk, storage_offsets, lengths in zip(*columns, overlap.sizes.tolist(), strict=True):
            read, shard = boxes[box]
            if read in holes:
                continue
            local, entry = reads[read]
            dest = MetadataIndex(local.key, local.shards[shard].offsets, shard)
            source = MetadataIndex(entry.owner, chunk, number)
            places = torch.Size(dest_offsets), source, torch.Size(storage_offsets), torch.Size(lengths)
            items[read].append(ReadItem(LoadItemType.TENSOR, dest, *places))
    return set(numbers) - holes


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Where boxes meet chunks, by box.

    Attributes:
        boxes: number of the box.
        numbers: number of the chunk within its entry.
        chunk_offsets: where the chunk begins in the tensor, ``[n, num_dims]``.
        offsets: where the two meet, in the tensor, ``[n, num_dims]``.
        sizes: of what they share, each at least 1, ``[n, num_dims]``.
    """

    boxes: Int64s
    numbers: Int64s
    chunk_offsets: Int64s
    offsets: Int64s
    sizes: Int64s


def _portions(stored: StoredChunks, rows: Int64s) -> Iterator[slice]:
    """Boxes that are held against their chunks at once: bounds the memory."""
    totals = np.cumsum(stored.starts[rows + 1] - stored.starts[rows])
    begin = 0
    while begin < len(rows):
        done = int(totals[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(totals, done + _PAIRS_AT_ONCE, side="right")))
        yield slice(begin, end)
        begin = end


def _overlaps(stored: StoredChunks, rows: Int64s, offsets: Int64s, sizes: Int64s, first: int) -> _Overlap:
    """Hold each box against all chunks of its entry.

    Args:
        rows: entry of each box.
        offsets, sizes: of the boxes, ``[num_boxes, num_dims]``.
        first: number of the first box.
    """
    counts = stored.starts[rows + 1] - stored.starts[rows]
    boxes = np.repeat(np.arange(len(rows)), counts)
    numbers = np.arange(len(boxes)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = stored.places[stored.order[np.repeat(stored.starts[rows], counts) + numbers]]
    ends = offsets + sizes
    for dim in range(offsets.shape[1]):
        begin = stored.offsets[places + dim]
        meets = np.flatnonzero((begin < ends[boxes, dim]) & (begin + stored.sizes[places + dim] > offsets[boxes, dim]))
        if len(meets) < len(boxes):
            boxes, numbers, places = boxes[meets], numbers[meets], places[meets]
    columns = places[:, None] + np.arange(offsets.shape[1])
    chunk_offsets = stored.offsets[columns]
    begins = np.maximum(chunk_offsets, offsets[boxes])
    lengths = np.minimum(chunk_offsets + stored.sizes[columns], ends[boxes]) - begins
    return _Overlap(boxes + first, numbers, chunk_offsets, begins, lengths)
