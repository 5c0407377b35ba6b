"""Ranks that fail while they save beside training: every rank, in every phase, in every way, in real processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from faults.campaign.outcome import MAX_BAD, Outcome
from support.ranks import RankFailure, RankPool

from dcp_engine import BalancedSavePlanner, ShardWriter, committed_steps, compat, verify_checkpoint
from dcp_engine.background import BackgroundSaver
from dcp_engine.background.run import SaveRun
from dcp_engine.background.steps import HANDED
from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.backends.calls import SystemCalls, installed

PART = "ranks"
TITLE = "A rank is killed, stopped, raises, or stays away"
PROMISE = (
    "All surviving ranks get one and the same answer: the checkpoint is there, whole, or one error that names the rank, its phase and what"
    " it said, and nothing is published. Staging buffers are free again, and the next save works."
)

PHASES = ("arrive", "plan", "plans", "write", "handed", "publish", "published")
FAULTS = ("kill", "stop", "skip", "raise")
NUM_QUICK = 12
_FAILURE_SECS = 5.0
_PATIENCE_SECS = 5.0
_BOUND_SECS = 60.0
_RUN_SECS = 150.0
_TEXT = "planted on purpose"


@dataclass(frozen=True, slots=True)
class Point:
    """One fault.

    Attributes:
        world: number of ranks.
        rank: the one that fails.
        phase: "arrive": before it comes to the save; "plan": in its planner; "plans": before it hands over its plan; "write": in a write;
            "handed": before it hands over its results; "publish": the coordinator right before the rename, others while it does that;
            "published": the coordinator right after the rename.
        fault: "kill": SIGKILL; "stop": SIGSTOP until the others are through; "raise": an exception; "skip": it does not go on until the
            others are through.
    """

    world: int
    rank: int
    phase: str
    fault: str


def all_points() -> list[Point]:
    """Every combination, but for what cannot be: a rank that only waits neither raises nor stays away, and the rename is one call."""
    return [
        Point(world, rank, phase, fault)
        for world in (2, 3, 4)
        for rank in range(world)
        for phase in PHASES
        for fault in FAULTS
        if not (phase == "publish" and rank > 0 and fault in ("raise", "skip"))
        if not (phase == "published" and (rank > 0 or fault == "raise"))
    ]


def chosen(*, full: bool, seed: int) -> list[Point]:
    """All of them, or some: every phase and every fault, and the coordinator as well as others."""
    points = all_points()
    if full:
        return points
    random.Random(seed).shuffle(points)
    kinds = {(point.phase, point.fault): point for point in points if point.world < 4}
    turns = [(phase, FAULTS[(index + turn) % len(FAULTS)]) for turn in range(len(FAULTS)) for index, phase in enumerate(PHASES)]
    return [kinds[kind] for kind in turns if kind in kinds][:NUM_QUICK]


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """Run the part. ``workers`` is not used: the ranks of one point are processes already."""
    began = time.monotonic()
    facts: Counter[str] = Counter()
    bad: list[str] = []
    points = chosen(full=full, seed=seed)
    with RankPool(max_ranks=4) as pool:
        for point in points:
            broken, what = put(pool, point)
            facts[what] += 1
            facts[point.fault] += 1
            bad += [f"{point}: {text}" for text in broken]
    return Outcome(part=PART, points=len(points), seed=seed, facts=facts, bad=tuple(bad[:MAX_BAD]), secs=time.monotonic() - began)


def put(pool: RankPool, point: Point) -> tuple[list[str], str]:
    """Put one fault. Returns the broken promises, and how the save ended."""
    root = tempfile.mkdtemp(prefix="rank-faults-")
    try:
        expendable = {point.rank} if point.fault == "kill" else set()
        answers = pool.run(point.world, fail_once, root, point, timeout_secs=_RUN_SECS, expendable=expendable)
        return judged(point, answers, root)
    except RankFailure as failure:
        return [f"a rank did not answer: {failure}"[:2000]], "no answer"
    finally:
        shutil.rmtree(root, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one rank.

    Attributes:
        error: (type, rank, phase, found) of the save with the fault; None: it succeeded.
        secs: until that answer.
        is_free: all staging buffers were free after it.
        next_error: of the save after it; None: it succeeded.
    """

    error: tuple[str, int | None, str | None, str] | None
    secs: float
    is_free: bool
    next_error: str | None


def judged(point: Point, answers: list[Answer | None], root: str) -> tuple[list[str], str]:
    """The broken promises, and how the save ended."""
    bad = []
    told = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    if len(told) < point.world - (point.fault == "kill"):
        bad.append(f"ranks {sorted(set(range(point.world)) - set(told))} are gone")
    errors = {answer.error for answer in told.values()}
    if len(errors) != 1:
        bad.append(f"ranks disagree: {errors}")
    steps = committed_steps(root)
    succeeded = None in errors
    if steps != ([1, 2, 3] if succeeded else [1, 3]):
        bad.append(f"{steps} are published after {errors}")
    for step in steps:
        try:
            bad += [f"step {step} is damaged: {fault}" for fault in verify_checkpoint(f"{root}/step-{step:08d}").faults]
        except DcpEngineError as error:
            bad.append(f"step {step} cannot be read: {error}")
    for error in errors - {None}:
        assert error is not None
        if error[1] != point.rank or not error[2]:
            bad.append(f"the error names rank {error[1]} and phase {error[2]!r}: {error}")
        if point.fault == "raise" and point.phase != "arrive" and _TEXT not in error[3]:
            bad.append(f"the error does not say what was raised: {error}")
    bad += [f"rank {rank} was told after {answer.secs:.0f} s" for rank, answer in told.items() if answer.secs > _BOUND_SECS]
    bad += [f"rank {rank} holds a buffer" for rank, answer in told.items() if not answer.is_free]
    bad += [f"the next save failed on rank {rank}: {answer.next_error}" for rank, answer in told.items() if answer.next_error]
    return bad, "published" if succeeded else "failed"


# -- in the ranks -----------------------------------------------------------------------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    """Of this rank."""
    return {"model": {f"w{dist.get_rank()}": torch.full((64, 64), float(step))}, "shared": torch.arange(10)}


def writer_of(root: str, step: int) -> ShardWriter:
    """Of one step."""
    return ShardWriter(f"{root}/step-{step:08d}", codec="raw", threads=1)


def fail_once(root: str, point: Point) -> Answer:
    """A save, one with the fault, and another one."""
    rank = dist.get_rank()
    store = dist.PrefixStore("campaign", compat.default_store())
    store.set(f"pid/{rank}", str(os.getpid()))
    with BackgroundSaver() as warm:  # a process that has just started is slow
        warm.submit(state_of(1), writer=writer_of(root, 1), step=1).result(60)
    dist.barrier()
    saver = BackgroundSaver(failure_secs=_FAILURE_SECS, timeout_secs=_PATIENCE_SECS)
    fault = Fault(point, store) if rank == point.rank else None
    with prepared(fault, point) as planner:
        if fault is not None and point.phase == "arrive":
            if point.fault == "raise":  # training failed: it leaves, as at the end of a ``with``
                saver.close()
                return left(store)
            fault.happen()
        began = time.monotonic()
        handle = saver.submit(state_of(2), writer=writer_of(root, 2), step=2, planner=planner)
        error = handle.exception(_BOUND_SECS + 30)
        secs = time.monotonic() - began
        is_free = all(buffer.state.value == "free" for buffer in saver.stager.buffers)
        store.add("through", 1)
        if fault is None:
            wait_for(store, point.world - 1)
            wake(store, point)
            if (told := shown(error)) is not None:
                store.set("answer", "\x1f".join(map(str, told)))
    answer = Answer(shown(error), secs, is_free, None)
    if point.fault == "kill" or (point.fault == "raise" and point.phase == "arrive"):
        again(store, point, saver)
        saver = BackgroundSaver(failure_secs=_FAILURE_SECS, timeout_secs=30)
    with saver:
        next_error = saver.submit(state_of(3), writer=writer_of(root, 3), step=3).exception(60)
    return Answer(answer.error, answer.secs, answer.is_free, None if next_error is None else str(next_error))


def left(store: Any) -> Answer:
    """Of a rank whose training raised: it has no save that could fail, so it tells what the others were told."""
    store.wait(["answer"])
    kind, rank, phase, found = store.get("answer").decode().split("\x1f")
    return Answer((kind, int(rank), phase, found), 0.0, True, None)


def shown(error: BaseException | None) -> tuple[str, int | None, str | None, str] | None:
    """What all ranks must agree on. Seconds of silence differ from one watcher to the next run, not between ranks."""
    if error is None:
        return None
    assert isinstance(error, DcpEngineError), repr(error)
    return type(error).__name__, error.rank, error.phase, str(error.found)


def wait_for(store: Any, num_ranks: int) -> None:
    """Until so many ranks are through."""
    deadline = time.monotonic() + _BOUND_SECS
    while store.add("through", 0) < num_ranks and time.monotonic() < deadline:
        time.sleep(0.02)


def wake(store: Any, point: Point) -> None:
    """Let a stopped rank go on, and one that stays away come back."""
    if point.fault == "stop":
        os.kill(int(store.get(f"pid/{point.rank}")), signal.SIGCONT)


def again(store: Any, point: Point, saver: BackgroundSaver) -> None:
    """The survivors make a new process group."""
    survivors = [rank for rank in range(point.world) if rank != point.rank]
    rank = survivors.index(dist.get_rank())
    with contextlib.suppress(DcpEngineError):
        saver.close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=len(survivors))


class Fault:
    """Happens once, in the process that is to fail."""

    def __init__(self, point: Point, store: Any) -> None:
        self._point = point
        self._store = store
        self._lock = threading.Lock()
        self._has_happened = False

    def happen(self) -> None:
        """Now, unless it has."""
        with self._lock:
            if self._has_happened:
                return
            self._has_happened = True
        if self._point.fault == "raise":
            raise ValueError(_TEXT)
        if self._point.fault == "skip":
            wait_for(self._store.clone(), self._point.world - 1)
            return
        os.kill(os.getpid(), signal.SIGKILL if self._point.fault == "kill" else signal.SIGSTOP)
        time.sleep(0.1)  # a signal to a process may reach another thread of it first


class FaultyPlanner(BalancedSavePlanner):
    """Fails while it plans."""

    def __init__(self, happen: Callable[[], None]) -> None:
        super().__init__()
        self._happen = happen

    def create_local_plan(self) -> Any:
        self._happen()
        return super().create_local_plan()


class FaultyCalls(SystemCalls):
    """Fails in the first write, or right before or after the rename that publishes; or is slow there."""

    def __init__(self, write: Callable[[], None], publish: Callable[[], None], published: Callable[[], None]) -> None:
        self._write = write
        self._publish = publish
        self._published = published

    def pwritev(self, fd: int, views: Any, position: int) -> int:
        self._write()
        return super().pwritev(fd, views, position)

    def rename(self, source: str, target: str) -> None:
        is_publishing = os.path.basename(target).startswith("step-")
        if is_publishing:
            self._publish()
        super().rename(source, target)
        if is_publishing:
            self._published()


@contextlib.contextmanager
def prepared(fault: Fault | None, point: Point) -> Iterator[BalancedSavePlanner | None]:
    """The fault is in its place. Gives the planner to use."""
    happen = fault.happen if fault is not None else nothing
    is_coordinator = dist.get_rank() == 0
    publish: Callable[[], None] = nothing
    if point.phase == "publish" and is_coordinator:
        publish = happen if fault is not None else linger
    enter, entered = SaveRun.enter, set[str]()

    def watched_enter(run: SaveRun, phase: str) -> None:
        is_first, _ = phase not in entered, entered.add(phase)
        if (is_first and point.phase == "plans" and phase.startswith("waiting for plans")) or (
            is_first and point.phase == "handed" and phase == HANDED
        ):
            happen()
        if is_first and point.phase == "publish" and phase == HANDED and not is_coordinator and fault is not None:
            threading.Timer(0.3, happen).start()
        enter(run, phase)

    SaveRun.enter = watched_enter  # type: ignore[method-assign]
    try:
        published = happen if point.phase == "published" else nothing
        with installed(FaultyCalls(happen if point.phase == "write" else nothing, publish, published)):
            yield FaultyPlanner(happen) if point.phase == "plan" else None
    finally:
        SaveRun.enter = enter  # type: ignore[method-assign]


def nothing() -> None:
    """Where nothing happens."""


def linger() -> None:
    """Long enough for others to fail meanwhile."""
    time.sleep(0.8)


__all__ = ["PART", "PROMISE", "TITLE", "Point", "all_points", "chosen", "judged", "put", "run"]
