"""Samples taken twice or never where a run went on are counted, for any shift of the position, and epochs that repeat are no fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.testing.samples import Boundary, all_samples, boundaries

BATCH = 100
NUM_SAMPLES = 10_000


def steps(first: int, last: int, *, shift: int = 0, num_samples: int = NUM_SAMPLES) -> dict[int, list[int]]:
    """Samples in order, ``shift`` samples off the position."""
    return {step: [((step - 1) * BATCH + shift + i) % num_samples for i in range(BATCH)] for step in range(first, last + 1)}


def at(found: tuple[Boundary, ...]) -> list[tuple[str, int, int, int, int, int]]:
    return [(one.leg, one.step, one.num_before, one.num_after, len(one.repeated), len(one.lost)) for one in found]


def test_position_that_is_right_has_a_thousand_on_each_side_and_no_fault() -> None:
    found = boundaries(steps(1, 40), [("a", 0, steps(1, 15)), ("b", 15, steps(16, 28)), ("c", 28, steps(29, 40))])
    assert at(found) == [("b", 15, 1000, 1000, 0, 0), ("c", 28, 1000, 1000, 0, 0)]


@pytest.mark.parametrize(("shift", "repeated", "lost"), [(BATCH, 0, BATCH), (-BATCH, BATCH, 0), (1, 0, 1), (-1, 1, 0), (250, 0, 250)])
def test_position_that_is_off_is_caught(shift: int, repeated: int, lost: int) -> None:
    (found,) = boundaries(steps(1, 40), [("a", 0, steps(1, 15)), ("b", 15, steps(16, 40, shift=shift))])
    assert (len(found.repeated), len(found.lost)) == (repeated, lost)
    if shift == BATCH:
        assert found.lost == tuple(range(1500, 1600))
    if shift == -BATCH:
        assert found.repeated == tuple(range(1400, 1500))


def test_steps_behind_the_checkpoint_were_trained_again_and_do_not_count() -> None:
    (found,) = boundaries(steps(1, 40), [("a", 0, steps(1, 18)), ("b", 15, steps(16, 40))])
    assert at((found,)) == [("b", 15, 1000, 1000, 0, 0)]


@given(st.integers(1, 39), st.integers(1, 30))
def test_short_epochs_repeat_samples_and_that_is_no_fault(stop: int, epoch_steps: int) -> None:
    size = epoch_steps * BATCH
    (found,) = boundaries(
        steps(1, 40, num_samples=size), [("a", 0, steps(1, stop, num_samples=size)), ("b", stop, steps(stop + 1, 40, num_samples=size))]
    )
    assert (found.repeated, found.lost) == ((), ())


def test_samples_that_no_run_took_lose_those_that_it_should_have() -> None:
    (found,) = boundaries(steps(1, 4), [("a", 0, steps(1, 2)), ("b", 2, {3: list(range(90_000, 90_100)), 4: list(range(90_100, 90_200))})])
    assert (found.num_after, found.repeated, found.lost) == (200, (), tuple(range(200, 400)))


def test_samples_of_ranks_together() -> None:
    assert all_samples([(3, 1), (2, 4)]) == (1, 2, 3, 4)
    assert all_samples([(1, 2), (1, 2)]) == (1, 2)
    assert all_samples([(1, 1), (1,)]) == (1, 1)
    assert all_samples(["a", "a"]) == "a"
    assert all_samples(["a", "b"]) is None
    assert all_samples([(1,), None]) is None
