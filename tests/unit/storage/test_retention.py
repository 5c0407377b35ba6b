"""Which steps may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.storage.retention import surplus_steps


@pytest.mark.parametrize(
    ("committed", "newest_good", "keep_last", "surplus"),
    [
        ([], None, 1, []),
        ([1, 2, 3], None, 1, []),
        ([1, 2, 3], 3, 1, [1, 2]),
        ([3, 1, 2], 3, 2, [1]),
        ([1, 2, 3], 3, 3, []),
        ([1, 2, 3], 3, 100, []),
        ([1, 2, 3], 2, 1, [1]),  # 3 is damaged: it stays and does not count
        ([1, 2, 3], 1, 1, []),
        ([5], 5, 1, []),
    ],
)
def test_the_newest_good_step_and_those_before_it_stay(
    committed: list[int], newest_good: int | None, keep_last: int, surplus: list[int]
) -> None:
    assert surplus_steps(committed, newest_good=newest_good, keep_last=keep_last) == surplus


@given(st.sets(st.integers(0, 50)), st.integers(1, 5), st.data())
def test_whatever_the_steps_no_good_one_is_lost(committed: set[int], keep_last: int, data: st.DataObject) -> None:
    good = data.draw(st.sampled_from(sorted(committed))) if committed else None
    surplus = surplus_steps(committed, newest_good=good, keep_last=keep_last)
    kept = committed - set(surplus)
    assert set(surplus) <= committed
    assert good is None or {step for step in committed if step >= good} <= kept
    assert surplus == sorted(surplus)
    assert all(step < other for step in surplus for other in kept)
    if good is not None:
        older = [step for step in committed if step <= good]
        assert len([step for step in kept if step <= good]) == min(keep_last, len(older))
