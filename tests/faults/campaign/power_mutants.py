"""Wrong protocols, made from the right one: each must leave a bad state somewhere, or the model of a file system proves nothing."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from unittest import mock

from faults.campaign.io_events import Change, Event, Flush, Note, Spoil, Write
from faults.campaign.power_traces import Recording, Trace, first_save, move_latest, next_save, overwrite, record, retirement
from faults.campaign.recorded_calls import Fault

from dcp_engine.storage import verify

__all__ = [
    "EQUIVALENT",
    "Mutant",
    "dropped",
    "equivalent",
    "failed_saves",
    "from_fault",
    "in_file_order",
    "mutants",
    "step_of",
    "swapped",
    "with_faults",
]

EQUIVALENT: tuple[tuple[str, str], ...] = (
    (
        r"(first_save|next_save|overwrite|move_latest) of \d: (no flush job, 1|flush job before make attempt)",
        "The name of an attempt need not be durable before it is published, and the flush after that covers it. Not so with two renames, "
        "where for a moment it may be the only name that any checkpoint has: there this flush counts.",
    ),
    (
        r"first_save of 1, EIO of fsync 2 swallowed|overwrite of 1, EIO of fsync 0 swallowed",
        "The flush that failed is of the attempt's name alone, and what it can lose for good is that name: its bytes and the names in it "
        "are made durable by flushes of their own. The rename that publishes takes that name away, and makes the one that counts after "
        "the error, so that no kernel has marked it clean, and the flush after the rename covers it. So every state that a power cut can "
        "leave is one of the right protocol, but for that name: ``test_campaign_power.py`` goes through all of them. While names are "
        "exchanged, or there was no step, nothing promised hangs on it. With two renames something does: part ``power_root`` catches it.",
    ),
    (r".*: write \S+ before flush job", "As long as both are done before the attempt is published, their order is all the same."),
    (r"move_latest.*: write LATEST before saved", "The new LATEST is written under another name, which no reader opens."),
    (r".*: make \S+ before flush \S+", "A directory may be made before the one above it is flushed: it is only held by it from then on."),
    (
        r".*: write (model|optimizer)\S+ before (flush (model|optimizer|attempt by \d)|write)",
        "Shard files of one save wait for each other nowhere, nor do ranks, before MANIFEST is written.",
    ),
    (
        r".*: flush attempt by \d before flush \S+",
        "The bytes of a file and its name may become durable in either order, as long as both are before the next step.",
    ),
    (
        r"overwrite of 1: (set old aside before publish|flush job before set old aside)|overwrite.*: saved before remove old|"
        r"retirement.*: retired before remove old",
        "Under which of the names that no reader opens the old one lies, and when it goes after the new one is durable, is not promised.",
    ),
)
"""Changes of the calls that are no change of the protocol: a pattern of their names, and why no state can show them."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A wrong protocol.

    Attributes:
        name: what is wrong with it, and in which scenario.
        trace: what it does.
        verifies: the loading reader checks digests.
        shows: whether a bad state is of the kind that this mutant must show.
        patched: what is changed in the reader.
    """

    name: str
    trace: Trace
    verifies: bool = True
    shows: Callable[[str], bool] = field(default=bool)
    patched: Callable[[], contextlib.AbstractContextManager[object]] = field(default=contextlib.nullcontext)


def equivalent(name: str) -> str:
    """Why a mutant has no effect; empty for one that must be caught."""
    return next((reason for pattern, reason in EQUIVALENT if re.match(pattern, name)), "")


def mutants() -> list[Mutant]:
    """All of them."""
    found: list[Mutant] = []
    for trace in _bases():
        found += [*dropped(trace), *swapped(trace)]
    return [*found, _early_latest(), *_swallowed(), *_careless_readers()]


def failed_saves() -> list[Trace]:
    """Real saves that meet an error in a write, flush or close, each in turn: the engine must give up, and leave nothing bad."""
    return [trace for scenario in (first_save, overwrite) for trace in with_faults(scenario, swallowed=False, act=scenario is overwrite)]


def _bases() -> list[Trace]:
    return [
        in_file_order(record(first_save, 1)),
        in_file_order(record(next_save, 2)),
        in_file_order(record(overwrite, 1)),
        in_file_order(record(overwrite, 1, can_exchange=False)),
        in_file_order(record(move_latest, 1)),
        record(retirement, 1),
    ]


def with_faults(scenario: Callable[[Recording], None], *, swallowed: bool, act: int = 0, can_exchange: bool = True) -> Iterator[Trace]:
    """A scenario with an error in each write, flush or close of one of its acts, each in turn.

    Args:
        swallowed: the caller is not told.
        act: which one, from 0: a save, or whatever else is noted as such.
        can_exchange: the file system swaps two names in one step.
    """
    for call in ("pwritev", "fsync", "close"):
        for index in count():
            trace = record(scenario, 1, can_exchange=can_exchange, fault=Fault(call, index, swallowed, act=act))
            if not trace.hit:
                break
            yield trace


def step_of(event: Event) -> str:
    """The step of the protocol that an event is part of."""
    name = event.path.rpartition("/")[2]
    if (name.startswith(".trash-") and isinstance(event, Write | Flush)) or (isinstance(event, Change) and event.what == "create"):
        name = name if name[0] != "." else "LATEST"  # which is written under a name that is swept with the trash
    match event:
        case Note(what="revoked"):
            return "claimed"  # by whom: one moment
        case Note():
            return event.what
        case Flush() if name.startswith(".tmp-"):
            return f"flush attempt by {event.node}"
        case Flush():
            return f"flush {name}"
        case Change(what="mkdir"):
            return "make attempt" if name.startswith(".tmp-") else f"make {name}"
        case Change(what="rename") if name.startswith(".trash-"):
            return "set old aside"
        case Change(what="rename" | "exchange"):
            return f"publish {name}"
        case Change(what="unlink" | "rmdir"):
            return "remove old"
    return f"write {name}"


def in_file_order(trace: Trace) -> Trace:
    """The same trace with the calls on one shard file together, which threads have mixed: its mutants have names that stay."""
    events: list[Event] = []
    for is_shard, group in groupby(trace.events, lambda event: event.path.endswith(".shard") and step_of(event) != "remove old"):
        calls = list(group)
        events += sorted(calls, key=lambda event: event.path) if is_shard else calls
    return replace(trace, events=tuple(events))


def _changed(trace: Trace, what: str, events: Sequence[Event]) -> Trace:
    """The trace with other events from ``begin`` on. It begins where it differs: all before is judged with the right protocol."""
    first = next(index for index, (old, new) in enumerate(zip(trace.events[trace.begin :], events, strict=False)) if old is not new)
    return replace(trace, name=f"{trace.name}: {what}", events=(*trace.events[: trace.begin], *events), begin=trace.begin + first)


def dropped(trace: Trace) -> Iterator[Mutant]:
    """Each flush left out."""
    events = trace.events[trace.begin :]
    seen: Counter[str] = Counter()
    for index, event in enumerate(events):
        if isinstance(event, Flush):
            step = step_of(event)
            seen[step] += 1
            changed = _changed(trace, f"no {step}, {seen[step]}", [*events[:index], *events[index + 1 :]])
            yield Mutant(changed.name, changed)


def swapped(trace: Trace) -> Iterator[Mutant]:
    """Each step before the one that it should follow."""
    steps = [(step, list(group)) for step, group in groupby(trace.events[trace.begin + 1 :], step_of)]
    for index in range(len(steps) - 1):
        (first, _), (second, _) = steps[index : index + 2]
        order = [*steps[:index], steps[index + 1], steps[index], *steps[index + 2 :]]
        events = [trace.events[trace.begin], *(event for _, group in order for event in group)]
        changed = _changed(trace, f"{second} before {first}, {index}", events)
        yield Mutant(changed.name, changed)


def _early_latest() -> Mutant:
    """LATEST moved, with all its flushes, while the step that it names is not yet durable."""
    trace = in_file_order(record(move_latest, 1))
    events = trace.events[trace.begin :]
    steps = [step_of(event) for event in events]
    published, written = steps.index("publish step-00000002") + 1, steps.index("write LATEST")
    pointed = steps.index("publish LATEST") + 1
    order = [*events[:published], *events[written:pointed], *events[published:written], *events[pointed:]]
    changed = _changed(trace, "LATEST before the step is durable", order)
    return Mutant(changed.name, changed)


def _swallowed() -> Iterator[Mutant]:
    """Each error of a write, flush or close ignored."""
    for scenario in (first_save, overwrite):
        for trace in with_faults(scenario, swallowed=True, act=scenario is overwrite):
            yield Mutant(trace.name, from_fault(trace))


def from_fault(trace: Trace) -> Trace:
    """The trace, judged from its error on: all before is right."""
    return replace(trace, begin=next(index for index, event in enumerate(trace.events) if is_fault(event)))


def is_fault(event: Event) -> bool:
    """Whether it is a call that reported an error."""
    return isinstance(event, Spoil) or (isinstance(event, Write) and event.lost) or (isinstance(event, Flush) and event.failed)


def _careless_readers() -> Iterator[Mutant]:
    """Readers that skip a digest, given a file that was not flushed."""
    base = next(mutant.trace for mutant in dropped(in_file_order(record(first_save, 1))) if "no flush model-00000.shard" in mutant.name)
    yield Mutant("load does not check digests", base, verifies=False, shows=lambda text: "SILENT: load gives what nobody saved" in text)
    yield Mutant(
        "verify does not check digests",
        base,
        shows=lambda text: "SILENT: verify finds nothing" in text,
        patched=lambda: mock.patch.object(verify._Walk, "_check_block"),
    )
