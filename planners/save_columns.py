"""The coordinator's work where nothing is odd: the local plans of all ranks held against each other as columns.

What ``save_global`` does box by box is done here for all boxes at once, to the same result. Whatever needs a second look (a fault, ranks
that disagree, a policy that has to choose) is left to ``save_global``, which can say what it is. Pure functions of the local plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dcp_engine.plan_columns import MAX_COLUMN_DIMS, KeyTable, PlanColumns
from dcp_engine.planners.balance import Piece, Unit, assign, cut_dim
from dcp_engine.planners.geometry import check_tiling
from dcp_engine.planners.save_choice import Choice
from dcp_engine.planners.save_local import LocalPlanData
from dcp_engine.planners.ties import agreed_ties

__all__ = ["ColumnPlan", "plan_columns"]

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnPlan:
    """What all ranks do.

    Attributes:
        choices: by rank.
        described: what is stored: every key of any rank, boxes as they are written. An alias of a tie has the boxes of its key.
        ties: alias key -> key.
        order: positions, in the rows of all ranks one after the other, of what was taken for the same and written once, group by group.
        groups: for each of these positions, where its group begins in ``order``.
    """

    choices: list[Choice]
    described: PlanColumns
    ties: dict[str, str]
    order: Int64s
    groups: Int64s


def plan_columns(local: Sequence[PlanColumns], data: Sequence[LocalPlanData], *, split_bytes: int) -> ColumnPlan | None:
    """Decide what each rank writes with a writer of ours.

    Args:
        local: by rank, what it holds.
        data: by rank, digests and the rest.
        split_bytes: as for :func:`dcp_engine.planners.balance.assign`.

    Returns:
        None where something is not as it should be, or has to be chosen by a policy.
    """
    if any(not len(columns) == len(of.digests) == len(of.object_bytes) for columns, of in zip(local, data, strict=True)):
        return None
    united = _unite(local)
    if united is None or any(key not in united.index for of in data for key in of.unheld):
        return None
    grouped = _group(united)
    if grouped is None:
        return None
    return _decide(united, grouped, data, split_bytes)


# ------------------------------------------------------------------------------------------------------------ all ranks as one


@dataclass(frozen=True, slots=True, eq=False)
class _United:
    """The rows of all ranks, one rank after the other.

    Attributes:
        keys: the keys of all ranks, in the order in which they are first met; ``index`` finds them.
        rows: boxes by those keys.
        ranks: of each row.
        firsts: first row of each rank, and the number of rows.
    """

    keys: KeyTable
    index: Mapping[str, int]
    rows: PlanColumns
    ranks: Int64s
    firsts: Int64s


def _unite(local: Sequence[PlanColumns]) -> _United | None:
    """None: a key is of different kinds on different ranks."""
    width = max(columns.keys.shapes.shape[1] for columns in local)
    if width > MAX_COLUMN_DIMS:
        return None
    index: dict[str, int] = {}
    palette: dict[torch.dtype | None, int] = {None: 0}
    tables: dict[int, tuple[Int64s, NDArray[Any]]] = {}
    for columns in local:
        if id(columns.keys) not in tables:
            keys = columns.keys
            ids = np.fromiter((index.setdefault(name, len(index)) for name in keys.names), dtype=np.int64, count=len(keys.names))
            codes = np.array([palette.setdefault(dtype, len(palette)) for dtype in keys.palette], dtype=np.int64)
            described = np.concatenate((codes[keys.kinds][:, None], keys.num_dims[:, None], _widened(keys.shapes, width, 1)), axis=1)
            tables[id(keys)] = ids, described
    all_ids = np.concatenate([ids for ids, _ in tables.values()])
    all_kinds = np.concatenate([described for _, described in tables.values()])
    kinds = np.empty((len(index), width + 2), dtype=np.int64)
    kinds[all_ids] = all_kinds
    if len(tables) > 1 and not np.array_equal(kinds[all_ids], all_kinds):
        return None
    rows = PlanColumns(
        KeyTable(list(index), tuple(palette), kinds[:, 0].astype(np.uint8), kinds[:, 1].astype(np.uint8), kinds[:, 2:]),
        np.concatenate([tables[id(columns.keys)][0][columns.entries] for columns in local]),
        np.concatenate([_widened(columns.offsets, width, 0) for columns in local]),
        np.concatenate([_widened(columns.sizes, width, 1) for columns in local]),
    )
    counts = [len(columns) for columns in local]
    firsts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    return _United(rows.keys, index, rows, np.repeat(np.arange(len(local)), counts), firsts)


def _widened(boxes: Int64s, width: int, filler: int) -> Int64s:
    if boxes.shape[1] == width:
        return boxes
    return np.concatenate((boxes, np.full((len(boxes), width - boxes.shape[1]), filler, dtype=np.int64)), axis=1)


def _rows(boxes: Int64s, rows: Int64s) -> Int64s:
    """Some rows; several times as fast as indexing."""
    return np.take(boxes, rows, axis=0)


# -------------------------------------------------------------------------------------------------------------- equal boxes


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rows with equal key and box, side by side; groups in the order of keys, then of row-major offsets.

    Attributes:
        order: row of each place, ascending within a group.
        starts: place where each group begins, and the number of places.
        heads: first row of each group.
        entries: key of each group.
    """

    order: Int64s
    starts: Int64s
    heads: Int64s
    entries: Int64s


def _group(united: _United) -> _Groups | None:
    """None: two boxes of a key that differ begin at one element."""
    rows, shapes = united.rows, united.keys.shapes
    strides = np.ones_like(shapes)
    for dim in range(shapes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shapes[:, dim + 1]
    # The key in the upper bits, in the lower ones the number of the first element: modulo a power of two, so this only brings equal boxes
    # together; that they are equal is looked at below.
    bits = 63 - len(shapes).bit_length()
    begins = np.zeros(len(rows), dtype=np.int64)
    for dim in range(shapes.shape[1]):
        begins += rows.offsets[:, dim] * np.ascontiguousarray(strides[:, dim])[rows.entries]
    codes = (rows.entries << bits) | (begins & ((1 << bits) - 1))
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    follows = np.flatnonzero(codes[1:] == codes[:-1])
    first, second = order[follows], order[follows + 1]
    if not (np.array_equal(rows.offsets[first], rows.offsets[second]) and np.array_equal(rows.sizes[first], rows.sizes[second])):
        return None
    leads = np.ones(len(rows), dtype=np.bool_)
    leads[follows + 1] = False
    starts = np.flatnonzero(leads)
    heads = order[starts]
    return _Groups(order, np.append(starts, len(rows)), heads, rows.entries[heads])


# ------------------------------------------------------------------------------------------------------------ the decisions


def _decide(united: _United, grouped: _Groups, data: Sequence[LocalPlanData], split_bytes: int) -> ColumnPlan | None:
    ties = _settle_ties(united, grouped, data)
    keys = united.keys
    is_alias = np.zeros(len(keys.names), dtype=np.bool_)
    is_alias[[united.index[alias] for alias in ties]] = True
    stays = ~is_alias[grouped.entries]
    shared = np.flatnonzero(stays & (np.diff(grouped.starts) > 1))
    places, groups = _places(grouped, shared)
    positions = grouped.order[places]
    if not _are_replicas(united, positions, groups, data) or not _tile(united, grouped, stays):
        return None
    # A tensor without elements is written by nobody. It is one group, which has no use for pieces either.
    hollow = (keys.shapes == 0).any(axis=1)
    written = stays & ~hollow[grouped.entries]
    single = written & (np.diff(grouped.starts) == 1)
    num_bytes = _num_bytes(united, data)
    kept = np.zeros(len(united.rows), dtype=np.bool_)
    kept[grouped.heads[single]] = True
    loads = np.bincount(united.ranks[kept], weights=num_bytes[kept], minlength=len(data)).astype(np.int64).tolist()
    shared = shared[written[shared]]
    shared = shared[np.lexsort((grouped.heads[shared], grouped.entries[shared]))]  # as the ranks name them
    parts = _share_out(united, grouped, shared, num_bytes, loads, split_bytes)
    kept[parts.rows] = True
    described = _described(united, grouped.heads[single], parts, ties)
    return ColumnPlan(_choices(united, kept, parts), described, ties, positions, groups)


def _settle_ties(united: _United, grouped: _Groups, data: Sequence[LocalPlanData]) -> dict[str, str]:
    """The ties on which all holders agree, and whose two keys have the same boxes."""
    if not any(of.ties for of in data):
        return {}
    index = united.index
    proposals = [{alias: key for alias, key in of.ties.items() if alias in index and key in index} for of in data]
    named = {name for proposal in proposals for pair in proposal.items() for name in pair}
    bounds = {name: np.searchsorted(grouped.entries, (index[name], index[name] + 1)) for name in named}
    holders = {}
    for name, (begin, end) in bounds.items():
        holders[name] = set(united.ranks[grouped.order[grouped.starts[begin] : grouped.starts[end]]].tolist())
    agreed = {}
    for alias, key in agreed_ties(proposals, holders).items():
        one, other = (grouped.heads[slice(*bounds[name])] for name in (alias, key))
        same = [np.array_equal(column[one], column[other]) for column in (united.rows.offsets, united.rows.sizes)]
        if all(same):
            agreed[alias] = key
    return agreed


def _places(grouped: _Groups, shared: Int64s) -> tuple[Int64s, Int64s]:
    """The places of some groups, one group after the other, and for each the index in that list at which its group begins."""
    counts = grouped.starts[shared + 1] - grouped.starts[shared]
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(grouped.starts[shared], counts) + np.arange(len(begins)) - begins, begins


def _are_replicas(united: _United, positions: Int64s, groups: Int64s, data: Sequence[LocalPlanData]) -> bool:
    """Whether all that share a box hold the same, on different ranks."""
    if not positions.size:
        return True
    contents = np.concatenate([of.digests for of in data])[positions]
    ranks = united.ranks[positions]
    twice = (groups[1:] == groups[:-1]) & (ranks[1:] == ranks[:-1])
    return bool((contents != 0).all() and (contents == contents[groups]).all() and not twice.any())


def _num_bytes(united: _United, data: Sequence[LocalPlanData]) -> Int64s:
    keys, rows = united.keys, united.rows
    itemsizes = np.array([0 if dtype is None else dtype.itemsize for dtype in keys.palette], dtype=np.int64)[keys.kinds]
    objects = np.concatenate([of.object_bytes for of in data])
    return np.where((keys.kinds == 0)[rows.entries], objects, itemsizes[rows.entries] * rows.sizes.prod(axis=1))


# ------------------------------------------------------------------------------------------------------------------- tiling


def _tile(united: _United, grouped: _Groups, stays: Bools) -> bool:
    """Whether the boxes of every key cover it exactly once. Grids are recognised for all keys at once, others one by one."""
    heads, entries = grouped.heads[stays], grouped.entries[stays]
    offsets, sizes, extents = _rows(united.rows.offsets, heads), _rows(united.rows.sizes, heads), _rows(united.keys.shapes, entries)
    counts = np.bincount(entries, minlength=len(united.keys.names))
    uncut = np.ones(len(heads), dtype=np.bool_)
    for dim in range(offsets.shape[1]):
        uncut &= (offsets[:, dim] == 0) & (sizes[:, dim] == extents[:, dim])
    doubtful = np.zeros(len(counts), dtype=np.bool_)
    doubtful[entries[~(uncut & (counts[entries] == 1))]] = True
    some = np.flatnonzero(doubtful[entries])
    doubtful &= ~_grids(len(counts), entries[some], _rows(offsets, some), _rows(sizes, some), _rows(extents, some), counts)
    starts = np.searchsorted(entries, np.arange(len(counts) + 1))
    for entry in np.flatnonzero(doubtful).tolist():
        own, dims = slice(starts[entry], starts[entry + 1]), int(united.keys.num_dims[entry])
        shape = united.keys.shapes[entry, :dims].tolist()
        if check_tiling(shape, offsets[own, :dims], sizes[own, :dims]) is not None:
            return False
    return True


def _grids(num_keys: int, entries: Int64s, offsets: Int64s, sizes: Int64s, extents: Int64s, counts: Int64s) -> Bools:
    """For each key, whether its boxes, which are all different, are the cells of a grid: all combinations of intervals, which follow each
    other from 0 to the end in each dimension. As many different cells as there are combinations are all of them.

    Args:
        num_keys: number of keys.
        entries: key of each box, ascending; within a key row-major offsets ascend.
        offsets, sizes, extents: ``[num_boxes, width]``; the last of the key.
        counts: number of boxes of each key.
    """
    good = np.ones(num_keys, dtype=np.bool_)
    cells = np.ones(num_keys, dtype=np.int64)
    for dim in range(offsets.shape[1]):
        cut = np.zeros(num_keys, dtype=np.bool_)
        cut[entries[(offsets[:, dim] != 0) | (sizes[:, dim] != extents[:, dim])]] = True
        rows = np.flatnonzero(cut[entries])
        if not rows.size:
            continue
        keys, begins = entries[rows], offsets[rows, dim]
        if not ((keys[1:] > keys[:-1]) | (begins[1:] >= begins[:-1])).all():
            rows = rows[np.lexsort((begins, keys))]
            keys, begins = entries[rows], offsets[rows, dim]
        ends, limits = begins + sizes[rows, dim], extents[rows, dim]
        first = np.append(True, keys[1:] != keys[:-1])
        last = np.append(first[1:], True)
        again = np.append(False, ~first[1:] & (begins[1:] == begins[:-1]))
        good[keys[again & (ends != np.roll(ends, 1))]] = False
        good[keys[~again & (begins != np.where(first, 0, np.roll(ends, 1)))]] = False
        good[keys[(last & (ends != limits)) | (begins >= ends)]] = False
        intervals = np.maximum(1, np.bincount(keys[~again], minlength=num_keys))
        cells = np.minimum(cells * intervals, counts + 1)  # more than enough is too many, and does not overflow
    complete: Bools = good & (cells == counts)
    return complete


# ----------------------------------------------------------------------------------------------------------- who writes what


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What is written of shared boxes, each by one of its holders.

    Attributes:
        rows: the row that is written, whole or in part.
        cut: whether in part.
        offsets, sizes: of what is written, ``[num_parts, width]``.
    """

    rows: Int64s
    cut: Bools
    offsets: Int64s
    sizes: Int64s


def _share_out(united: _United, grouped: _Groups, shared: Int64s, num_bytes: Int64s, loads: Sequence[int], split_bytes: int) -> _Parts:
    keys, rows = united.keys, united.rows
    sets: dict[bytes, tuple[int, ...]] = {}
    units, dims, of_rank = [], [], []
    for group in shared.tolist():
        own = grouped.order[grouped.starts[group] : grouped.starts[group + 1]]
        packed = united.ranks[own].tobytes()
        holders = sets.get(packed)
        if holders is None:
            holders = sets[packed] = tuple(united.ranks[own].tolist())
        entry, size = int(grouped.entries[group]), int(num_bytes[own[0]])
        num_dims = int(keys.num_dims[entry])
        dim = -1
        if num_dims and size:
            sizes = rows.sizes[own[0], :num_dims].tolist()
            dim = cut_dim(sizes, len(holders))
        units.append(Unit(size if num_dims or keys.kinds[entry] else max(1, size), holders, sizes[dim] if dim >= 0 else 1))
        dims.append(dim)
        of_rank.append(own)
    assigned: list[tuple[int, int, Piece]] = []
    for number, pieces in enumerate(assign(units, loads, split_bytes=split_bytes)):
        for piece in pieces:
            row = int(of_rank[number][bisect_left(units[number].holders, piece.rank)])
            assigned.append((row, dims[number] if len(pieces) > 1 else -1, piece))
    taken = np.array([row for row, _, _ in assigned], dtype=np.int64)
    offsets, sizes_ = rows.offsets[taken], rows.sizes[taken]
    cut = np.zeros(len(taken), dtype=np.bool_)
    for number, (_, dim, piece) in enumerate(assigned):
        if dim >= 0:
            cut[number] = True
            offsets[number, dim] += piece.begin
            sizes_[number, dim] = piece.end - piece.begin
    return _Parts(taken, cut, offsets, sizes_)


def _described(united: _United, singles: Int64s, parts: _Parts, ties: Mapping[str, str]) -> PlanColumns:
    rows, index = united.rows, united.index
    entries = np.concatenate((rows.entries[singles], rows.entries[parts.rows]))
    offsets = np.concatenate((_rows(rows.offsets, singles), parts.offsets))
    sizes = np.concatenate((_rows(rows.sizes, singles), parts.sizes))
    columns = [(entries, offsets, sizes)]
    for alias, key in ties.items():
        own = entries == index[key]
        columns.append((np.full(int(own.sum()), index[alias]), offsets[own], sizes[own]))
    if len(columns) > 1:
        entries, offsets, sizes = (np.concatenate(column) for column in zip(*columns, strict=True))
    if (entries[1:] < entries[:-1]).any():
        order = np.argsort(entries, kind="stable")
        entries, offsets, sizes = entries[order], _rows(offsets, order), _rows(sizes, order)
    return PlanColumns(united.keys, entries, offsets, sizes)


def _choices(united: _United, kept: Bools, parts: _Parts) -> list[Choice]:
    pieces = np.flatnonzero(parts.cut)
    pieces = pieces[np.argsort(parts.rows[pieces])]
    cut = parts.rows[pieces]
    bounds = np.searchsorted(cut, united.firsts)
    choices = []
    for rank in range(len(united.firsts) - 1):
        first, last = int(united.firsts[rank]), int(united.firsts[rank + 1])
        own = pieces[bounds[rank] : bounds[rank + 1]]
        choices.append(
            Choice(last - first, np.flatnonzero(kept[first:last]), parts.rows[own] - first, parts.offsets[own], parts.sizes[own])
        )
    return choices
