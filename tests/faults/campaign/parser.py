"""Hostile parsers: bytes made by an enemy, digests repaired, fed to each parser within bounds of memory and time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import msgpack
from faults.campaign.outcome import MAX_BAD, Outcome
from faults.campaign.parser_targets import NAMES, Target, document_of, opened

from dcp_engine.errors import DcpEngineError

__all__ = ["INPUT_CPU_SECS", "MEMORY_BYTES", "PART", "PROMISE", "TITLE", "fuzz", "mutated", "run"]

PART = "parser"
TITLE = "hostile bytes with right digests"
PROMISE = "a parser raises the engine's own errors alone, in bounded memory and time, and what it accepts is consistent"

MEMORY_BYTES = 512 << 20
"""What a process may grow by: inputs have at most ``_MAX_INPUT_BYTES``, which bounds what the format lets them stand for."""
INPUT_CPU_SECS = 20.0
"""CPU time after which an input counts as one that hangs; they take milliseconds."""
_MAX_INPUT_BYTES = 1 << 20
_QUICK = {"manifest": 4_000, "footer": 3_000, "record": 6_000, "marker": 20_000, "object": 20_000, "block": 20_000, "checkpoint": 700}
_FULL_TIMES = 30
_ATHERIS_RUNS = 20_000
_NUMBERS = (0, 1, 2, 3, 63, 64, 65, 127, 128, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 56, (1 << 63) - 1, 1 << 63)


# -------------------------------------------------------------------------------------------------------------- mutation


def mutated(target: Target, rng: random.Random) -> bytes:
    """An input that comes of a seed of the target's by a few changes."""
    data = rng.choice(target.seeds)
    document = document_of(data) if target.is_document and rng.random() < 0.8 else None
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if document is None:
            data = _changed(data, rng, target.seeds)
        else:
            _change_field(document, rng)
    if document is not None:
        data = msgpack.packb(document, use_bin_type=True, unicode_errors="surrogatepass")
    return data[:_MAX_INPUT_BYTES]


def _changed(data: bytes, rng: random.Random, others: tuple[bytes, ...]) -> bytes:
    """Bytes with one change."""
    place = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 1, 2, 4, 8, 32)), len(data) - place)
    width = rng.choice((1, 2, 4, 8))
    number = (rng.choice(_NUMBERS) & (1 << 8 * width) - 1).to_bytes(width, rng.choice(("little", "big")))
    match rng.randrange(8):
        case 0:
            return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :] if place < len(data) else data
        case 1:
            return data[:place] + number + data[place + width :]
        case 2:
            return data[:place] + rng.randbytes(length) + data[place + length :]
        case 3:
            return data[:place] + data[place + length :]
        case 4:
            return data[:place] + rng.choice((number, b"\0", b"\n", b" ", b"\xff")) + data[place:]
        case 5:
            return data[:place] + data[place : place + length] * rng.choice((2, 3, 100, 5000)) + data[place + length :]
        case 6:
            other = rng.choice(others)
            return data[:place] + other[rng.randrange(len(other) + 1) :]
        case _:
            return data[:place]


def _change_field(document: dict[str, object], rng: random.Random) -> None:
    """One change to one field, most of them within the rules of columns, so that what looks at their meaning is reached."""
    name = rng.choice(list(document))
    value = document[name]
    if rng.random() < 0.05:
        document[name] = rng.choice((None, rng.choice(_NUMBERS), -1, "", "x" * 5000, b"", True, 1.5, [], {}))
    elif isinstance(value, bytes):
        document[name] = _changed_column(value, rng)
    elif isinstance(value, int):
        document[name] = rng.choice((value + 1, value - 1, rng.choice(_NUMBERS)))
    elif isinstance(value, str):
        document[name] = rng.choice((value + "x", value[:-1], "\ud800", "\0", value * 300))


def _changed_column(value: bytes, rng: random.Random) -> bytes:
    width = rng.choice((1, 1, 4, 8))
    rows = len(value) // width
    if not rows or rng.random() < 0.3:
        return _changed(value, rng, (value, bytes(range(256))))
    planes = [bytearray(value[plane * rows : (plane + 1) * rows]) for plane in range(width)]
    row = rng.randrange(rows)
    before = int.from_bytes(bytes(plane[row] for plane in planes), "little")
    after = rng.choice((before + 1, before - 1, before ^ 1 << rng.randrange(8 * width), rng.choice(_NUMBERS))) & (1 << 8 * width) - 1
    for plane, byte in zip(planes, after.to_bytes(width, "little"), strict=True):
        plane[row] = byte
    times = rng.choice((1, 1, 1, 1, 2, 2000))
    return b"".join(bytes(plane[:row]) + bytes([plane[row]]) * times + bytes(plane[row + 1 :]) for plane in planes)


# --------------------------------------------------------------------------------------------------------------- feeding


@dataclass(slots=True)
class Found:
    """What came of some inputs: counts of refusals by kind, of accepted ones, the slowest, and broken promises."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest_ms: int = 0
    bad: list[str] = field(default_factory=list)


class _Hang(BaseException):
    """Not an ``Exception``, so that nobody on the way takes it for one of its own."""


def fuzz(target: Target, seed: int, number: int) -> Found:
    """Feed mutated inputs, each a function of the target, the seed and its own number."""
    found = Found()
    with _time_limit(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(number):
            name = f"{target.name}, seed {seed}, input {index}"
            _feed(target, mutated(target, random.Random(f"{target.name}/{seed}/{index}")), name, found)
    return found


def _feed(target: Target, data: bytes, name: str, found: Found) -> None:
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, INPUT_CPU_SECS)
    try:
        target.feed(data)
        found.counts["accepted"] += 1
    except DcpEngineError as error:
        found.counts[error.kind] += 1
    except (Exception, _Hang) as error:  # the promise is that there is no such thing
        found.counts["broken"] += 1
        if len(found.bad) < MAX_BAD:
            found.bad.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    found.slowest_ms = max(found.slowest_ms, round(1000 * (time.process_time() - begin)))


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Hang(f"more than {INPUT_CPU_SECS} s")

    before = signal.signal(signal.SIGPROF, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, before)


def _limit_memory() -> None:
    """In a child: from here on the address space grows by no more than the bound, and an allocation beyond it fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _child(name: str, seed: int, number: int) -> Found:
    with opened(name) as target:
        return fuzz(target, seed, number)


# ------------------------------------------------------------------------------------------------------------------- run


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """Feed every target in child processes whose memory is limited; by coverage as well, where atheris is installed and ``full``.

    Args:
        full: thirty times as many inputs.
        seed: of the mutations.
        workers: processes.
    """
    begin = time.perf_counter()
    found = Found()
    times = _FULL_TIMES if full else 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_limit_memory) as pool:
        futures = {(name, seed + turn): pool.submit(_child, name, seed + turn, _QUICK[name]) for turn in range(times) for name in NAMES}
        for (name, own), future in futures.items():
            try:
                part = future.result()
            except BrokenProcessPool:
                part = Found(bad=[f"{name}, seed {own}: the process died"])
            found.counts.update(part.counts)
            found.slowest_ms = max(found.slowest_ms, part.slowest_ms)
            found.bad += part.bad[: MAX_BAD - len(found.bad)]
    facts = dict(sorted(found.counts.items()))
    points = found.counts.total()
    has_atheris = importlib.util.find_spec("atheris") is not None
    if has_atheris and full:
        for name in NAMES:
            complaint = _by_coverage(name, seed)
            found.bad += [] if complaint is None else [complaint]
            points += _ATHERIS_RUNS
    facts |= {"slowest ms": found.slowest_ms, "atheris inputs": _ATHERIS_RUNS * len(NAMES) if has_atheris and full else 0}
    return Outcome(part=PART, points=points, seed=seed, facts=facts, bad=tuple(found.bad[:MAX_BAD]), secs=time.perf_counter() - begin)


def _by_coverage(name: str, seed: int) -> str | None:
    """Let atheris look for inputs that reach new code; ``None``: nothing broke."""
    command = [sys.executable, "-P", "-m", "faults.campaign.parser_atheris", name, str(_ATHERIS_RUNS), str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{name}, atheris, seed {seed}: {done.stderr[-1000:]}"
