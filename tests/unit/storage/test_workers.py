"""The worker pool: order, errors, cancellation, reuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from dcp_engine.errors import InvalidOptionError
from dcp_engine.storage import workers
from dcp_engine.storage.codecs import Scratch
from dcp_engine.storage.workers import WorkerPool, settled

WAIT_SECS = 60


def test_results_and_errors_reach_the_caller() -> None:
    with WorkerPool(2) as pool:
        assert pool.submit(lambda: 7).result(WAIT_SECS) == 7
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result(WAIT_SECS)
        assert pool.submit(lambda: 8).result(WAIT_SECS) == 8


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_base_exception_reaches_the_caller_and_the_thread_lives_on(error: type[BaseException]) -> None:
    def work() -> None:
        raise error("stop")

    with WorkerPool(1) as pool:
        with pytest.raises(error, match="stop"):
            pool.submit(work).result(WAIT_SECS)
        assert pool.submit(lambda: 1).result(WAIT_SECS) == 1


def test_a_thread_that_dies_before_it_runs_costs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that finds no memory for its first frame: ``Thread.start`` alone would wait for it without end."""
    monkeypatch.setattr(workers, "_START_SECS", 0.01)
    monkeypatch.setattr(workers._Worker, "_bootstrap", lambda self: None)
    with WorkerPool(3) as pool:
        assert pool.submit(threading.get_ident).result(WAIT_SECS) == threading.get_ident()


def test_a_thread_that_begins_too_late_is_not_one_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START_SECS", 0.01)
    bootstrap, may_begin, late = workers._Worker._bootstrap, threading.Event(), list[threading.Thread]()

    def slow(worker: Any) -> None:
        late.append(worker)
        may_begin.wait(WAIT_SECS)
        bootstrap(worker)

    monkeypatch.setattr(workers._Worker, "_bootstrap", slow)
    with WorkerPool(1) as pool:
        assert pool.submit(threading.get_ident).result(WAIT_SECS) == threading.get_ident()
        may_begin.set()
        while late[0].ident is None or late[0].is_alive():
            time.sleep(0.001)
        assert pool.submit(lambda: 7).result(WAIT_SECS) == 7


def test_every_item_is_worked_on_once() -> None:
    seen: list[int] = []
    lock = threading.Lock()

    def work(item: int, scratch: Scratch) -> None:
        with lock:
            seen.append(item)

    with WorkerPool(3) as pool:
        pool.for_each(range(1000), work, limit=3)
        assert sorted(seen) == list(range(1000))
        pool.for_each([], work, limit=3)
        assert len(seen) == 1000


def test_items_start_in_order() -> None:
    seen: list[int] = []
    with WorkerPool(1) as pool:
        pool.for_each(range(100), lambda item, scratch: seen.append(item), limit=1)
    assert seen == list(range(100))


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_limit_bounds_what_runs_at_once(limit: int) -> None:
    running = 0
    most = 0
    lock = threading.Lock()

    def work(item: int, scratch: Scratch) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)
        with lock:
            running -= 1

    with WorkerPool(4) as pool:
        pool.for_each(range(30), work, limit=limit)
    assert 1 <= most <= max(1, limit)


def test_two_workers_run_at_once() -> None:
    barrier = threading.Barrier(2)
    places: list[int] = []
    with WorkerPool(2) as pool:
        pool.for_each(range(2), lambda item, scratch: places.append(barrier.wait(WAIT_SECS)), limit=2)
    assert sorted(places) == [0, 1]


def test_after_an_error_no_item_is_started_and_none_is_running() -> None:
    started: list[int] = []
    first_runs = threading.Event()
    failed = threading.Event()
    ended = threading.Event()

    def work(item: int, scratch: Scratch) -> None:
        started.append(item)
        if item == 0:
            first_runs.set()
            assert failed.wait(WAIT_SECS)
            ended.set()
        else:
            assert first_runs.wait(WAIT_SECS)
            failed.set()
            raise ValueError(f"item {item}")

    with WorkerPool(2) as pool:
        with pytest.raises(ValueError, match="item 1"):
            pool.for_each(range(100), work, limit=2)
        assert ended.is_set()
        # The worker of item 0 may have taken one more item before the error was recorded.
        assert len(started) <= 3
        assert pool.submit(lambda: 5).result(WAIT_SECS) == 5


def test_a_failing_iterable_is_an_error_of_the_caller() -> None:
    def items() -> object:
        yield 1
        raise KeyError("plan")

    with WorkerPool(2) as pool, pytest.raises(KeyError, match="plan"):
        pool.for_each(items(), lambda item, scratch: None, limit=2)  # type: ignore[arg-type]


def test_an_interrupted_block_cancels_what_waits_and_awaits_what_runs() -> None:
    running = threading.Event()
    release = threading.Event()
    futures: list[Future[str]] = []

    def work() -> str:
        running.set()
        assert release.wait(WAIT_SECS)
        return "ended"

    def interrupted() -> None:
        with settled(futures, release.set):
            futures.append(pool.submit(work))
            futures.extend(pool.submit(lambda: "never") for _ in range(5))
            assert running.wait(WAIT_SECS)
            raise KeyboardInterrupt

    with WorkerPool(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert futures[0].result(0) == "ended"
        for future in futures[1:]:
            with pytest.raises(CancelledError):
                future.result(0)


def test_an_interrupt_while_loops_are_started_leaves_none_running(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    done: list[int] = []
    genuine = WorkerPool.submit

    def work(item: int, scratch: object) -> None:
        begun.set()
        time.sleep(0.001)
        done.append(item)

    def interrupted(self: WorkerPool, task: Callable[[], Any]) -> Future[Any]:
        if begun.is_set():
            raise KeyboardInterrupt
        future = genuine(self, task)
        assert begun.wait(WAIT_SECS)
        return future

    with WorkerPool(2) as pool:
        monkeypatch.setattr(WorkerPool, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.for_each(range(10_000), work, limit=2)
        assert len(done) < 10_000
        ended = len(done)
    assert len(done) == ended


def test_a_scratch_has_one_holder_and_the_last_one_used_comes_back_first() -> None:
    with WorkerPool(1) as pool:
        first, second = pool.lease_scratch(), pool.lease_scratch()
        assert first is not second
        pool.return_scratch(first)
        pool.return_scratch(second)
        assert pool.lease_scratch() is second
        assert pool.lease_scratch() is first


def test_without_threads_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen: list[str] = []
    with WorkerPool(2) as pool:
        pool.for_each(range(3), lambda item, scratch: seen.append(threading.current_thread().name), limit=2)
        assert pool.submit(lambda: 1).result(0) == 1
    assert seen == [threading.current_thread().name] * 3


def test_close_finishes_what_is_queued_and_may_be_repeated() -> None:
    pool = WorkerPool(1)
    futures = [pool.submit(lambda index=index: index) for index in range(50)]  # type: ignore[misc]
    pool.close()
    pool.close()
    assert [future.result(0) for future in futures] == list(range(50))


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="threads >= 1"):
        WorkerPool(0)
