"""How much is read at once, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.storage.read_plan import read_budget, take_turns

MIB = 2**20


@pytest.mark.parametrize(
    ("bytes_in_flight", "num_threads", "span_bytes", "num_workers"),
    [
        (256 * MIB, 8, 8 * MIB, 8),  # the default on a large machine: nobody waits
        (256 * MIB, 16, 4 * MIB, 16),
        (256 * MIB, 32, 4 * MIB, 16),
        (64 * MIB, 2, 8 * MIB, 2),
        (40 * MIB, 2, 6 * MIB, 2),
        (32 * MIB, 4, 4 * MIB, 2),
        (4 * MIB, 4, 4 * MIB, 1),  # less than one worker needs
    ],
)
def test_workers_together_stay_within_the_bound(bytes_in_flight: int, num_threads: int, span_bytes: int, num_workers: int) -> None:
    assert read_budget(bytes_in_flight, num_threads) == (span_bytes, num_workers)


@pytest.mark.parametrize(
    ("groups", "num_lanes", "ordered"),
    [
        ([], 2, ""),
        (["abc"], 2, "abc"),
        (["abc", "xyz"], 1, "abcxyz"),
        (["abc", "xyz"], 2, "axbycz"),
        (["a", "wxyz", "bc"], 2, "awbxcyz"),  # the third group takes the place of the first
        (["", "ab", "", "x"], 2, "axb"),
    ],
)
def test_files_take_turns(groups: list[str], num_lanes: int, ordered: str) -> None:
    assert "".join(take_turns(groups, num_lanes)) == ordered


@given(sizes=st.lists(st.integers(0, 5), max_size=8), num_lanes=st.integers(1, 4))
def test_turns_leave_nothing_out_and_keep_the_order_of_each_file(sizes: list[int], num_lanes: int) -> None:
    groups = [[(file, index) for index in range(size)] for file, size in enumerate(sizes)]
    ordered = list(take_turns(groups, num_lanes))
    assert [[item for item in ordered if item[0] == file] for file in range(len(sizes))] == groups
    first, last = ({item[0]: place for place, item in places} for places in (reversed(list(enumerate(ordered))), enumerate(ordered)))
    assert all(sum(first[file] <= place <= last[file] for file in first) <= num_lanes for place in range(len(ordered)))
