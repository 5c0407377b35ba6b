"""How much is read at once."""

from __future__ import annotations

import pytest

from dcp_engine.storage.read_plan import read_budget

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
