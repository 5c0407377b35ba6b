"""One process of the crash campaign: warmed and single-threaded, it forks the ranks of every save that dies, and judges what they leave."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from faults.campaign.crash_calls import Board, Fault, KillingCalls
from faults.campaign.crash_cases import Case
from faults.campaign.crash_judge import Verdict, cleaned_up, digest_of, fault_of, judge, judge_ends
from faults.campaign.crash_mutants import MUTANTS, Mutant, unchanged
from faults.campaign.crash_process import alike, frozen_heap
from faults.campaign.crash_ranks import Link, Stage, run_ranks, save_in_turn
from faults.campaign.crash_states import State, make_state
from faults.campaign.crash_trace import Gate, bypassed, calls_in, traced
from faults.campaign.outcome import MAX_BAD
from support.warning_filters import apply_warning_filters, warning_filters

from dcp_engine import ShardWriter
from dcp_engine.storage.backends.calls import installed
from dcp_engine.storage.root import RunRoot
from dcp_engine.storage.steps import step_name

__all__ = ["Found", "Harness", "Job", "faults_of", "main"]

_MAX_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One case to be run.

    Attributes:
        case: what is saved.
        at_most: deaths to draw from all that there are; None: all.
        mutant: name of a wrong engine, which is to be found; "" for the engine as it is. Ends at the first death that shows it.
        traced: also so many deaths at true system calls, by a tracer, where there is one.
    """

    case: Case
    at_most: int | None = None
    mutant: str = ""
    traced: int = 0


@dataclass(slots=True)
class Found:
    """What a process has done.

    Attributes:
        points: deaths.
        facts: counts by kind.
        bad: broken promises.
    """

    points: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


class Harness:
    """Puts every death of a case, one after the other.

    Args:
        mutant: breaks the engine, in the ranks that die alone, so that the harness can be seen to find it.
        found: what is added to.
    """

    def __init__(self, found: Found, *, mutant: Mutant = unchanged) -> None:
        self.found = found
        self._mutant = mutant
        self._board = Board(_MAX_RANKS)
        self._template: dict[str, bytes | None] = {}
        self._known: dict[tuple[object, ...], Verdict] = {}
        self._place = tempfile.mkdtemp(prefix="crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self._root = os.path.join(self._place, "root")
        self._errors = os.path.join(self._place, "errors")

    def close(self) -> None:
        """Removes what it made."""
        shutil.rmtree(self._place, ignore_errors=True)

    def run(self, case: Case, *, seed: int, at_most: int | None = None, enough: int = MAX_BAD) -> None:
        """Every death of a case, or so many of them, drawn by ``seed``; stops early once ``enough`` are reported."""
        old, new, after = self._prepare(case)
        calls = self._count(case, new)
        faults = [fault for fault in faults_of(case, calls) if self._mutant is unchanged or fault.mode == "after"]
        if at_most is not None and at_most < len(faults):
            faults = random.Random(seed).sample(faults, at_most)
        self._known.clear()
        with frozen_heap(), self._staged(case, new) as stage:
            for number, fault in enumerate(faults):
                if len(self.found.bad) >= enough:
                    break
                goes_on = number % 2 == 1
                self._lay_out()
                statuses = [stage.run(fault)] if stage is not None else self._run_ranks(case, new, fault, goes_on=goes_on)
                self._look(case, fault, statuses, (old, new, after), goes_on=goes_on)

    def _prepare(self, case: Case) -> tuple[dict[int, State], State, State]:
        """The states of a case, old ones by step, and the tree that is there before the save."""
        small = "tiny" if case.kind == "blocks" else case.kind
        old = {step: make_state(small, case.world_size, f"{case.version}-old{step}") for step in case.old_steps}
        shutil.rmtree(self._root, ignore_errors=True)
        root = RunRoot(self._root)
        claim = root.claim("earlier run") if case.scenario == "retention" else None
        for step, state in old.items():
            path = root.path_of(step)
            save_in_turn(state.ranks, lambda path=path: ShardWriter(path, codec=case.codec, threads=1, fence=claim))  # type: ignore[misc]
        if claim is not None:
            root.set_latest(max(old), claim)
            os.mkdir(os.path.join(self._root, f".tmp-{step_name(case.step)}-{'5' * 32}"))
        self._template = dict(_files(self._root, ""))
        new, after = make_state(case.kind, case.world_size, f"{case.version}-new"), make_state(small, 1, f"{case.version}-after")
        # Whatever is imported or made at its first use is there when forks are made.
        warm = os.path.join(self._place, "warm")
        save_in_turn(new.ranks, lambda: ShardWriter(warm, codec=case.codec, threads=1))
        if (fault := fault_of(warm, new)) is not None:
            self._report(case, None, [fault])
        shutil.rmtree(warm)
        return old, new, after

    def _lay_out(self) -> None:
        """The root as it is before the save."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._board.clear()
        for name, content in self._template.items():
            place = os.path.join(self._root, name)
            if content is None:
                os.makedirs(place)
                continue
            with open(place, "wb", buffering=0) as file:
                file.write(content)

    def _calls(self, case: Case, rank: int, fault: Fault | None) -> KillingCalls:
        """The calls of a rank."""
        target, retires = case.path(self._root), case.retired_step
        return KillingCalls(
            rank,
            target,
            self._board,
            fault,
            retires=None if retires is None else os.path.join(self._root, step_name(retires)),
            exchange=case.scenario != "two renames",
        )

    def _save(self, case: Case, new: State, link: Link, calls: KillingCalls, *, goes_on: bool) -> None:
        """What a rank does from its fork to its end."""
        alike(link.rank)
        with installed(calls), self._mutant(lambda: self._board.set_finished(link.rank)):
            case.save(link, new, self._root, goes_on=goes_on)
        self._board.set_finished(link.rank)

    def _run_ranks(
        self, case: Case, new: State, fault: Fault | None, *, goes_on: bool, names: str | None = None, gate: Gate | None = None
    ) -> list[int]:
        """One save by forked ranks. ``names``: beginning of the files into which each writes what it called. ``gate``: of a tracer."""

        def job(link: Link) -> None:
            calls = self._calls(case, link.rank, fault)
            self._save(case, new, link, calls, goes_on=goes_on)
            if names is not None:
                with open(f"{names}{link.rank}", "w", encoding="ascii") as file:
                    file.write("\n".join(calls.names))

        assert threading.active_count() == 1
        return run_ranks(case.world_size, job, self._errors, gate=gate)

    @contextmanager
    def _staged(self, case: Case, new: State) -> Iterator[Stage | None]:
        """Where one rank saves, the process from which it is forked with its plans made."""
        if case.world_size > 1:
            yield None
            return

        def job(link: Link, stage: Stage) -> None:
            calls = self._calls(case, link.rank, None)
            calls.pause(stage.serve)
            self._save(case, new, link, calls, goes_on=False)

        assert threading.active_count() == 1
        self._lay_out()
        stage = Stage(job, self._errors)
        try:
            yield stage
        finally:
            stage.close()

    def _count(self, case: Case, new: State) -> list[list[str]]:
        """The calls of each rank, in a save where nobody dies."""
        self._lay_out()
        names = os.path.join(self._place, "calls-")
        bad = judge_ends(self._run_ranks(case, new, None, goes_on=False, names=names), None)
        if bad:
            self._report(case, None, bad)
            return []
        calls = []
        for rank in range(case.world_size):
            with open(f"{names}{rank}", encoding="ascii") as file:
                calls.append(file.read().split("\n"))
        self.found.facts["calls"] += sum(map(len, calls))
        return calls

    def _look(self, case: Case, fault: Fault, statuses: list[int], states: tuple[dict[int, State], State, State], *, goes_on: bool) -> None:
        if self._board.calls(fault.rank) < fault.call:
            self.found.facts["not reached"] += 1  # with several threads a save may take some calls fewer
            return
        bad = judge_ends(statuses, fault)
        bad += cleaned_up(self._root, statuses, fault) if goes_on else []
        # A tree that is the same to the last byte, after a save that came as far, is judged once: readers and the next save see no more.
        key = (*self._board.progress(), digest_of(self._root))
        verdict = self._known.get(key)
        if verdict is None:
            with self._mutant(lambda: None):
                verdict = self._known[key] = judge(case, *states, self._root, self._board)
            self.found.facts["trees judged"] += 1
        self.found.points += 1
        mode = "before" if fault.mode == "torn" and not self._board.torn else fault.mode
        kinds = (f"world {case.world_size}", case.scenario, mode, "one" if fault.alone else "all", f"then {verdict.outcome}")
        self.found.facts.update(kinds)
        self._report(case, fault, [*bad, *verdict.bad])

    def trace(self, case: Case, *, seed: int, num_points: int) -> None:
        """Deaths at true system calls, put there by a tracer: a sample, which tells whether the narrow layer leaves out any.

        Nothing is done where there is no tracer, or it is not allowed to trace; the facts say how many points there were.
        """
        old, new, after = self._prepare(case)
        self._lay_out()
        names, log = os.path.join(self._place, "calls-"), os.path.join(self._place, "trace")
        with traced(log) as gate:
            bad = judge_ends(self._run_ranks(case, new, None, goes_on=False, names=names, gate=gate), None)
        true_calls = calls_in(log)
        if not true_calls or bad:
            self._report(case, None, bad)
            return
        with open(f"{names}0", encoding="ascii") as file:
            counted = file.read().split("\n")
        if case.scenario == "two renames":
            counted = [name for name in counted if name != "exchange"]  # which the harness refuses itself
        bad = bypassed(true_calls, counted)
        self._report(case, None, bad)
        moments = sorted({(name, number) for calls in true_calls for name, count in calls.items() for number in range(1, count + 1)})
        for name, number in random.Random(seed).sample(moments, min(num_points, len(moments))):
            self._lay_out()
            with traced(log, kill=(name, number)) as gate:
                statuses = self._run_ranks(case, new, None, goes_on=False, gate=gate)
            if not os.WIFSIGNALED(statuses[0]):
                self.found.facts["not reached"] += 1
                continue
            verdict = judge(case, old, new, after, self._root, self._board)
            self.found.points += 1
            self.found.facts["by a tracer"] += 1
            self._report(case, None, [f"{text} (killed by a tracer at {name} {number})" for text in verdict.bad])

    def _report(self, case: Case, fault: Fault | None, bad: Iterable[str]) -> None:
        bad = list(bad)
        if os.path.exists(self._errors):
            with open(self._errors, encoding="utf-8") as file:
                bad.append(file.read())
            os.unlink(self._errors)
        if bad:
            self.found.bad.append(f"{case}; {fault or 'nobody died'}: {'; '.join(bad)}")


def _files(place: str, inner: str) -> Iterator[tuple[str, bytes | None]]:
    """Everything under a directory, itself included: relative path and content, None for a directory; outer ones first."""
    if not os.path.isdir(place):
        return
    yield inner, None
    for name in sorted(os.listdir(place)):
        path, relative = os.path.join(place, name), os.path.join(inner, name)
        if os.path.isdir(path):
            yield from _files(path, relative)
        else:
            with open(path, "rb") as file:
                yield relative, file.read()


def faults_of(case: Case, calls: Iterable[Iterable[str]]) -> Iterator[Fault]:
    """Every death in a save.

    Args:
        calls: for each rank, the names of its calls in order.
    """
    for rank, names in enumerate(calls):
        for number, name in enumerate(names, start=1):
            for mode in ("before", "after", "torn") if name == "pwritev" else ("before", "after"):
                for alone in (True,) if case.world_size == 1 else (True, False):
                    yield Fault(rank=rank, call=number, mode=mode, alone=alone)


def main() -> None:
    """Reads what to do from standard input, and writes what was found to standard output, both as JSON."""
    request = json.load(sys.stdin)
    apply_warning_filters(warning_filters())
    jobs = [Job(**{**job, "case": Case(**job["case"])}) for job in request["jobs"]]
    found: dict[str, Found] = {}
    for job in jobs:
        one = found.setdefault(job.mutant, Found())
        if one.points >= request["points"] or len(one.bad) >= MAX_BAD:
            continue
        harness = Harness(one, mutant=MUTANTS[job.mutant][1] if job.mutant else unchanged)
        try:
            harness.run(job.case, seed=request["seed"], at_most=job.at_most, enough=1 if job.mutant else MAX_BAD)
            if job.traced:
                harness.trace(job.case, seed=request["seed"], num_points=job.traced)
        finally:
            harness.close()
    json.dump({name: {"points": one.points, "facts": dict(one.facts), "bad": one.bad} for name, one in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
