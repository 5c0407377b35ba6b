from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.storage import scattered
from dcp_engine.storage.scattered import gather, scatter


def places(lengths: list[int], gaps: list[int], alignment: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A memory, and runs in it that lie apart: offsets and lengths, multiples of the alignment."""
    num_bytes = np.array(lengths, dtype=np.int64) * alignment
    starts = np.cumsum(np.array(gaps, dtype=np.int64) * alignment + num_bytes) - num_bytes
    memory = np.arange(int((starts + num_bytes).max(initial=0)) + 8, dtype=np.uint64).view(np.uint8)[
        : int((starts + num_bytes).max(initial=0)) + 8
    ]
    return memory.copy(), starts, num_bytes


RUNS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=30)


@given(RUNS, st.sampled_from((1, 2, 4, 8)))
def test_runs_are_gathered_as_a_loop_would(runs: list[tuple[int, int]], alignment: int) -> None:
    memory, starts, num_bytes = places([run[0] for run in runs], [run[1] for run in runs], alignment)
    order = np.argsort([hash((index, len(runs))) for index in range(len(runs))])
    starts, num_bytes = starts[order], num_bytes[order]
    expected = b"".join(memory[start : start + length].tobytes() for start, length in zip(starts, num_bytes, strict=True))
    assert gather(starts + memory.ctypes.data, num_bytes).tobytes() == expected


@given(RUNS, RUNS, st.sampled_from((1, 2, 4, 8)))
def test_runs_are_scattered_as_a_loop_would(targets: list[tuple[int, int]], gaps: list[tuple[int, int]], alignment: int) -> None:
    lengths = [run[0] for run in targets]
    memory, starts, num_bytes = places(lengths, [run[1] for run in targets], alignment)
    buffer, sources, _ = places(lengths, [(gaps * 30)[number][1] for number in range(len(lengths))], alignment)
    expected = memory.copy()
    for target, source, length in zip(starts, sources, num_bytes, strict=True):
        expected[target : target + length] = buffer[source : source + length]
    scatter(buffer, sources, starts + memory.ctypes.data, num_bytes)
    assert memory.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("indexed", "piece"), [(0, 1 << 16), (256, 16), (256, 1)])
def test_short_and_long_runs_are_moved_alike(monkeypatch: pytest.MonkeyPatch, indexed: int, piece: int) -> None:
    monkeypatch.setattr(scattered, "_INDEXED_ITEMS", indexed)
    monkeypatch.setattr(scattered, "_PIECE_ITEMS", piece)
    memory = np.arange(100, dtype=np.uint8)
    starts, num_bytes = np.array([40, 0, 93]), np.array([3, 20, 7])
    found = gather(starts + memory.ctypes.data, num_bytes)
    assert found.tolist() == [40, 41, 42, *range(20), *range(93, 100)]
    target = np.zeros(100, dtype=np.uint8)
    scatter(found, np.array([0, 3, 23]), starts + target.ctypes.data, num_bytes)
    assert target[starts[0] : 43].tolist() == [40, 41, 42]
    assert target[:20].tolist() == list(range(20))
    assert target[20:40].tolist() == [0] * 20
    assert target[93:].tolist() == list(range(93, 100))


def test_nothing_is_moved_where_there_are_no_runs() -> None:
    empty = np.zeros(0, dtype=np.int64)
    assert gather(empty, empty).tolist() == []
    scatter(np.zeros(4, dtype=np.uint8), empty, empty, empty)


def test_a_run_that_reaches_out_of_its_buffer_is_refused() -> None:
    target = np.zeros(8, dtype=np.uint8)
    with pytest.raises(AssertionError, match="reaches out"):
        scatter(np.zeros(4, dtype=np.uint8), np.array([1]), np.array([target.ctypes.data]), np.array([4]))
