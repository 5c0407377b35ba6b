"""The part of the campaign that cuts the power: recorded saves, replayed into the model of a file system, judged by the real readers."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from faults.campaign.crash_choices import capacity, choices
from faults.campaign.file_system_model import JOURNAL, WEAK, Disk, Mode, Prefix
from faults.campaign.outcome import MAX_BAD, Outcome
from faults.campaign.power_judge import Judge, Promised, promises, state_digest
from faults.campaign.power_mutants import Mutant, equivalent, failed_saves, mutants
from faults.campaign.power_traces import SCENARIOS, Trace, changes_anything, describe, record

__all__ = ["PART", "PROMISE", "TITLE", "run"]

PART = "power"
TITLE = "Power loss"
PROMISE = (
    "whatever a power cut leaves of what was not flushed: a step's name is whole or is not there, a step whose save returned is there, "
    "an old one goes only when the new one is durable, and damage is never silent"
)
_MODES = (JOURNAL, WEAK)
_WORLD_SIZES = (1, 2, 4)
_NUM_STATES = {False: 20_000, True: 1_000_000}
_NUM_ORDERS = {False: 1, True: 4}
_MUTANT_STATES = (12, 80)
"""Of each moment of a mutant: most are caught by the first few."""


@dataclass(slots=True)
class Tally:
    """What was looked at.

    Attributes:
        states: (prefix, choice) pairs that were judged.
        prefixes: moments at which the power was cut.
        distinct: digests of the states.
        bad: broken promises, in words.
        silent: how many of the broken states deceive a reader.
    """

    states: int = 0
    prefixes: int = 0
    distinct: set[int] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)
    silent: int = 0


def moments(trace: Trace, mode: Mode) -> Iterator[tuple[int, Prefix, Promised]]:
    """Every moment of a trace at which a crash differs from one before: how many events were done, what may be left, what was promised."""
    disk = Disk(mode)
    for index, event in enumerate(trace.events):
        disk.apply(event)
        if index >= trace.begin and changes_anything(event):
            yield index + 1, disk.prefix(), promises(trace.events[: index + 1], can_exchange=trace.can_exchange)


def crash(
    trace: Trace,
    mode: Mode,
    judge: Judge,
    tally: Tally,
    *,
    seed: int,
    budget: int,
    enough: Callable[[str], bool] = lambda text: False,
) -> bool:
    """Judges at most ``budget`` states of every moment. Ends early, and returns True, at a bad state that is enough."""
    for num_events, prefix, promised in moments(trace, mode):
        rng = random.Random(f"{seed} {trace.name} {mode.name} {num_events}")
        tally.prefixes += 1
        for choice in choices(prefix, rng, budget):
            tree = prefix.tree(choice)
            tally.states += 1
            tally.distinct.add(state_digest(tree, trace.root))
            if text := judge.broken(tree, trace.root, promised):
                tally.silent += "SILENT" in text
                after = describe(trace.events[num_events - 1])
                tally.bad.append(f"{trace.name}, {mode.name}, after {num_events} events ({after}), {choice}: {text}")
                if enough(text):
                    return True
    return False


def shared(total: int, capacities: Sequence[int]) -> int:
    """The bound on each of some numbers of states with which they sum up to about a total: those that are few leave room to others.

    Returns:
        the least bound with which the sum is not below the total; the largest capacity, where all together are too few.
    """
    low, high = 1, min(max(capacities), total)
    while low < high:
        middle = (low + high) // 2
        if sum(min(middle, capacity) for capacity in capacities) < total:
            low = middle + 1
        else:
            high = middle
    return low


def recorded(*, seed: int, full: bool) -> list[Trace]:
    """All scenarios for all numbers of ranks; those of several ranks in several orders of what these do at the same time."""
    return [
        record(scenario, world_size, can_exchange=can_exchange, seed=seed + order)
        for scenario, can_exchange in SCENARIOS
        for world_size in _WORLD_SIZES
        for order in range(_NUM_ORDERS[full] if world_size > 1 else 1)
    ]


def caught(mutant: Mutant, *, seed: int) -> str:
    """The first bad state of a mutant that shows what is wrong with it, in words; empty for none. Few states of every moment come first."""
    for budget in _MUTANT_STATES[:1] if equivalent(mutant.name) else _MUTANT_STATES:
        for mode in _MODES:
            judge, tally = Judge(mutant.trace.contents, verify=mutant.verifies), Tally()
            with mutant.patched():
                if crash(mutant.trace, mode, judge, tally, seed=seed, budget=budget, enough=mutant.shows):
                    return tally.bad[-1]
    return ""


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """The whole part. ``workers`` is not used: one core does.

    Args:
        full: a million states, else 20,000.
        seed: of all that is drawn.
    """
    begin = time.monotonic()
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, for loads without a process group
        traces = recorded(seed=seed, full=full)
        failed = failed_saves()
        capacities = [capacity(prefix) for trace in (*traces, *failed) for mode in _MODES for _, prefix, _ in moments(trace, mode)]
        budget = shared(_NUM_STATES[full] * 21 // 20, capacities)  # what is drawn twice counts once
        num_read = 0
        for trace in (*traces, *failed):
            judge = Judge(trace.contents)
            for mode in _MODES:
                crash(trace, mode, judge, tally, seed=seed, budget=budget)
            num_read += judge.num_read
        wanted = mutants()
        results = {mutant.name: caught(mutant, seed=seed) for mutant in wanted}
    for name, text in results.items():
        if not text and not equivalent(name):
            tally.bad.append(f"the mutant of the protocol {name!r} is not caught: the model is too kind")
        if text and equivalent(name):
            tally.bad.append(f"the mutant of the protocol {name!r} was said to have no effect, and has one: {text}")
    facts = {
        "recorded saves": len(traces),
        "recorded saves that fail": len(failed),
        "moments": tally.prefixes,
        "distinct states": len(tally.distinct),
        "directories read": num_read,
        "mutants": len(wanted),
        "mutants caught": sum(map(bool, results.values())),
        "mutants without effect": sum(not text for text in results.values()),
    }
    return Outcome(part=PART, points=tally.states, seed=seed, facts=facts, bad=tuple(tally.bad[:MAX_BAD]), secs=time.monotonic() - begin)
