"""The part of the campaign that cuts the power while a root is claimed, overtaken, pruned and cleaned up, with wrong protocols of each."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from unittest import mock

from faults.campaign.crash_choices import capacity
from faults.campaign.file_system_model import JOURNAL, WEAK
from faults.campaign.outcome import MAX_BAD, Outcome
from faults.campaign.power import Tally, crash, moments, shared
from faults.campaign.power_judge import Judge
from faults.campaign.power_mutants import Mutant, dropped, from_fault, in_file_order, swapped, with_faults
from faults.campaign.power_restart import RestartingJudge
from faults.campaign.power_root_traces import ACTS, SCENARIOS, life, overtaking, rescue
from faults.campaign.power_traces import Recording, Trace, overwrite, record

from dcp_engine.storage.attempts import write_whole
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.directories import remove_tree
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.root_posix import PosixRoot
from dcp_engine.storage.root_store import Retirement
from dcp_engine.storage.steps import step_name

__all__ = ["EQUIVALENT", "PART", "PROMISE", "TITLE", "equivalent", "failed_acts", "mutants", "recorded", "run"]

PART = "power_root"
TITLE = "Power loss while a root is claimed, pruned and cleaned up"
PROMISE = (
    "whatever a power cut leaves: a claim that returned stays, and so does what it took away from older runs; LATEST names what is there; "
    "what was retired is gone or whole, the rest is whole; clean-up takes nothing that is needed; the next run can go on"
)
_MODES = (JOURNAL, WEAK)
_NUM_STATES = {False: 4_000, True: 200_000}
_MAX_RESTARTS = {False: 8, True: 2_000}
"""Of each trace."""
_MUTANT_STATES = (12, 60)

EQUIVALENT: tuple[tuple[str, str], ...] = (
    (
        r"first_claim of \d: make \S+ before flush \S+",
        "A directory may be made before the one above it is flushed: it is only held by it from then on.",
    ),
    (
        r"(first_claim|rescue) of \d: write 0+1 before flush job",
        "The names above an epoch's file and the file itself may become durable in any order, as long as all are before the claim returns.",
    ),
    (
        r".*: flush \.epochs before flush 0+\d",
        "Likewise a file's name and bytes. An epoch whose claim has not returned binds nobody: its name is a number taken.",
    ),
    (
        r"overtaking of \d: set old aside before flush \.epochs",
        "Attempts may be taken away before the new epoch is durable: if that is lost, so is the run that made it. That others see the "
        "epoch first is what stops a writer who lives: see part ``writers``.",
    ),
    (
        r"(overtaking|rescue) of \d: (write LATEST before claimed|remove old before write LATEST)|"
        r"(overtaking|rescue) of \d, EIO of close 1 swallowed",
        "This is the file that tells the time of the file system's server: empty, and removed at once.",
    ),
    (
        r"life of \d: (retiring before pointed|set old aside before remove old|retired before remove old)",
        "What the caller means to do is no call. When what is left of a retired step goes, is not promised.",
    ),
)
"""Changes of the calls that are no change of the protocol: a pattern of their names, and why no state can show them."""


def equivalent(name: str) -> str:
    """Why a mutant has no effect; empty for one that must be caught."""
    return next((reason for pattern, reason in EQUIVALENT if re.match(pattern, name)), "")


def recorded() -> list[Trace]:
    """All scenarios."""
    return [in_file_order(record(scenario, 1)) for scenario in SCENARIOS]


def failed_acts(*, swallowed: bool) -> Iterator[Trace]:
    """What meets an error in a write, flush or close of its act, each in turn.

    Args:
        swallowed: the root ignores it; else it must give up, and leave nothing bad.
    """
    for scenario in SCENARIOS:
        yield from with_faults(scenario, swallowed=swallowed, act=ACTS[scenario])


# ------------------------------------------------------------------------------------------------------- wrong protocols


def mutants() -> list[Mutant]:
    """All of them."""
    found: list[Mutant] = []
    for trace in recorded():
        found += [*dropped(trace), *swapped(trace)]
    found += [Mutant(trace.name, from_fault(trace)) for trace in failed_acts(swallowed=True)]
    # Where names cannot be exchanged the same error counts that does not count where they can: see part ``power``.
    two_renames = with_faults(overwrite, swallowed=True, act=1, can_exchange=False)
    found += [Mutant(trace.name, from_fault(trace)) for trace in two_renames]
    return [*found, *_otherwise()]


def _otherwise() -> Iterator[Mutant]:
    """Other ways to do the same, each in the scenario that shows what is wrong with it."""
    ways: tuple[tuple[str, Callable[[Recording], None], str, Callable[..., object]], ...] = (
        ("LATEST is written in place", life, "put_latest", _latest_in_place),
        ("a step is removed under its own name", life, "retire", _retired_in_place),
        ("attempts are removed under their own names", overtaking, "revoke", _revoked_in_place),
        ("an epoch is not flushed", overtaking, "create_epoch", _unflushed_epoch),
        ("clean-up takes what may be the last whole checkpoint", rescue, "_may_be_whole", lambda root, place: False),
    )
    for what, scenario, method, wrong in ways:
        with mock.patch.object(PosixRoot, method, wrong):
            trace = record(scenario, 1)
        yield Mutant(f"{trace.name}: {what}", trace)


def _latest_in_place(root: PosixRoot, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        system().unlink(os.path.join(root._path, "LATEST"))
    write_whole(LocalDirectory(root._path), "LATEST", content)
    root._flush(root._path)


def _retired_in_place(root: PosixRoot, step: int, nonce: str) -> Retirement:
    remove_tree(os.path.join(root._path, step_name(step)))
    root._flush(root._path)
    return Retirement.DONE


def _revoked_in_place(root: PosixRoot, check: Callable[[], None]) -> None:
    check()
    for name in root._names():
        if name.startswith(".tmp-"):
            remove_tree(os.path.join(root._path, name))


def _unflushed_epoch(root: PosixRoot, record: object) -> bool:
    place = os.path.join(root._path, ".epochs", f"{record.epoch:08d}")  # type: ignore[attr-defined]
    fd = system().open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    system().pwritev(fd, [memoryview(record.encode())], 0)  # type: ignore[attr-defined]
    system().close(fd)
    return True


# ------------------------------------------------------------------------------------------------------------------- run


def caught(mutant: Mutant, *, seed: int) -> str:
    """The first bad state of a mutant, in words; empty for none. Few states of every moment come first."""
    for budget in _MUTANT_STATES[:1] if equivalent(mutant.name) else _MUTANT_STATES:
        for mode in _MODES:
            tally = Tally()
            if crash(mutant.trace, mode, Judge(mutant.trace.contents), tally, seed=seed, budget=budget, enough=bool):
                return tally.bad[-1]
    return ""


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """The whole part. ``workers`` is not used: one core does.

    Args:
        full: 200,000 states where there are so many, else 4,000.
        seed: of all that is drawn.
    """
    begin = time.monotonic()
    tally, traces, failed = Tally(), recorded(), list(failed_acts(swallowed=False))
    capacities = [capacity(prefix) for trace in (*traces, *failed) for mode in _MODES for _, prefix, _ in moments(trace, mode)]
    budget = shared(_NUM_STATES[full], capacities)
    num_read = num_restarts = 0
    for trace in (*traces, *failed):
        judge = RestartingJudge(trace.contents, max_restarts=_MAX_RESTARTS[full])
        for mode in _MODES:
            crash(trace, mode, judge, tally, seed=seed, budget=budget)
        num_read += judge.num_read
        num_restarts += judge.num_restarts
    wanted = mutants()
    results = {mutant.name: caught(mutant, seed=seed) for mutant in wanted}
    for name, text in results.items():
        if not text and not equivalent(name):
            tally.bad.append(f"the mutant of the protocol {name!r} is not caught: the model is too kind")
        if text and equivalent(name):
            tally.bad.append(f"the mutant of the protocol {name!r} was said to have no effect, and has one: {text}")
    facts = {
        "recorded acts": len(traces),
        "recorded acts that fail": len(failed),
        "moments": tally.prefixes,
        "distinct states": len(tally.distinct),
        "directories read": num_read,
        "next runs": num_restarts,
        "mutants": len(wanted),
        "mutants caught": sum(map(bool, results.values())),
        "mutants without effect": sum(not text for text in results.values()),
    }
    return Outcome(part=PART, points=tally.states, seed=seed, facts=facts, bad=tuple(tally.bad[:MAX_BAD]), secs=time.monotonic() - begin)
