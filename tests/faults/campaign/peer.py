"""Part ``peer``: the same faults against DCP's ``FileSystemWriter`` and ``FileSystemReader`` and against the engine, side by side."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from faults.campaign.faulty_calls import ERRNOS, Call, Fault, FaultyCalls
from faults.campaign.outcome import MAX_BAD, Outcome
from faults.campaign.peer_faults import hooked, hooked_writer
from support.values import full, same
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.storage.backends.calls import SystemCalls, installed

__all__ = ["PART", "PROMISE", "ROWS", "TITLE", "VERDICTS", "extra", "run", "shares"]

PART = "peer"
TITLE = "DCP's FileSystemWriter and FileSystemReader beside the engine, under the same faults"
PROMISE = "Under each fault that is put to both, the engine neither loses a checkpoint nor is silent. What DCP does is counted, not judged."

VERDICTS = ("right", "told", "lost", "silent", "died")
_FAILS_FIRST, _FAILS_OVER = "an I/O call fails, first save", "an I/O call fails, overwriting"
_KILLED, _POWER = "killed at an I/O call, overwriting", "power cut after a save that returned"
_DATA, _META = "a bit flips in a data file", "a bit flips in the metadata"
ROWS = (_FAILS_FIRST, _FAILS_OVER, _KILLED, _POWER, _DATA, _META)
_SHAPES = {"a": (64, 100), "b": (5_000,), "c": (3, 41), "d": (7_000,)}
_THREADS = 2
_LOAD_SECS = 30
_LOAD_BYTES = 2 * 2**30
"""What a load of damage may take: a flipped bit in a pickle may ask for tens of gigabytes."""
_Point = tuple[str, str, str, str]
"""Side, row, verdict, and what it was, for messages."""


class Side(Protocol):
    """A writer and a reader, and the calls that they make."""

    NAME: str

    def save(self, path: Path, step: int, fault: Fault | None = None, *, kill: bool = False) -> list[Call]:
        """Saves over whatever is there, with a fault. Returns the calls that were made."""
        ...

    def load(self, path: Path) -> dict[str, Any]: ...

    def flushed(self, path: Path, step: int) -> dict[str, int]:
        """Saves; returns the size that each file had when it was last flushed."""
        ...

    def is_data(self, name: str) -> bool: ...


def state(step: int, *, filled: bool = True) -> dict[str, Any]:
    """What is saved at a step."""
    return {"model": {key: full(f"{step} {key}", shape) if filled else torch.zeros(shape) for key, shape in _SHAPES.items()}}


def step_of(load: Callable[[], dict[str, Any]]) -> int | None:
    """Which step a load gives: 1 or 2; 0 for values that were never saved together; None where it fails."""
    try:
        found = load()
    except (Exception, CheckpointException):  # whatever a reader makes of damage
        return None
    for step in (1, 2):
        if all(same(found["model"][key], value) for key, value in state(step)["model"].items()):
            return step
    return 0


class Dcp:
    """The installed torch's."""

    def __init__(self, thread_count: int) -> None:
        self.NAME = f"DCP, {thread_count} thread{'s' if thread_count > 1 else ''}"
        self._thread_count = thread_count

    def save(self, path: Path, step: int, fault: Fault | None = None, *, kill: bool = False) -> list[Call]:
        seen: Counter[tuple[str, str]] = Counter()

        def hook(method: str, name: str) -> None:
            call = Call(method, name, seen[method, name])
            seen[method, name] += 1
            if fault is not None and call == fault.call:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(ERRNOS[fault.kind], os.strerror(ERRNOS[fault.kind]))

        with hooked(hook):
            dcp.save(state(step), storage_writer=hooked_writer(path, hook, thread_count=self._thread_count))
        return [Call(method, name, nth) for (method, name), count in sorted(seen.items()) for nth in range(count)]

    def load(self, path: Path) -> dict[str, Any]:
        found = state(1, filled=False)
        dcp.load(found, storage_reader=FileSystemReader(path))
        return found

    def flushed(self, path: Path, step: int) -> dict[str, int]:
        sizes: dict[str, int] = {}

        def hook(method: str, name: str) -> None:
            if method == "fsync":
                sizes[name.removesuffix(".tmp")] = (path / name).stat().st_size

        with hooked(hook):
            dcp.save(state(step), storage_writer=hooked_writer(path, hook, thread_count=self._thread_count))
        return sizes

    def is_data(self, name: str) -> bool:
        return name.endswith(".distcp")


class _Killing(FaultyCalls):
    """Calls of which one is the last."""

    def _fail(self, method: str, args: tuple[Any, ...]) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class _Flushes(SystemCalls):
    """Notes the size that each file has when it is flushed."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.sizes[os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))] = os.fstat(fd).st_size


class Engine:
    """Ours."""

    NAME = "dcp-engine"

    def save(self, path: Path, step: int, fault: Fault | None = None, *, kill: bool = False) -> list[Call]:
        calls = (_Killing if kill else FaultyCalls)(str(path.parent), fault)
        with installed(calls):
            self._save(path, step)
        return calls.calls

    def load(self, path: Path) -> dict[str, Any]:
        found = state(1, filled=False)
        dcp.load(found, storage_reader=ShardReader(path, threads=1), planner=ReshardLoadPlanner())
        return found

    def flushed(self, path: Path, step: int) -> dict[str, int]:
        calls = _Flushes()
        with installed(calls):
            self._save(path, step)
        return calls.sizes

    def is_data(self, name: str) -> bool:
        return name.endswith(".shard")

    def _save(self, path: Path, step: int) -> None:
        dcp.save(state(step), storage_writer=ShardWriter(path, threads=_THREADS, overwrite=True), planner=BalancedSavePlanner())


ONE_THREAD, TWO_THREADS, ENGINE = Dcp(1), Dcp(2), Engine()
SIDES: tuple[Side, ...] = (ONE_THREAD, TWO_THREADS, ENGINE)


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """See ``Outcome``. In a process of its own, since it forks; ``workers`` is not used."""
    begin = time.monotonic()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        points = process.submit(all_points, 1_000 if full else 100, seed).result()
    facts: Counter[str] = Counter()
    bad = []
    for side, row, verdict, text in points:
        facts[f"{side}: {row}: {verdict}"] += 1
        if side == Engine.NAME and verdict in ("lost", "silent", "died"):
            bad.append(f"{row}: {text}: {verdict}")
    return Outcome(part=PART, points=len(points), seed=seed, facts=dict(facts), bad=tuple(bad[:MAX_BAD]), secs=time.monotonic() - begin)


def shares(facts: Mapping[str, int], side: str, row: str) -> dict[str, int]:
    """Verdict -> count of one row of one side."""
    return {verdict: facts.get(f"{side}: {row}: {verdict}", 0) for verdict in VERDICTS}


def extra(outcome: Outcome) -> str:
    """The table, side by side."""

    lines = ["| fault | system | faults | right | told | lost | silent | died |", "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in ROWS:
        for side in SIDES:
            counts = shares(outcome.facts, side.NAME, row)
            cells = [row, side.NAME, str(sum(counts.values())), *map(str, counts.values())]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def all_points(num_bits: int, seed: int) -> list[_Point]:
    """Every fault on every side."""
    torch.set_num_threads(1)  # a fork takes no threads along
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    points: list[_Point] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        for side in SIDES:
            for row in (_FAILS_FIRST, _FAILS_OVER, _KILLED):
                points += _failing(side, row, Path(place))
            points += _power_cuts(side, Path(place))
            points += _flips(side, Path(place), num_bits, random.Random(seed))
    return points


@contextlib.contextmanager
def _place(parent: Path, side: Side, *, has_old: bool) -> Iterator[Path]:
    """Where to save, with step 1 there or nothing."""
    root = Path(tempfile.mkdtemp(dir=parent))
    try:
        if has_old:
            old = parent / f"old of {side.NAME}"
            if not old.exists():
                side.save(old, 1)
            shutil.copytree(old, root / "step")
        yield root / "step"
    finally:
        shutil.rmtree(root)


def _failing(side: Side, row: str, parent: Path) -> Iterator[_Point]:
    """One call fails, or the process is killed before it."""
    has_old, kill = row != _FAILS_FIRST, row == _KILLED
    with _place(parent, side, has_old=has_old) as path:
        calls = side.save(path, 2)
    for call in calls:
        for kind in ("EIO",) if kill else ("EIO", "ENOSPC"):
            fault = Fault(call, kind)
            with _place(parent, side, has_old=has_old) as path:
                verdict = _killed(side, path, fault) if kill else _failed(side, path, fault, has_old)
            yield side.NAME, row, verdict, str(fault)


def _failed(side: Side, path: Path, fault: Fault, has_old: bool) -> str:
    try:
        side.save(path, 2, fault)
    except (Exception, CheckpointException):  # told: whatever it is
        step = step_of(lambda: side.load(path))
        if step == 0:
            return "silent"
        return "lost" if has_old and step is None else "told"
    return "right" if step_of(lambda: side.load(path)) == 2 else "silent"


def _killed(side: Side, path: Path, fault: Fault) -> str:
    child = os.fork()
    if not child:
        try:
            side.save(path, 2, fault, kill=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return {None: "lost", 0: "silent"}.get(step_of(lambda: side.load(path)), "right")


def _power_cuts(side: Side, parent: Path) -> Iterator[_Point]:
    """After a save has returned, each file is cut to the size that it had when it was last flushed; a file never flushed is empty."""
    for has_old in (False, True):
        with _place(parent, side, has_old=has_old) as path:
            sizes = side.flushed(path, 2)
            for file in path.iterdir():
                os.truncate(file, sizes.get(file.name, 0))
            verdict = {None: "lost", 0: "silent", 1: "lost"}.get(step_of(lambda: side.load(path)), "right")
        yield side.NAME, _POWER, verdict, "overwriting" if has_old else "first save"


def _flips(side: Side, parent: Path, num_bits: int, draw: random.Random) -> Iterator[_Point]:
    """Bits flip one at a time in a checkpoint, which is then loaded."""
    with _place(parent, side, has_old=True) as path:
        for row in (_DATA, _META):
            files = [(file, file.stat().st_size) for file in sorted(path.iterdir()) if side.is_data(file.name) == (row == _DATA)]
            total = sum(size for _, size in files)
            for bit in sorted(draw.sample(range(8 * total), min(num_bits, 8 * total))):
                verdict = _flipped(side, path, files, bit)
                yield side.NAME, row, verdict, f"bit {bit} of {total} bytes"


def _flipped(side: Side, path: Path, files: list[tuple[Path, int]], bit: int) -> str:
    ends = list(itertools.accumulate(size for _, size in files))
    index = bisect.bisect_right(ends, bit // 8)
    file, byte = files[index][0], bit // 8 - ends[index] + files[index][1]
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[byte] ^= 1 << bit % 8
    file.write_bytes(damaged)
    try:
        return _verdict_apart(lambda: side.load(path))
    finally:
        file.write_bytes(good)


def _verdict_apart(load: Callable[[], dict[str, Any]]) -> str:
    """What a load of step 1 gives, in a process of its own: what unpickles damage may take its process down, or never end."""
    child = os.fork()
    if not child:
        code = len(VERDICTS)
        try:
            signal.alarm(_LOAD_SECS)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _LOAD_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)  # the interpreter's own complaints about what was unpickled
            code = VERDICTS.index({None: "told", 1: "right"}.get(step_of(load), "silent"))
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return VERDICTS[code] if 0 <= code < len(VERDICTS) else "died"
