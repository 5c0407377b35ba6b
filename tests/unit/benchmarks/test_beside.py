"""What a save costs the training beside it, from a loop and a save whose times are known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks import beside
from benchmarks.beside import Started, measure_save


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Loop:
    """A step takes a second, and two while a save is under way, which is durable in its third step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.durable: Future[Any] = Future()
        self.is_saving = False
        self.calls: list[str] = []
        self._steps_left = 3

    def step(self, before_update: Callable[[], None]) -> None:
        self.calls.append("step")
        self._clock.now += 1.0
        before_update()
        if self.is_saving:
            self._clock.now += 1.0
            self._steps_left -= 1
            if not self._steps_left:
                self.durable.set_result(None)

    def hold(self) -> None:
        self.calls.append("hold")

    def begin(self) -> None:
        self.calls.append("begin")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(beside, "time", clock)
    return clock


def test_lost_is_what_has_passed_without_the_steps_that_were_made(clock: Clock) -> None:
    loop = Loop(clock)

    def start() -> Started:
        loop.calls.append("start")
        clock.now += 0.5
        loop.is_saving = True
        return Started(durable=loop.durable)

    facts = measure_save(loop, start, num_undisturbed=2)
    assert loop.calls == ["step", "step", "hold", "begin", "start", "step", "step", "step"]
    assert facts == {"secs": 3.5, "blocked_secs": 0.5, "durable_secs": 6.5, "step_secs": 1.0, "steps": 3.0, "slowdown": 3.5 / 3}


def test_a_save_that_costs_nothing_has_lost_a_millisecond_so_that_ratios_exist(clock: Clock) -> None:
    loop = Loop(clock)
    loop.durable.set_result(None)
    facts = measure_save(loop, lambda: Started(durable=loop.durable), num_undisturbed=1)
    assert (facts["secs"], facts["steps"], facts["slowdown"]) == (0.001, 1.0, 0.0)


def test_a_step_waits_on_the_host_for_who_needs_it_before_it_changes_anything(clock: Clock) -> None:
    loop = Loop(clock)
    loop.durable.set_result(None)
    staged: Future[Any] = Future()
    waited = []

    def finish() -> None:
        time.sleep(0.05)
        waited.append("staged")
        staged.set_result(None)

    threading.Thread(target=finish).start()
    measure_save(loop, lambda: Started(durable=loop.durable, staged=staged), num_undisturbed=1)
    assert waited == ["staged"]


def test_a_failed_save_has_no_figure(clock: Clock) -> None:
    loop = Loop(clock)
    loop.durable.set_exception(OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        measure_save(loop, lambda: Started(durable=loop.durable), num_undisturbed=1)
