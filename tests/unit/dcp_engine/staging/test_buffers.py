"""Who has a staging buffer."""

from __future__ import annotations

import threading

import pytest

from dcp_engine.errors import ClosedError, StagingTimeoutError
from dcp_engine.staging.buffers import BufferPool, BufferState


def states(pool: BufferPool) -> list[str]:
    return [info.state.value for info in pool.info()]


def test_a_buffer_goes_from_filling_over_staged_and_writing_back_to_free() -> None:
    pool = BufferPool(2)
    buffer, waited_secs = pool.acquire("step 1", 0)
    assert waited_secs >= 0
    assert states(pool) == ["filling", "free"]
    assert pool.info()[0].owner == "step 1"
    for state in (BufferState.STAGED, BufferState.WRITING):
        pool.enter(buffer, buffer.turn, state)
        assert pool.info()[0].state is state
    pool.release(buffer, buffer.turn)
    assert states(pool) == ["free", "free"]
    assert pool.info()[0].owner == ""


def test_a_third_holder_waits_and_the_error_names_the_other_two() -> None:
    pool = BufferPool(2)
    pool.acquire("step 1", 0)
    buffer, _ = pool.acquire("step 2", 0)
    pool.enter(buffer, buffer.turn, BufferState.WRITING)
    with pytest.raises(StagingTimeoutError, match=r"filling for .* by step 1; writing for .* by step 2"):
        pool.acquire("step 3", 0.01)


def test_a_waiting_holder_gets_the_buffer_that_is_given_back() -> None:
    pool = BufferPool(1)
    first, _ = pool.acquire("step 1", 0)
    threading.Timer(0.05, lambda: pool.release(first, first.turn)).start()
    second, waited_secs = pool.acquire("step 2", 30)
    assert second is first
    assert waited_secs > 0


def test_a_buffer_that_was_given_back_does_not_come_to_life_again() -> None:
    pool = BufferPool(1)
    buffer, _ = pool.acquire("step 1", 0)
    pool.release(buffer, buffer.turn)
    pool.release(buffer, buffer.turn)
    pool.enter(buffer, buffer.turn, BufferState.STAGED)
    assert states(pool) == ["free"]


def test_closing_ends_waiting_and_refuses_what_comes_later() -> None:
    pool = BufferPool(1)
    pool.acquire("step 1", 0)
    threading.Timer(0.05, pool.close).start()
    with pytest.raises(ClosedError):
        pool.acquire("step 2", 30)
    pool.close()
    with pytest.raises(ClosedError):
        pool.acquire("step 3", 0)


def test_what_a_former_holder_says_is_not_heard() -> None:
    pool = BufferPool(1)
    buffer, _ = pool.acquire("step 1", 0)
    former = buffer.turn
    pool.release(buffer, former)
    pool.acquire("step 2", 0)
    pool.enter(buffer, former, BufferState.WRITING)
    pool.release(buffer, former)
    assert (pool.info()[0].state, pool.info()[0].owner) == (BufferState.FILLING, "step 2")
