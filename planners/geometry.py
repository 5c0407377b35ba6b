"""Boxes in N dimensions as plain numpy: what overlaps what, and whether boxes tile a shape exactly.

A *box* is an offset and a size per dimension; many boxes are two int64 arrays of shape ``[num_boxes, num_dims]``. The end of a box is
exclusive. A box with a zero in its sizes is empty: it overlaps nothing and fills nothing, wherever it lies. With zero dimensions a box
is a single element. All functions are pure and thread-safe; they take anything that ``numpy.asarray`` takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Overlaps", "TilingFault", "as_boxes", "check_tiling", "intersect", "run_boxes"]

Int64s = NDArray[np.int64]

_MAX_CORNER_DIMS = 8
"""Beyond this many cut dimensions the 2**d corners of a box cost more than cutting the region apart."""
_FEW_CANDIDATES = 1 << 12
_CANDIDATES_PER_BOX = 64
"""A sweep that meets more candidates than this (and more than a few) is first cut apart."""
_CANDIDATES_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Where wanted boxes meet stored boxes: row ``i`` says that ``wanted[i]`` and ``stored[i]`` share the box ``offsets[i]``, ``sizes[i]``.

    Attributes:
        wanted: indices of wanted boxes, ascending, shape ``[n]``.
        stored: indices of stored boxes, ascending for equal ``wanted``, shape ``[n]``.
        offsets: start of the shared box in the coordinates of the whole tensor, shape ``[n, d]``.
        sizes: size of the shared box, each at least 1, shape ``[n, d]``.
    """

    wanted: Int64s
    stored: Int64s
    offsets: Int64s
    sizes: Int64s


@dataclass(frozen=True, slots=True)
class TilingFault:
    """The first place found where boxes do not tile a shape.

    Attributes:
        kind: ``out_of_bounds``: a box leaves the shape; ``overlap``: two boxes share elements; ``hole``: elements that no box holds.
        offsets: start of the faulty place: the box itself, the shared box, or an empty place inside the hole.
        sizes: its size.
        boxes: indices of the boxes concerned: one, two, or none.
    """

    kind: Literal["out_of_bounds", "overlap", "hole"]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    boxes: tuple[int, ...]


def as_boxes(rows: ArrayLike | Sequence[Sequence[int]], num_dims: int) -> Int64s:
    """Offsets or sizes as an int64 array of shape ``[n, num_dims]``, also where ``n`` or ``num_dims`` is 0."""
    array = np.asarray(rows, dtype=np.int64)
    if array.ndim == 2 and array.shape[1] == num_dims:
        return array
    return array.reshape(len(rows), num_dims)  # type: ignore[arg-type]


def run_boxes(runs: Sequence[Sequence[tuple[int, int]]]) -> tuple[Int64s, Int64s, Int64s]:
    """Boxes of the elements whose index in dimension ``k`` lies in one of ``runs[k]``: the product of the runs of all dimensions.

    Args:
        runs: per dimension the ``(start, length)`` of runs of global indices that a local tensor holds, in local order.

    Returns:
        Global offsets, sizes and local offsets, each ``[n, d]``, in row-major order of the local offsets. A dimension without runs gives
        no boxes.
    """
    num_dims = len(runs)
    lengths = [len(axis) for axis in runs]
    picks = np.indices(lengths, dtype=np.int64).reshape(num_dims, math.prod(lengths))
    offsets, sizes, local = (np.zeros((picks.shape[1], num_dims), dtype=np.int64) for _ in range(3))
    for dim, axis in enumerate(runs):
        columns = np.array(axis, dtype=np.int64).reshape(-1, 2)
        offsets[:, dim] = columns[picks[dim], 0]
        sizes[:, dim] = columns[picks[dim], 1]
        local[:, dim] = (np.cumsum(columns[:, 1]) - columns[:, 1])[picks[dim]]
    return offsets, sizes, local


def intersect(wanted_offsets: ArrayLike, wanted_sizes: ArrayLike, stored_offsets: ArrayLike, stored_sizes: ArrayLike) -> Overlaps:
    """Every pair of a wanted and a stored box that share elements, near linear in boxes and pairs for boxes that tile.

    Args:
        wanted_offsets: ``[n, d]``.
        wanted_sizes: ``[n, d]``.
        stored_offsets: ``[m, d]``. Boxes on either side may overlap each other.
        stored_sizes: ``[m, d]``.
    """
    first, second = np.asarray(wanted_offsets, dtype=np.int64), np.asarray(stored_offsets, dtype=np.int64)
    boxes = _Sides(first, first + np.asarray(wanted_sizes, dtype=np.int64), second, second + np.asarray(stored_sizes, dtype=np.int64))
    alive_wanted = np.flatnonzero(np.all(boxes.wanted_ends > boxes.wanted_starts, axis=1))
    alive_stored = np.flatnonzero(np.all(boxes.stored_ends > boxes.stored_starts, axis=1))
    found = list(_pairs(boxes, alive_wanted, alive_stored))
    wanted = np.concatenate([alive_wanted[:0], *(pair[0] for pair in found)])
    stored = np.concatenate([alive_stored[:0], *(pair[1] for pair in found)])
    order = np.lexsort((stored, wanted))
    wanted, stored = wanted[order], stored[order]
    offsets = np.maximum(boxes.wanted_starts[wanted], boxes.stored_starts[stored])
    return Overlaps(wanted, stored, offsets, np.minimum(boxes.wanted_ends[wanted], boxes.stored_ends[stored]) - offsets)


@dataclass(frozen=True, slots=True)
class _Sides:
    """Starts and exclusive ends of the boxes on both sides, each ``[n, d]``."""

    wanted_starts: Int64s
    wanted_ends: Int64s
    stored_starts: Int64s
    stored_ends: Int64s


def _pairs(boxes: _Sides, wanted: Int64s, stored: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Pairs of rows that share elements, each once: cut the space until a sweep along one dimension meets few candidates.

    A pair of boxes that both span a cut is found on both sides of it; it counts in the cell where its shared box starts.
    """
    num_dims = boxes.wanted_starts.shape[1]
    everywhere = np.full(num_dims, np.iinfo(np.int64).min), np.full(num_dims, np.iinfo(np.int64).max)
    stack = [(wanted, stored, *everywhere)]
    while stack:
        wanted, stored, floor, ceiling = stack.pop()
        if not (wanted.size and stored.size):
            continue
        sweep = _sweep(boxes, wanted, stored)
        if sweep.num_candidates > _CANDIDATES_PER_BOX * (wanted.size + stored.size) + _FEW_CANDIDATES:
            cut = _best_cut(boxes, wanted, stored)
            if cut is not None:
                dim, at = cut
                left_ceiling, right_floor = ceiling.copy(), floor.copy()
                left_ceiling[dim], right_floor[dim] = min(int(ceiling[dim]), at), max(int(floor[dim]), at)
                left = wanted[boxes.wanted_starts[wanted, dim] < at], stored[boxes.stored_starts[stored, dim] < at]
                right = wanted[boxes.wanted_ends[wanted, dim] > at], stored[boxes.stored_ends[stored, dim] > at]
                stack += [(*left, floor, left_ceiling), (*right, right_floor, ceiling)]
                continue
        for some_wanted, some_stored in sweep.candidates():
            first = np.maximum(boxes.wanted_starts[some_wanted], boxes.stored_starts[some_stored])
            last = np.minimum(boxes.wanted_ends[some_wanted], boxes.stored_ends[some_stored])
            keep = np.all((first < last) & (first >= floor) & (first < ceiling), axis=1)
            yield some_wanted[keep], some_stored[keep]


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Candidates of each wanted row: rows ``begins:ends`` of the stored rows, which are sorted along one dimension."""

    wanted: Int64s
    stored: Int64s
    begins: Int64s
    ends: Int64s
    num_candidates: int

    def candidates(self) -> Iterator[tuple[Int64s, Int64s]]:
        counts = self.ends - self.begins
        totals = np.cumsum(counts)
        row = 0
        while row < counts.size:  # some rows at a time: bounds the memory
            done = int(totals[row - 1]) if row else 0
            stop = max(row + 1, int(np.searchsorted(totals, done + _CANDIDATES_AT_ONCE, side="right")))
            some = counts[row:stop]
            within = np.arange(some.sum(), dtype=np.int64) - np.repeat(np.cumsum(some) - some, some)
            yield np.repeat(self.wanted[row:stop], some), self.stored[np.repeat(self.begins[row:stop], some) + within]
            row = stop


def _sweep(boxes: _Sides, wanted: Int64s, stored: Int64s) -> _Sweep:
    """The sweep along the dimension in which the fewest intervals of both sides meet."""
    everything = np.zeros(wanted.size, dtype=np.int64), np.full(wanted.size, stored.size, dtype=np.int64)
    best = _Sweep(wanted, stored, *everything, wanted.size * stored.size)
    for dim in range(boxes.wanted_starts.shape[1]):
        order = stored[np.argsort(boxes.stored_starts[stored, dim], kind="stable")]
        ends = np.searchsorted(boxes.stored_starts[order, dim], boxes.wanted_ends[wanted, dim], side="left")
        # Every stored row before the first whose running maximum of ends passes the start of the wanted one ends too early.
        begins = np.searchsorted(np.maximum.accumulate(boxes.stored_ends[order, dim]), boxes.wanted_starts[wanted, dim], side="right")
        ends = np.maximum(begins, ends)
        num_candidates = int((ends - begins).sum())
        if num_candidates < best.num_candidates:
            best = _Sweep(wanted, order, begins, ends, num_candidates)
    return best


def _best_cut(boxes: _Sides, wanted: Int64s, stored: Int64s) -> tuple[int, int] | None:
    """Dimension and place of the cut that leaves the fewest candidate pairs; None where no cut leaves clearly fewer than now."""
    best: tuple[int, int] | None = None
    fewest = 0.75 * wanted.size * stored.size
    for dim in range(boxes.wanted_starts.shape[1]):
        firsts = np.concatenate((boxes.wanted_starts[wanted, dim], boxes.stored_starts[stored, dim]))
        at = int(np.partition(firsts, firsts.size // 2)[firsts.size // 2])
        left = np.count_nonzero(boxes.wanted_starts[wanted, dim] < at) * np.count_nonzero(boxes.stored_starts[stored, dim] < at)
        right = np.count_nonzero(boxes.wanted_ends[wanted, dim] > at) * np.count_nonzero(boxes.stored_ends[stored, dim] > at)
        if left + right < fewest:
            best, fewest = (dim, at), float(left + right)
    return best


def check_tiling(shape: Sequence[int], offsets: ArrayLike, sizes: ArrayLike) -> TilingFault | None:
    """Whether the boxes cover every element of ``shape`` exactly once, whatever their arrangement.

    The sum of the boxes' indicator functions equals that of the whole exactly where their signed corners do (the corner of a box in
    ``2**d`` directions, with the sign of its parity): corners of a faultless tiling cancel except those of the whole. That is one sort
    of ``n * 2**d`` numbers, with ``d`` the dimensions that are cut at all. Only a fault makes the boxes be searched for its place.

    Args:
        shape: ``d`` sizes.
        offsets: ``[n, d]``.
        sizes: ``[n, d]``.

    Returns:
        None, or the first fault found.
    """
    whole = np.asarray(shape, dtype=np.int64).reshape(-1)
    starts = as_boxes(offsets, whole.size)
    ends = starts + as_boxes(sizes, whole.size)
    negative = np.any(ends < starts, axis=1)
    full = np.all(ends > starts, axis=1)
    outside = np.flatnonzero(negative | (full & (np.any(starts < 0, axis=1) | np.any(ends > whole, axis=1))))
    if outside.size:
        box = int(outside[0])
        return TilingFault("out_of_bounds", _tuple(starts[box]), _tuple(ends[box] - starts[box]), (box,))
    if np.any(whole == 0):
        return None
    index = np.flatnonzero(full)
    starts, ends = starts[index], ends[index]
    low = np.zeros_like(whole)
    if _tiles(low, whole, starts, ends):
        return None
    return _locate(low, whole, starts, ends, index)


def _tuple(row: Int64s) -> tuple[int, ...]:
    return tuple(int(value) for value in row)


def _tiles(low: Int64s, high: Int64s, starts: Int64s, ends: Int64s) -> bool:
    """Whether boxes inside the region ``[low, high)`` tile it."""
    if not len(starts):
        return False
    cut = np.flatnonzero(np.any(starts != low, axis=0) | np.any(ends != high, axis=0))
    if not cut.size:
        return len(starts) == 1
    if cut.size > _MAX_CORNER_DIMS:
        halves = _halve(low, high, starts, ends)
        assert halves is not None
        return all(_tiles(*half[:4]) for half in halves)
    # One int64 names a corner: coordinates are first replaced by their rank, so that the product of ranges cannot overflow.
    base = np.zeros(1, dtype=np.int64)
    code = np.zeros((len(starts), 1), dtype=np.int64)
    span = 1
    for dim in cut:
        values, inverse = np.unique(np.concatenate(([low[dim], high[dim]], starts[:, dim], ends[:, dim])), return_inverse=True)
        ranks = inverse.reshape(-1)
        if span * len(values) >= 2**62:
            return all(_tiles(*half[:4]) for half in _halve(low, high, starts, ends) or ())
        both = np.stack((ranks[2 : 2 + len(starts)], ranks[2 + len(starts) :]), axis=1)
        code = (code[:, :, None] * len(values) + both[:, None, :]).reshape(len(starts), -1)
        base = (base[:, None] * len(values) + ranks[:2][None, :]).reshape(-1)
        span *= len(values)
    signs = np.array([1 - 2 * (corner.bit_count() & 1) for corner in range(1 << cut.size)], dtype=np.int64)
    corners = np.concatenate((code.ravel(), base))
    weights = np.concatenate((np.tile(signs, len(starts)), -signs))
    order = np.argsort(corners, kind="stable")
    corners = corners[order]
    groups = np.flatnonzero(np.concatenate(([True], corners[1:] != corners[:-1])))
    return not np.add.reduceat(weights[order], groups).any()


def _halve(
    low: Int64s, high: Int64s, starts: Int64s, ends: Int64s
) -> list[tuple[Int64s, Int64s, Int64s, Int64s, NDArray[np.bool_]]] | None:
    """The region cut in two at a boundary of some box, with the boxes clipped to each half; None where no boundary lies inside."""
    best: tuple[int, int, int] | None = None
    for dim in range(low.size):
        inner = np.unique(np.concatenate((starts[:, dim], ends[:, dim])))
        inner = inner[(inner > low[dim]) & (inner < high[dim])]
        if inner.size and (best is None or inner.size > best[0]):
            best = (inner.size, dim, int(inner[inner.size // 2]))
    if best is None:
        return None
    _, dim, at = best
    middle_high, middle_low = high.copy(), low.copy()
    middle_high[dim] = middle_low[dim] = at
    halves = []
    for first, last in ((low, middle_high), (middle_low, high)):
        keep = (starts[:, dim] < last[dim]) & (ends[:, dim] > first[dim])
        halves.append((first, last, np.maximum(starts[keep], first), np.minimum(ends[keep], last), keep))
    return halves


def _locate(low: Int64s, high: Int64s, starts: Int64s, ends: Int64s, index: Int64s) -> TilingFault:
    """A place where the boxes fail to tile the region, which is known to exist: halve the region, follow a half that fails."""
    while True:
        halves = _halve(low, high, starts, ends) if len(starts) else None
        if halves is None:
            # No boundary inside the region: each box that is left fills it.
            where = _tuple(low), _tuple(high - low)
            if not len(starts):
                return TilingFault("hole", *where, ())
            return TilingFault("overlap", *where, (int(index[0]), int(index[1])))
        half = halves[0] if not _tiles(*halves[0][:4]) else halves[1]
        low, high, starts, ends = half[:4]
        index = index[half[4]]
