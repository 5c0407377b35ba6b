"""Runs the systems of a case against each other: A B C, A B C, ... in one process, everything but the work itself outside the clock."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.budget import Turn, takes_part
from benchmarks.memory import Reserve, peak_during
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim, Role, SystemResult

__all__ = ["Case", "Facts", "MismatchError", "Row", "System", "in_fresh_process", "measure", "quiet"]

Facts = Mapping[str, float]


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
        max_rounds: for what takes minutes: fewer than :data:`benchmarks.budget.MIN_ROUNDS` even where it enters a ratio.
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
        rounds: how often each runs at most; the budget may allow fewer.
        compared: peers whose time enters a ratio; ours, DCP's and the limits do anyway, where they are comparable.
        nbytes: bytes that a run moves; 0 where bytes are not the point.
        reserve_bytes: memory that a run needs fresh: see :class:`benchmarks.memory.Reserve`.
        budget_secs: what all rounds may take on two quiet cores, preparations included: see :func:`benchmarks.budget.takes_part`.
        measure_memory: peak memory makes sense here, and no other case of the row shows the same.
        close: when the case is through: removes its files.
    """

    name: str
    systems: list[System]
    rounds: int
    budget_secs: float = 20.0
    compared: frozenset[str] = frozenset()
    nbytes: int = 0
    reserve_bytes: int = 0
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
    begin = time.monotonic()
    for system in running:
        _attempt(results[system.name], system.prepare)
    reserve = Reserve(case.reserve_bytes)
    spent: dict[str, list[float]] = {system.name: [] for system in running}
    for number in range(options.rounds or case.rounds):
        chosen = _chosen(case, options, results, spent, case.budget_secs - (time.monotonic() - begin))
        if not chosen:
            break
        shift = number % len(running)  # whoever comes first meets what the last round left: each in turn
        for system in running[shift:] + running[:shift]:
            if system.name in chosen:
                say(f"{row.NAME} {case.name}: round {number + 1}, {system.name}")
                started = time.monotonic()
                _attempt(results[system.name], partial(_one_run, system, results[system.name], number, reserve))
                spent[system.name].append(time.monotonic() - started)
    reserve.release()
    if options.measure_memory and case.measure_memory:
        say(f"{row.NAME} {case.name}: memory")
        _measure_memory(row, case, results, options)
    return CaseResult(name=case.name, nbytes=case.nbytes, systems=list(results.values()))


def _chosen(case: Case, options: Options, results: dict[str, SystemResult], spent: dict[str, list[float]], left_secs: float) -> list[str]:
    """Who takes part in the next round. Rounds that were asked for by number are given, whatever they take."""
    turns = [
        Turn(
            name=system.name,
            compared=system.name in case.compared or (system.role != "peer" and system.comparable),
            rounds=len(spent[system.name]),
            max_rounds=min(system.max_rounds, options.rounds or case.rounds),
            # The shortest: the first run of a save is also loaded and compared.
            secs=min(spent[system.name], default=0.0),
        )
        for system in case.systems
        if system.name in spent and not results[system.name].failure
    ]
    return takes_part(turns, left_secs=math.inf if options.rounds else left_secs)


def in_fresh_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work(*arguments)`` returns in a process of its own, which imports what the rows import and has done nothing else.

    Raises:
        ChildProcessError: it raised, with its message; or it died, out of memory perhaps.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.rows"])
    return _in_process("forkserver", partial(work, *arguments))


def _in_process(method: Literal["fork", "forkserver"], work: Callable[[], Any]) -> Any:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(sender, work))
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


def _serve(sender: Connection, work: Callable[[], Any]) -> None:
    quiet()
    try:
        answer = (True, work())
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


_MAX_MEMORY_SECS = 5.0


def _measure_memory(row: Row, case: Case, results: dict[str, SystemResult], options: Options) -> None:
    """Once for every system that has a figure, but for those that would take long to run once more."""
    names = [name for name, result in results.items() if result.secs and min(result.secs.values()) <= _MAX_MEMORY_SECS]
    try:
        peaks = in_fresh_process(_peaks, row.NAME, case.name, names, options)
    except ChildProcessError:
        return  # the machine has no memory for a second state, say: the column stays empty
    for name, peak in peaks.items():
        results[name].peak_bytes = peak


def _peaks(row_name: str, case_name: str, names: list[str], options: Options) -> dict[str, int | None]:
    """Runs in a process of its own, beside the parent, whose files it uses: what ``prepare`` made is there.

    It makes the case once and forks for every system, which so finds the state there and nothing that another run has left.
    """
    from benchmarks.rows import ROWS

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    case = next(case for case in ROWS[row_name].cases(options) if case.name == case_name)
    peaks: dict[str, int | None] = {}
    for system in case.systems:
        if system.name in names:
            try:
                peaks[system.name] = _in_process("fork", partial(_peak_of, system))
            except ChildProcessError:
                peaks[system.name] = None
    return peaks


def _peak_of(system: System) -> int:
    try:
        system.before()
        gc.collect()
        return peak_during(system.run)
    finally:
        system.after()
