"""Starts the ranks of one leg as fresh processes, kills those that are to be killed, and ends all of them, whatever happens."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcp_engine.errors import InvalidOptionError, LegFailedError
from dcp_engine.objects import encode_object
from dcp_engine.testing.processes import RankProcesses
from dcp_engine.testing.records import StepRecord, read_records
from dcp_engine.testing.stops import SAVE_POINTS, LegPlan, StopAt

__all__ = ["LegRun", "Target", "run_leg", "target_of"]

_POLL_SECS = 0.02
_END_SECS = 10.0
_LOG_LINES = 30


@dataclass(frozen=True, slots=True)
class Target:
    """A function that another process can find, and arguments that it can be sent.

    Attributes:
        module: name of its module.
        qualname: name in the module.
        file: source of the module.
        arguments: positional and keyword arguments besides the context, encoded.
    """

    module: str
    qualname: str
    file: str
    arguments: bytes


def target_of(make_run: Callable[..., object]) -> Target:
    """Where another process finds the function.

    Args:
        make_run: defined at the top level of a module, or a ``functools.partial`` of one with arguments that the format holds.

    Raises:
        InvalidOptionError: it is defined elsewhere: inside another function, for instance.
        UnencodableObjectError: an argument cannot be sent.
    """
    args, keywords = [], {}
    function: Any = make_run
    if isinstance(function, functools.partial):
        function, args, keywords = function.func, list(function.args), dict(function.keywords)
    qualname = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "<" in qualname:
        raise InvalidOptionError(
            "another process cannot find this training function",
            expected="a function at the top level of a module, or functools.partial of one",
            found=repr(make_run)[:300],
        )
    file = inspect.getsourcefile(function)
    if file is None or not os.path.exists(file):
        raise InvalidOptionError("the training function has no source file", expected="a function of a module", found=repr(make_run)[:300])
    arguments = encode_object({"args": args, "keywords": keywords}, key="arguments")
    return Target(function.__module__, qualname, os.path.realpath(file), arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRun:
    """What became of a leg.

    Attributes:
        plan: of it.
        records: of each rank, in order.
        exit_statuses: of each rank; negative: the number of the signal that it died of.
        reached: stops (by their place in the plan) that were reached, with the ranks that did.
        timed_out: it had to be ended.
        folder: with the logs.
    """

    plan: LegPlan
    records: tuple[tuple[StepRecord, ...], ...]
    exit_statuses: tuple[int, ...]
    reached: Mapping[int, frozenset[int]]
    timed_out: bool
    folder: Path

    def require_planned_end(self) -> None:
        """Refuse a leg that did not end as it had to.

        Raises:
            LegFailedError: says how it ended, with the end of the log of the rank that failed.
        """
        world_size = self.plan.layout.world_size
        stopped = any(_is_complete(stop, self.reached[number], world_size) for number, stop in enumerate(self.plan.stops))
        orderly = all(stop.end == "stop" for stop in self.plan.stops)
        if self.timed_out:
            self._fail("hung, and was ended")
        elif self.plan.stops and not stopped:
            self._fail("was never at its stop" if not any(self.exit_statuses) else "failed before it was at its stop")
        elif orderly and any(self.exit_statuses):
            self._fail("failed")
        elif not self.plan.stops and not all(self.records):
            self._fail("recorded no step")

    def _fail(self, how: str) -> None:
        rank = _first_failure(self.exit_statuses)
        raise LegFailedError(
            f"the leg {self.plan.name!r} on {self.plan.layout} {how}",
            rank=rank,
            step=max((record.step for record in self.records[rank]), default=None),
            expected=self.plan.title,
            found=f"exit statuses {list(self.exit_statuses)}; the log of rank {rank} ends with\n{_log_tail(self.folder, rank)}",
        )


def run_leg(
    processes: RankProcesses, target: Target, plan: LegPlan, *, folder: Path, root: Path, seed: int, timeout_secs: float, grace_secs: float
) -> LegRun:
    """Runs one leg to its end.

    Args:
        processes: that start ranks.
        target: the training function.
        plan: of the leg.
        folder: for jobs, records and logs; made here.
        root: for the checkpoints; made where it is missing.
        seed: of the global generators of all ranks.
        timeout_secs: after which the leg is ended.
        grace_secs: after which the other ranks are killed, once one has failed.
    """
    folder.mkdir(parents=True)
    root.mkdir(parents=True, exist_ok=True)
    with _Ranks(processes, plan, folder) as ranks:
        for rank in range(plan.layout.world_size):
            context = {
                "root": str(root),
                "resume": plan.resumes,
                "rank": rank,
                "world_size": plan.layout.world_size,
                "layout": str(plan.layout),
                "leg": plan.name,
                "folder": str(folder),
            }
            job = {
                **asdict(target),
                "context": context,
                "stops": [asdict(stop) for stop in plan.stops],
                "seed": seed,
                "init_group": plan.layout.init_group,
                "timeout_secs": timeout_secs,
            }
            ranks.start(rank, job)
        timed_out = ranks.wait(timeout_secs, grace_secs)
        statuses = ranks.exit_statuses()
    return LegRun(
        plan=plan,
        records=tuple(read_records(str(folder / f"rank-{rank:05d}.jsonl")) for rank in range(plan.layout.world_size)),
        exit_statuses=statuses,
        reached={number: _reached(folder, number) for number in range(len(plan.stops))},
        timed_out=timed_out,
        folder=folder,
    )


class _Ranks:
    """The processes of one leg. On the way out all are ended, with everything that they started."""

    def __init__(self, processes: RankProcesses, plan: LegPlan, folder: Path) -> None:
        import torch.distributed as dist

        self._processes = processes
        self._plan = plan
        self._folder = folder
        self._pids: list[int] = []
        self._killed: set[int] = set()
        # In this process, which no rank can take down, and on a port that nobody else can take before the ranks have it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def start(self, rank: int, job: dict[str, Any]) -> None:
        path = self._folder / f"job-{rank:05d}"
        path.write_bytes(encode_object(job, key="job"))
        world_size = self._plan.layout.world_size
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            # As torchrun does it: the store is the launcher's.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self._pids.append(self._processes.start(path, log=_log(self._folder, rank), environment=environment))

    def wait(self, timeout_secs: float, grace_secs: float) -> bool:
        """Waits until all have ended; whether they had to be ended because it took too long."""
        deadline = time.monotonic() + timeout_secs
        failed_at: float | None = None
        while self._running():
            now = time.monotonic()
            self._kill_where_due()
            if failed_at is None and any(self._processes.status(pid) for pid in self._pids):
                failed_at = now
            if failed_at is not None and now > failed_at + grace_secs:
                self._signal(self._pids, signal.SIGKILL)
            if now > deadline:
                # Each rank that still runs prints where it is, and ends.
                self._signal(self._pids, signal.SIGABRT)
                self._await_end()
                return True
            time.sleep(_POLL_SECS)
        return False

    def exit_statuses(self) -> tuple[int, ...]:
        self._end()
        return tuple(self._processes.status(pid) or 0 for pid in self._pids)

    def _running(self) -> bool:
        return any(self._processes.status(pid) is None for pid in self._pids)

    def _kill_where_due(self) -> None:
        world_size = self._plan.layout.world_size
        for number, stop in enumerate(self._plan.stops):
            if stop.end == "sigkill" and number not in self._killed and _is_complete(stop, _reached(self._folder, number), world_size):
                self._killed.add(number)
                self._signal([self._pids[rank] for rank in stop.targets(world_size)], signal.SIGKILL)

    def _signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        for pid in pids:
            self._processes.signal(pid, number)

    def _await_end(self) -> None:
        deadline = time.monotonic() + _END_SECS
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)

    def _end(self) -> None:
        self._signal(self._pids, signal.SIGKILL)
        self._await_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.log"


def _reached(folder: Path, number: int) -> frozenset[int]:
    """Ranks that left word of having been at a stop."""
    return frozenset(int(path.name.rpartition("-")[2]) for path in folder.glob(f"reached-{number}-*"))


def _is_complete(stop: StopAt, reached: frozenset[int], world_size: int) -> bool:
    """Whether a stop is reached by all that it is for; one inside a save by any of them, since not every rank need write."""
    targets = stop.targets(world_size)
    return bool(reached) if stop.point in SAVE_POINTS else reached.issuperset(targets)


def _first_failure(exit_statuses: Sequence[int]) -> int:
    """The rank whose log says most: one that raised, before those that were killed for it."""
    return max(range(len(exit_statuses)), key=lambda rank: (exit_statuses[rank] > 0, exit_statuses[rank] < 0, -rank))


def _log_tail(folder: Path, rank: int) -> str:
    with open(_log(folder, rank), encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=_LOG_LINES)).rstrip()
