"""SIGKILL before and after every system call of saving: afterwards the old or the new step is there, whole, and the next save works."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final

from faults.campaign.crash_cases import SCENARIOS, Case
from faults.campaign.crash_states import KINDS
from faults.campaign.crash_worker import Found, Job
from faults.campaign.outcome import MAX_BAD, Outcome

__all__ = ["PART", "PROMISE", "TITLE", "in_processes", "run"]

PART = "crash"
TITLE = "SIGKILL before, in and after every system call of a save"
PROMISE = (
    "the old or the new step is there, whole, bit for bit, never half of one and never nothing where there was something; the next save of "
    "another process works and leaves exactly its step"
)

_QUICK_POINTS, _FULL_POINTS = 5_000, 100_000
_WORLDS: Final = (1, 2, 4)
_CODECS: Final = ("raw", "zstd", "planes", "auto")


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """The part.

    Args:
        full: 100,000 deaths instead of 5,000.
        seed: of the values and of what is drawn.
        workers: processes at a time, each with one thread.
    """
    begin = time.monotonic()
    jobs = list(full_jobs(seed) if full else quick_jobs(seed))
    points = -(-(_FULL_POINTS if full else _QUICK_POINTS) // workers)
    found = [one[""] for one in in_processes([jobs[index::workers] for index in range(workers)], seed=seed, points=points)]
    facts: Counter[str] = Counter()
    for one in found:
        facts.update(one.facts)
    facts["by a tracer"] += 0  # a line of its own also where there is none
    bad = [text for one in found for text in one.bad]
    return Outcome(
        part=PART,
        points=sum(one.points for one in found),
        seed=seed,
        facts=dict(sorted(facts.items())),
        bad=tuple(bad[:MAX_BAD]),
        secs=time.monotonic() - begin,
    )


def quick_jobs(seed: int) -> Iterator[Job]:
    """Every scenario in every world: all deaths of one rank, a sample of those of several; then more states, until there are enough."""
    kinds = [kind for kind in KINDS if kind != "blocks"]
    turns = itertools.count(seed)
    for world_size, scenario in itertools.product(_WORLDS, SCENARIOS):
        case = _turn(next(turns), scenario, world_size, kinds, seed)
        yield Job(case=case, at_most={1: None, 2: 40, 4: 24}[world_size], traced=2 if world_size == 1 else 0)
    yield Job(case=Case(scenario="next", kind="blocks", world_size=1, codec="planes", version=seed), at_most=40)
    for scenario in itertools.cycle(("first", "next", "overwrite", "two renames")):  # the others take more time for each death
        yield Job(case=_turn(next(turns), scenario, 1, kinds, seed))
        if next(turns) > seed + 200:
            return


def full_jobs(seed: int) -> Iterator[Job]:
    """Every scenario, state, codec and number of threads in every world, in an order that is drawn; then again with other values."""
    drawn = random.Random(seed)
    for version in range(seed, seed + 4):
        jobs = []
        for kind, scenario, world_size in itertools.product(KINDS, SCENARIOS, _WORLDS):
            for codec, threads in itertools.product(_CODECS, (1, 3)):
                case = Case(scenario=scenario, kind=kind, world_size=world_size, codec=codec, threads=threads, version=version)
                whole = world_size == 1 or (kind == "tiny" and codec == "raw" and threads == 1)
                jobs.append(Job(case=case, at_most=None if whole else 24, traced=1 if world_size == 1 else 0))
        drawn.shuffle(jobs)
        yield from jobs


def in_processes(shares: Iterable[list[Job]], *, seed: int, points: int) -> list[dict[str, Found]]:
    """Runs jobs in processes of their own, which have one thread and are ready to fork, at the same time.

    Args:
        shares: for each process, what it does.
        points: after which a process begins no further job.

    Returns:
        for each process, what it found, by the name of the mutant.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", "from faults.campaign.crash_worker import main; main()"]
    processes = []
    for jobs in shares:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        json.dump({"seed": seed, "points": points, "jobs": [asdict(job) for job in jobs]}, process.stdin)
        process.stdin.close()
        processes.append(process)
    return [_answer(process) for process in processes]


def _answer(process: subprocess.Popen[str]) -> dict[str, Found]:
    assert process.stdout is not None
    with process.stdout:
        text = process.stdout.read()
    if process.wait() != 0:
        raise ChildProcessError(f"a process of the campaign ended with status {process.returncode}; its messages are above")
    answer: dict[str, dict[str, Any]] = json.loads(text)
    return {name: Found(points=one["points"], facts=Counter(one["facts"]), bad=one["bad"]) for name, one in answer.items()}


def _turn(turn: int, scenario: str, world_size: int, kinds: list[str], seed: int) -> Case:
    """States, codecs and threads in turn: none of these numbers divides another."""
    return Case(
        scenario=scenario,
        kind=kinds[turn % len(kinds)],
        world_size=world_size,
        codec=_CODECS[turn // 2 % len(_CODECS)],
        threads=1 + 2 * (turn // 3 % 2),
        version=seed,
    )
