"""The quick size of the part with two writers, and that its harness sees what it is there to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from faults.campaign.writers import run

from dcp_engine.storage import holds, root_posix
from dcp_engine.storage.epochs import EpochClaim
from dcp_engine.storage.root import RunRoot
from dcp_engine.storage.root_posix import PosixRoot


def test_two_writers_a_reader_and_retention_keep_what_was_promised() -> None:
    outcome = run(full=False, seed=1)
    assert outcome.bad == ()
    assert outcome.points >= 700
    happened = {"interleaved", "killed", "clock jumps", "claims", "saves", "published", "fenced", "retired", "reads", "kept for a reader"}
    assert happened <= {fact for fact, count in outcome.facts.items() if count >= 5}


def no_check(self: EpochClaim) -> None:
    """Nobody is overtaken."""


def no_revoke(self: PosixRoot, check: Callable[[], None]) -> None:
    """Attempts of older epochs stay with their writers."""
    check()


def no_lock(path: str) -> holds.Hold:
    """Readers are not seen."""
    return holds.Hold(locked=True)


def no_guard(self: RunRoot, keep_last: int, claim: EpochClaim) -> Any:
    """The last step goes like any other."""
    from dcp_engine.storage.attempts import read_marker
    from dcp_engine.storage.backends import resolve
    from dcp_engine.storage.retention import PruneReport

    for step in self.steps():
        self._store.retire(step, read_marker(resolve(self.path_of(step))).nonce)
    return PruneReport((), (), (), guarded=True)


def removes_all(name: str) -> bool:
    """What merely resembles trash is trash."""
    return name.startswith(".trash-")


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (EpochClaim, "check", no_check, "published step"),
        (PosixRoot, "revoke", no_revoke, "published step"),
        (root_posix, "hold_for_retiring", no_lock, "while somebody read it"),
        (RunRoot, "prune", no_guard, "the last one"),
        (root_posix, "is_trash", removes_all, "touched .trash-1"),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str) -> None:
    monkeypatch.setattr(owner, name, fault)
    outcome = run(full=False, seed=1)
    assert len(outcome.bad) == 1
    assert says in outcome.bad[0]
