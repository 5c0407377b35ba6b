"""Runs the systems of a case against each other: A B C, A B C, ... in one process, everything but the work itself outside the clock."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.memory import Reserve, peak_during
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim, Role, SystemResult

__all__ = ["Case", "Facts", "MismatchError", "Row", "System", "in_fresh_process", "measure", "quiet"]

Facts = Mapping[str, float]

_MIN_ROUNDS = 3


class MismatchError(Exception):
    """What was loaded is not what was saved."""


def _nothing() -> None:
    return None


def _no_facts() -> Facts:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One engine in one configuration, doing a case's work.

    Attributes:
        name: as the tables show it.
        role: ours, DCP, another peer, or a physical limit.
        run: the work; the only thing that is timed. May tell facts; a fact ``secs`` replaces the time on the clock.
        prepare: once, before the first round: makes the file that a load reads, say.
        before: before every run.
        check: after every run: raises MismatchError unless the result is right to the bit; tells facts.
        after: after every run, even one that failed.
        max_rounds: for what takes minutes.
        comparable: see :class:`benchmarks.results.SystemResult`.
        note: what a reader has to know.
        unavailable: why it cannot run; empty where it can.
    """

    name: str
    role: Role
    run: Callable[[], Facts | None] = _nothing
    prepare: Callable[[], None] = _nothing
    before: Callable[[], None] = _nothing
    check: Callable[[], Facts] = _no_facts
    after: Callable[[], None] = _nothing
    max_rounds: int = 1000
    comparable: bool = True
    note: str = ""
    unavailable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Systems to measure against each other.

    Attributes:
        name: what is done and where; no two of a row are the same.
        systems: in the order of the tables.
        rounds: how often each runs.
        nbytes: bytes that a run moves; 0 where bytes are not the point.
        reserve_bytes: memory that a run needs fresh: see :class:`benchmarks.memory.Reserve`.
        budget_secs: no further round begins after so long, once three are done.
        measure_memory: peak memory makes sense for these systems.
        close: when the case is through: removes its files.
    """

    name: str
    systems: list[System]
    rounds: int
    nbytes: int = 0
    reserve_bytes: int = 0
    budget_secs: float = 90.0
    measure_memory: bool = True
    close: Callable[[], None] = field(default=_nothing)


class Row(Protocol):
    """The shape of a module in ``benchmarks.rows``."""

    NAME: str
    TITLE: str

    def cases(self, options: Options) -> Iterator[Case]:
        """The row's cases, each made when it is asked for and closed before the next one is made."""

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """The row's figures to reach against what was measured."""

    def notes(self, options: Options) -> list[str]:
        """What a reader of the row's table has to know."""


def measure(row: Row, case: Case, options: Options, say: Callable[[str], None]) -> CaseResult:
    """All rounds of a case, then its peaks of memory.

    A system that raises is out of the case, with the reason in its result: one peer that fails must not cost the others' figures.

    Args:
        row: whose case it is.
        case: closed by the caller.
        options: number of rounds, whether to measure memory.
        say: takes a line of progress.
    """
    results = {system.name: _empty_result(system) for system in case.systems}
    running = [system for system in case.systems if not system.unavailable]
    for system in list(running):
        _attempt(results[system.name], system.prepare)
    reserve = Reserve(case.reserve_bytes)
    begin = time.monotonic()
    for number in range(options.rounds or case.rounds):
        if number >= _MIN_ROUNDS and time.monotonic() - begin > case.budget_secs:
            break
        shift = number % max(1, len(running))  # whoever comes first meets what the last round left: each in turn
        for system in running[shift:] + running[:shift]:
            result = results[system.name]
            if not result.failure and number < system.max_rounds:
                say(f"{row.NAME} {case.name}: round {number + 1}, {system.name}")
                _attempt(result, partial(_one_run, system, result, number, reserve))
    reserve.release()
    if options.measure_memory and case.measure_memory:
        for system in running:
            if not results[system.name].failure:
                say(f"{row.NAME} {case.name}: memory of {system.name}")
                results[system.name].peak_bytes = _peak_bytes(row, case, system, options)
    return CaseResult(name=case.name, nbytes=case.nbytes, systems=list(results.values()))


def in_fresh_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work(*arguments)`` returns in a process of its own, which imports what the rows import and has done nothing else.

    Raises:
        ChildProcessError: it raised, with its message; or it died, out of memory perhaps.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.rows"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(sender, work, arguments))
    child.start()
    sender.close()
    try:
        ok, value = receiver.recv()
    except EOFError:
        ok, value = False, "died"
    child.join()
    if not ok:
        raise ChildProcessError(f"{value} (exit status {child.exitcode})")
    return value


def quiet() -> None:
    """Silences warnings and logs of this process: DCP and the peers say much on every call, and the tables say what matters."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _serve(sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    quiet()
    try:
        answer = (True, work(*arguments))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reports it
        answer = (False, _first_words(error))
    sender.send(answer)
    sender.close()


def _empty_result(system: System) -> SystemResult:
    return SystemResult(name=system.name, role=system.role, comparable=system.comparable, note=system.note, failure=system.unavailable)


def _attempt(result: SystemResult, work: Callable[[], None]) -> None:
    if result.failure:
        return
    try:
        work()
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - peers raise what they like; the others' figures must not be lost
        result.failure = _first_words(error)
        result.secs.clear()


def _first_words(error: BaseException) -> str:
    """What went wrong, in one line: of DCP's exceptions, which hold one for each rank, the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _one_run(system: System, result: SystemResult, number: int, reserve: Reserve) -> None:
    try:
        system.before()
        reserve.hold()
        gc.collect()
        reserve.release()
        begin = time.perf_counter()
        told = dict(system.run() or {})
        secs = time.perf_counter() - begin
        told.update(system.check())
    finally:
        system.after()
    result.secs[number] = told.pop("secs", secs)
    for name, value in told.items():
        result.facts.setdefault(name, {})[number] = value


def _peak_bytes(row: Row, case: Case, system: System, options: Options) -> int | None:
    try:
        peak = in_fresh_process(_peak_of, row.NAME, case.name, system.name, options)
    except ChildProcessError:
        return None
    return int(peak)


def _peak_of(row_name: str, case_name: str, system_name: str, options: Options) -> int:
    """Runs in a process of its own, beside the parent, whose files it uses: what ``prepare`` made is there."""
    from benchmarks.rows import ROWS

    for case in ROWS[row_name].cases(options):
        for system in case.systems:
            if (case.name, system.name) == (case_name, system_name):
                try:
                    system.before()
                    gc.collect()
                    return peak_during(system.run)
                finally:
                    system.after()
    raise LookupError(f"{row_name} has no {case_name} with {system_name}")
