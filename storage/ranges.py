"""Pure arithmetic on row-major ranges: which boxes a range of elements covers, which blocks a box touches, which extents form one read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Box",
    "FlatBox",
    "blocks_of_box",
    "collapse",
    "group_adjacent",
    "grouped_by_size",
    "intersect",
    "range_to_boxes",
    "row_major_strides",
]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Box:
    """A box of an N-dimensional array, in elements: ``offsets[d] <= index[d] < offsets[d] + sizes[d]``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A box inside a chunk after dimensions that lie back to back on both sides were merged into one.

    Attributes:
        chunk_sizes: sizes of the chunk, in elements; row-major order is that of the original chunk.
        offsets: where the box begins within the chunk, in elements.
        sizes: extent of the box, in elements.
        strides: strides of the target over ``sizes``, in bytes.
    """

    chunk_sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the distance, in elements, between neighbours along each dimension of a contiguous array of ``sizes``."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


def range_to_boxes(sizes: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cover the row-major element range ``[start, stop)`` of an array of ``sizes`` by boxes, each of which is contiguous in it.

    Args:
        sizes: extents of the array, in elements.
        start: first element of the range.
        stop: element after the last one; at most the number of elements.

    Returns:
        Disjoint boxes in row-major order, at most ``2 * len(sizes) - 1`` of them (one for a 0-dim array); none for an empty range.
    """
    if not sizes:
        return [Box((), ())] if start < stop else []
    strides = row_major_strides(sizes)
    boxes = []
    at = start
    while at < stop:
        # The outermost dimension whose slices both begin here and fit into what is left gives the largest box that begins here.
        dim = next(d for d, stride in enumerate(strides) if at % stride == 0 and stop - at >= stride)
        offsets = tuple(at // stride % size for stride, size in zip(strides, sizes, strict=True))
        count = min(sizes[dim] - offsets[dim], (stop - at) // strides[dim])
        boxes.append(Box(offsets, (1,) * dim + (count,) + tuple(sizes[dim + 1 :])))
        at += count * strides[dim]
    return boxes


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box common to ``a`` and ``b``, or ``None`` where they share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    stops = map(min, map(int.__add__, a.offsets, a.sizes), map(int.__add__, b.offsets, b.sizes))
    sizes = tuple(map(int.__sub__, stops, offsets))
    return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)


def blocks_of_box(chunk_sizes: Sequence[int], box: Box, itemsize: int, block_bytes: int) -> NDArray[np.int64]:
    """Return the ascending indices of the blocks of a chunk that hold at least one byte of ``box``.

    Args:
        chunk_sizes: extents of the chunk, in elements.
        box: box within the chunk, in elements.
        itemsize: bytes of one element; divides ``block_bytes``.
        block_bytes: raw bytes of every block of the chunk but the last.

    Returns:
        Block indices within the chunk, ``int64``, ascending, each once. Time and memory are linear in the number of blocks of the chunk,
        whatever the number of rows.
    """
    if 0 in box.sizes:
        return np.empty(0, np.int64)
    strides = [stride * itemsize for stride in row_major_strides(chunk_sizes)]
    first_byte = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    # Grow one segment from the innermost dimension outwards. Gaps shorter than a block cannot hide a whole block, so they are bridged; the
    # first dimension with longer gaps, and all outside it, are enumerated: each of their steps is a block or more.
    segment_bytes = itemsize
    dim = len(strides) - 1
    while dim >= 0 and (box.sizes[dim] == 1 or strides[dim] - segment_bytes < block_bytes):
        segment_bytes += (box.sizes[dim] - 1) * strides[dim]
        dim -= 1
    starts = np.array([first_byte], np.int64)
    for outer in range(dim, -1, -1):
        steps = np.arange(box.sizes[outer], dtype=np.int64) * strides[outer]
        starts = (steps[:, None] + starts).reshape(-1)
    lows = starts // block_bytes
    highs = (starts + segment_bytes - 1) // block_bytes + 1
    counts = highs - lows
    ends = np.cumsum(counts)
    blocks = np.arange(ends[-1], dtype=np.int64) + np.repeat(lows - (ends - counts), counts)
    # Starts ascend, so a block shared by neighbouring segments shows as a repeated value.
    keep = np.ones(blocks.shape, np.bool_)
    np.not_equal(blocks[1:], blocks[:-1], out=keep[1:])
    touched: NDArray[np.int64] = blocks[keep]
    return touched


def collapse(chunk_sizes: Sequence[int], box: Box, strides: Sequence[int]) -> FlatBox:
    """Merge neighbouring dimensions wherever the box is contiguous across them both in the chunk and in the target.

    A box that is one run of bytes on both sides becomes one-dimensional, and one whose target is contiguous by rows keeps only the
    dimensions that separate these rows, so that whole blocks can be decoded into place.

    Args:
        chunk_sizes: extents of the chunk, in elements.
        box: box within the chunk, in elements; no size is zero.
        strides: strides of the target array, in bytes, one per dimension.

    Returns:
        The same mapping in at least one dimension.
    """
    if not chunk_sizes:
        return FlatBox((1,), (0,), (1,), (0,))
    chunk, offsets, sizes, steps = [chunk_sizes[-1]], [box.offsets[-1]], [box.sizes[-1]], [strides[-1]]
    for dim in range(len(chunk_sizes) - 2, -1, -1):
        if chunk[0] == 1:
            # An inner dimension of length one says nothing about the distance between neighbours.
            steps[0] = strides[dim]
        one_row = box.sizes[dim] == 1
        whole_rows = sizes[0] == chunk[0] and strides[dim] == steps[0] * sizes[0]
        if one_row or whole_rows:
            # One row: its position moves into the inner offset. Whole rows: the inner offset is zero and the rows lie back to back.
            offsets[0] += box.offsets[dim] * chunk[0]
            sizes[0] *= box.sizes[dim]
            chunk[0] *= chunk_sizes[dim]
        else:
            chunk.insert(0, chunk_sizes[dim])
            offsets.insert(0, box.offsets[dim])
            sizes.insert(0, box.sizes[dim])
            steps.insert(0, strides[dim])
    return FlatBox(tuple(chunk), tuple(offsets), tuple(sizes), tuple(steps))


def group_adjacent(starts: Sequence[int], lengths: Sequence[int], max_bytes: int) -> list[tuple[int, int]]:
    """Group ascending byte ranges that lie back to back into reads of at most ``max_bytes``.

    Args:
        starts: first byte of each range, ascending; ranges do not overlap.
        lengths: bytes of each range.
        max_bytes: bound on one group; a range that is longer forms a group of its own.

    Returns:
        Half-open index ranges ``(first, last)`` that partition the input in order. No byte between two ranges belongs to a group.
    """
    groups = []
    first = 0
    total = 0
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if index > first and (start != starts[index - 1] + lengths[index - 1] or total + length > max_bytes):
            groups.append((first, index))
            first, total = index, 0
        total += length
    if first < len(starts):
        groups.append((first, len(starts)))
    return groups


def grouped_by_size(items: Iterable[_Item], size_of: Callable[[_Item], int], most: int) -> Iterator[list[_Item]]:
    """Neighbours in groups of at most ``most`` bytes, an item that is larger by itself: a call for each of many small ones would cost more
    than its work.

    Args:
        items: in order; taken as the groups are asked for.
        size_of: bytes of an item.
        most: bytes of a group.
    """
    group: list[_Item] = []
    num_bytes = 0
    for item in items:
        size = size_of(item)
        if group and num_bytes + size > most:
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += size
    if group:
        yield group
