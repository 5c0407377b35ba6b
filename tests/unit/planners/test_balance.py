"""Who writes what: every row once, by a holder, in about equal shares."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.planners.balance import Piece, Unit, assign, water_level

MIB = 1 << 20


def loads_of(units: list[Unit], pieces: list[list[Piece]], num_ranks: int) -> list[int]:
    loads = [0] * num_ranks
    for unit, parts in zip(units, pieces, strict=True):
        for piece in parts:
            loads[piece.rank] += unit.num_bytes * (piece.end - piece.begin) // unit.num_rows
    return loads


units_of_five_ranks = st.lists(
    st.builds(
        lambda rows, row_bytes, holders, whole: Unit(rows * row_bytes, tuple(sorted(holders)), 1 if whole else rows),
        st.integers(1, 50),
        st.integers(0, 9),
        st.sets(st.integers(0, 4), min_size=1),
        st.booleans(),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(units_of_five_ranks, st.integers(4, 100))
def test_every_row_is_written_once_by_a_holder(units: list[Unit], split_bytes: int) -> None:
    pieces = assign(units, [0] * 5, split_bytes=split_bytes)
    for unit, parts in zip(units, pieces, strict=True):
        assert parts[0].begin == 0
        assert parts[-1].end == unit.num_rows
        assert all(one.end == other.begin for one, other in itertools.pairwise(parts))
        assert all(piece.begin < piece.end for piece in parts)
        assert len({piece.rank for piece in parts}) == len(parts)
        assert {piece.rank for piece in parts} <= set(unit.holders)
        if unit.num_bytes < split_bytes:
            assert len(parts) == 1
        elif len(parts) > 1:
            least_rows = (split_bytes // 4) * unit.num_rows / unit.num_bytes - 1
            assert min(piece.end - piece.begin for piece in parts) >= least_rows
    assert pieces == assign(units, [0] * 5, split_bytes=split_bytes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(0, 1000))
def test_water_fills_the_lowest_to_one_level(loads: list[int], extra: int) -> None:
    level = water_level(loads, extra)
    assert sum(max(level - load, 0) for load in loads) == pytest.approx(extra)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 64])
def test_replicas_of_a_model_are_written_in_equal_shares(num_ranks: int) -> None:
    everyone = tuple(range(num_ranks))
    rows = [4096, 4096, 1024, 50257, 1, 300, 4096]
    units = [Unit(count * 4096 * 4, everyone, count) for count in rows] + [Unit(4096 * 4, everyone, 4096)] * 40
    total = sum(unit.num_bytes for unit in units)
    loads = loads_of(units, assign(units, [0] * num_ranks, split_bytes=MIB // 4), num_ranks)
    assert max(loads) <= 1.05 * total / num_ranks


def test_one_large_tensor_is_cut_into_one_piece_a_holder() -> None:
    (pieces,) = assign([Unit(100 * MIB, (0, 1, 2, 3), 1000)], [0] * 4, split_bytes=MIB)
    assert pieces == [Piece(0, 0, 250), Piece(1, 250, 500), Piece(2, 500, 750), Piece(3, 750, 1000)]


def test_who_has_more_of_its_own_takes_less_of_the_shared() -> None:
    units = [Unit(60 * MIB, (0,)), Unit(20 * MIB, (1,)), Unit(100 * MIB, (0, 1, 2), 1000)]
    assert loads_of(units, assign(units, [0] * 3, split_bytes=MIB), 3) == [60 * MIB, 60 * MIB, 60 * MIB]


def test_what_a_rank_writes_in_any_case_counts() -> None:
    units = [Unit(40 * MIB, (0, 1), 400)]
    assert assign(units, [30 * MIB, 10 * MIB], split_bytes=MIB) == [[Piece(0, 0, 100), Piece(1, 100, 400)]]


def test_sets_with_little_choice_are_served_first() -> None:
    units = [Unit(90 * MIB, (0, 1, 2), 900), Unit(60 * MIB, (0, 1), 600)]
    assert loads_of(units, assign(units, [0] * 3, split_bytes=MIB), 3) == [50 * MIB, 50 * MIB, 50 * MIB]


def test_small_values_are_spread_whole() -> None:
    units = [Unit(10, (0, 1, 2)) for _ in range(7)]
    pieces = assign(units, [0] * 3, split_bytes=MIB)
    assert sorted(loads_of(units, pieces, 3)) == [20, 20, 30]


def test_no_cut_leaves_a_sliver() -> None:
    units = [Unit(8 * MIB, (0, 1), 8), Unit(8 * MIB + 8, (0, 1), 8 * MIB + 8)]
    pieces = assign(units, [0] * 2, split_bytes=MIB)
    assert [[(piece.rank, piece.end - piece.begin) for piece in parts] for parts in pieces] == [[(0, 8)], [(1, 8 * MIB + 8)]]
