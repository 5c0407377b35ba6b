"""A save beside training: how long its call blocks the loop, when the checkpoint is durable, and the training time that went missing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["AsyncEngine", "Loop", "Started", "measure_save"]

_LEAST_LOST_SECS = 1e-3
"""What is lost is a difference of measured times and may come out as nothing, or less, by chance; ratios want something to divide by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A save under way.

    Attributes:
        durable: done when the checkpoint is complete; its result raises what went wrong.
        staged: the state must not be changed before it is done; None where the call has seen to that.
    """

    durable: Future[Any]
    staged: Future[Any] | None = None


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncEngine:
    """One engine in one configuration, saving beside training.

    Attributes:
        name: as the tables show it.
        role: ours or DCP.
        open: once, before the first save.
        start: begins to save a state (as a training loop hands it to DCP) to a path that does not exist yet.
        load: fills the tensors of a state from a path.
        close: once, when all saves are through.
        begin: before each save, outside the clock.
        end: after each save, outside the clock.
        note: what a reader has to know.
        unavailable: why it cannot run; empty where it can.
    """

    name: str
    role: Any
    start: Callable[[str, Mapping[str, Any]], Started]
    load: Callable[[str, Mapping[str, Any]], None]
    open: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    begin: Callable[[], None] = _nothing
    end: Callable[[], None] = _nothing
    note: str = ""
    unavailable: str = ""


class Loop(Protocol):
    """A training loop."""

    def step(self, before_update: Callable[[], None]) -> None:
        """One step, through when this returns.

        Args:
            before_update: called before the step changes what may be saved.
        """

    def hold(self) -> None:
        """Remember what the state is now, to compare with what is saved now. Not on the clock."""

    def begin(self) -> None:
        """Begin the next step, as far as it changes nothing that may be saved, without waiting: a loop whose device works behind it has
        something under way when it saves, and a call that waits for the device shows.
        """


def measure_save(loop: Loop, start: Callable[[], Started], *, num_undisturbed: int) -> dict[str, float]:
    """Train undisturbed, then with a save from its start until it is durable.

    Args:
        loop: trains.
        start: begins the save.
        num_undisturbed: steps whose median is what a step takes, measured right before the save.

    Returns:
        ``secs``: training time lost, from the start of the save to the end of the step in which it became durable: the time that has
        passed without that of the steps that were made; at least a millisecond. ``blocked_secs``: in the call. ``durable_secs``: from
        the call to the durable checkpoint. ``step_secs``: of an undisturbed step. ``steps``: made beside the save.
        ``slowdown``: by how much a step took longer on average, 0.02 for 2 %.

    Raises:
        BaseException: whatever the save raises.
    """
    usual = statistics.median(_timed(loop) for _ in range(num_undisturbed))
    ended: list[float] = []
    steps = 0
    loop.hold()
    began = time.perf_counter()
    loop.begin()
    called = time.perf_counter()
    started = start()
    blocked = time.perf_counter() - called
    started.durable.add_done_callback(lambda _: ended.append(time.perf_counter()))

    def before_update() -> None:
        if started.staged is not None:
            started.staged.result()

    while steps == 0 or not started.durable.done():
        loop.step(before_update)
        steps += 1
    elapsed = time.perf_counter() - began
    started.durable.result()
    lost = elapsed - steps * usual
    return {
        "secs": max(lost, _LEAST_LOST_SECS),
        "blocked_secs": blocked,
        "durable_secs": ended[0] - called,
        "step_secs": usual,
        "steps": float(steps),
        "slowdown": lost / (steps * usual),
    }


def _timed(loop: Loop) -> float:
    begin = time.perf_counter()
    loop.step(_nothing)
    return time.perf_counter() - begin
