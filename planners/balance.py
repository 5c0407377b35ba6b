"""Who writes what: pure decisions that give every rank about the same number of bytes of what it holds."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Piece", "Unit", "assign", "cut_dim", "water_level"]

_ROWS_PER_HOLDER = 64
"""A dimension with so many rows for each holder is cut finely enough; leading ones are preferred, since their slices are contiguous."""


class Unit(NamedTuple):
    """Something to be written once.

    Attributes:
        num_bytes: its size.
        holders: ranks that have all of it, ascending, at least one.
        num_rows: equal slices into which it may be cut; 1: it stays whole.
    """

    num_bytes: int
    holders: tuple[int, ...]
    num_rows: int = 1


class Piece(NamedTuple):
    """Rows ``begin`` to ``end`` (exclusive) of a unit, written by ``rank``."""

    rank: int
    begin: int
    end: int


def cut_dim(sizes: Sequence[int], num_holders: int) -> int:
    """The dimension along which a box of these sizes, at least one, is cut."""
    for dim, size in enumerate(sizes):
        if size >= _ROWS_PER_HOLDER * num_holders:
            return dim
    return max(range(len(sizes)), key=lambda dim: sizes[dim])


def assign(units: Sequence[Unit], loads: Sequence[int], *, split_bytes: int) -> list[list[Piece]]:
    """Give every row of every unit to exactly one of its holders.

    What only one rank holds is given first. Then, by set of holders, smallest set first, since it has the least choice: small units go, in
    order of size, to the holder with the least so far; large ones are laid end to end and cut where the holders' loads become equal, so
    that ``R`` holders make at most ``R - 1`` cuts, and no holder gets two separate pieces of one unit.

    Args:
        units: what to write.
        loads: bytes that each rank writes in any case.
        split_bytes: units of at least this size, with more than one row, may be cut. A quarter of it is the least that is worth a piece,
            within a row; it therefore bounds how far loads are from equal.

    Returns:
        For each unit its pieces in order of rows. Deterministic.
    """
    loads = list(loads)
    pieces: list[list[Piece]] = [[] for _ in units]
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, unit in enumerate(units):
        if len(unit.holders) == 1:
            loads[unit.holders[0]] += unit.num_bytes
            pieces[number].append(Piece(unit.holders[0], 0, unit.num_rows))
        else:
            shared.setdefault(unit.holders, []).append(number)
    for holders in sorted(shared, key=lambda holders: (len(holders), holders)):
        numbers = shared[holders]
        large = [number for number in numbers if units[number].num_rows > 1 and units[number].num_bytes >= split_bytes]
        cut = set(large)
        _assign_whole(units, [number for number in numbers if number not in cut], holders, loads, pieces)
        if large:
            _assign_cut(units, large, holders, loads, pieces, split_bytes // 4)
    return pieces


def _assign_whole(units: Sequence[Unit], numbers: list[int], holders: tuple[int, ...], loads: list[int], pieces: list[list[Piece]]) -> None:
    heap = [(loads[rank], rank) for rank in holders]
    heapq.heapify(heap)
    for number in sorted(numbers, key=lambda number: (-units[number].num_bytes, number)):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + units[number].num_bytes, rank))
        loads[rank] += units[number].num_bytes
        pieces[number].append(Piece(rank, 0, units[number].num_rows))


def _assign_cut(
    units: Sequence[Unit], numbers: list[int], holders: tuple[int, ...], loads: list[int], pieces: list[list[Piece]], min_bytes: int
) -> None:
    ends = list(accumulate(units[number].num_bytes for number in numbers))
    takers, level = _takers(holders, loads, ends[-1], min_bytes)
    # Cuts are found from the running total, not from each rank's share: rounding to rows does not add up.
    wanted = accumulate(level - loads[rank] for rank in takers)
    position, row = 0, 0
    for rank, target in zip(takers, wanted, strict=True):
        stop, stop_row = (len(numbers), 0) if rank == takers[-1] else _cut(units, numbers, ends, target, min_bytes)
        while (position, row) < (stop, stop_row):
            unit = units[numbers[position]]
            last = stop_row if position == stop else unit.num_rows
            pieces[numbers[position]].append(Piece(rank, row, last))
            loads[rank] += unit.num_bytes * (last - row) // unit.num_rows
            position, row = (position, last) if position == stop else (position + 1, 0)


def _takers(holders: tuple[int, ...], loads: list[int], num_bytes: int, min_bytes: int) -> tuple[list[int], float]:
    """The ranks among which ``num_bytes`` are shared out, each for at least ``min_bytes``, and the level to which that brings them."""
    takers = list(holders)
    while True:
        level = water_level([loads[rank] for rank in takers], num_bytes)
        fit = [rank for rank in takers if level - loads[rank] >= min_bytes]
        if len(fit) == len(takers):
            return takers, level
        takers = fit or [min(takers, key=lambda rank: loads[rank])]
        if len(takers) == 1:
            return takers, loads[takers[0]] + num_bytes


def _cut(units: Sequence[Unit], numbers: list[int], ends: list[int], target: float, min_bytes: int) -> tuple[int, int]:
    """Unit and row nearest to ``target`` bytes from the start, moved to the edge of the unit where a piece would be too small."""
    position = min(bisect_right(ends, target), len(ends) - 1)
    unit = units[numbers[position]]
    row = round((target - (ends[position] - unit.num_bytes)) * unit.num_rows / unit.num_bytes)
    row = min(max(row, 0), unit.num_rows)
    if row * unit.num_bytes < min_bytes * unit.num_rows:
        return position, 0
    if (unit.num_rows - row) * unit.num_bytes < min_bytes * unit.num_rows:
        return position + 1, 0
    return position, row


def water_level(loads: Sequence[int], extra: int) -> float:
    """The level to which ``extra`` fills the lowest of ``loads``: the sum of ``max(level - load, 0)`` is ``extra``."""
    total = extra
    lowest = sorted(loads)
    for count, load in enumerate(lowest, start=1):
        total += load
        if count == len(lowest) or total <= lowest[count] * count:
            return total / count
    raise ValueError("no loads")
