"""The quick part of the campaign of power cuts around a root, and proof that it would find what it looks for."""

from __future__ import annotations

import re
import shutil
from functools import cache
from typing import Any
from unittest import mock

import pytest
from faults.campaign import power, power_root
from faults.campaign.file_system_model import JOURNAL, WEAK
from faults.campaign.power_mutants import Mutant
from faults.campaign.power_restart import RestartingJudge
from faults.campaign.power_root import EQUIVALENT, caught, equivalent, mutants
from faults.campaign.power_root_traces import SCENARIOS, life, overtaking, rescue
from faults.campaign.power_traces import record

from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.root import RunRoot


def test_no_power_cut_takes_a_root_from_the_run_that_has_claimed_it() -> None:
    outcome = power_root.run(full=False, seed=1)
    assert outcome.bad == ()
    assert outcome.points >= 4_000
    assert outcome.facts["recorded acts"] == len(SCENARIOS) == 4
    assert outcome.facts["recorded acts that fail"] >= 25
    assert outcome.facts["next runs"] >= 100
    assert outcome.facts["mutants"] == outcome.facts["mutants caught"] + outcome.facts["mutants without effect"]
    assert outcome.facts["mutants caught"] >= 85


@cache
def all_mutants() -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants()}


def test_each_flush_each_order_and_each_error_has_a_mutant() -> None:
    names = list(all_mutants())
    assert len(names) == len(set(names))
    dropped = [name for name in names if ": no flush" in name]
    # Two directories above the root, the root, the epoch and its directory; the epoch, its directory, and the root without an attempt; the
    # new LATEST and the root, and the root for each step that goes; the root, the epoch and its directory.
    assert [sum(name.startswith(f"{scenario.__name__} of") for name in dropped) for scenario in SCENARIOS] == [5, 3, 4, 3]
    assert not any(map(equivalent, dropped))
    swallowed = [name for name in names if name.endswith("swallowed")]
    assert [name for name in swallowed if equivalent(name)] == [
        f"{name} of 1, EIO of close 1 swallowed" for name in ("overtaking", "rescue")
    ]


def test_each_reason_for_having_no_effect_is_that_of_a_mutant() -> None:
    assert all(any(re.match(pattern, name) for name in all_mutants()) for pattern, _ in EQUIVALENT)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("first_claim of 1: no flush .epochs, 1", "the epoch is lost, so that whoever it has overtaken may write"),
        ("overtaking of 1: no flush 00000002, 1", "00000002: .*found 0 bytes"),
        ("overtaking of 1: no flush job, 1", "the attempt has its name back, and its writer may publish it"),
        ("overtaking of 1: claimed before flush job", "the attempt has its name back"),
        ("overtaking of 1, EIO of fsync 2 swallowed", "the attempt has its name back"),
        ("overtaking of 1: attempts are removed under their own names", "the attempt has its name back"),
        ("life of 1: no flush job, 1", "was the newest when the power was cut"),
        ("life of 1: publish LATEST before flush LATEST", "LATEST: "),
        ("life of 1: LATEST is written in place", "LATEST is lost"),
        ("life of 1: remove old before flush job", "exists, and is refused"),
        ("life of 1: no flush job, 3", "holds 'two', which it must not"),
        ("rescue of 1: clean-up takes what may be the last whole checkpoint", "is lost"),
        # The flush whose error has no effect where two names are exchanged in one step.
        ("overwrite of 1 without exchange, EIO of fsync 0 swallowed", "is lost"),
    ],
)
def test_a_mutant_breaks_the_promise_that_it_should(name: str, words: str) -> None:
    mutant = next(mutant for found, mutant in all_mutants().items() if found.startswith(name))
    assert re.search(words, caught(mutant, seed=1))


def test_what_retention_keeps_is_what_the_next_run_finds() -> None:
    def removes_all(root: RunRoot, keep_last: int, claim: Any) -> None:
        for step in root.steps():
            shutil.rmtree(root.path_of(step))

    with mock.patch.object(RunRoot, "prune", removes_all):
        assert "the next run: of steps" in bad_of(life)


def test_a_run_that_cannot_claim_what_was_left_is_told() -> None:
    with mock.patch.object(RunRoot, "claim", side_effect=DcpEngineError("no")):
        assert "the next run: DcpEngineError: no" in bad_of(overtaking)


def test_a_whole_checkpoint_in_the_trash_is_what_the_next_run_must_leave() -> None:
    with mock.patch("dcp_engine.storage.root_posix.PosixRoot._may_be_whole", return_value=False):
        assert "the next run: it has no whole checkpoint left" in bad_of(rescue)


def bad_of(scenario: Any) -> str:
    """The first broken promise after a scenario that was recorded before anything was wrong; empty for none."""
    tally = power.Tally()
    trace = _right(scenario)
    for mode in (JOURNAL, WEAK):
        if power.crash(trace, mode, RestartingJudge(trace.contents, max_restarts=5), tally, seed=1, budget=4, enough=bool):
            return tally.bad[-1]
    return ""


@cache
def _right(scenario: Any) -> Any:
    return record(scenario, 1)


@pytest.fixture(autouse=True, scope="module")
def _recorded_before_anything_is_wrong() -> None:
    for scenario in (life, overtaking, rescue):
        _right(scenario)


def test_a_right_root_is_judged_right_whoever_comes_next() -> None:
    for scenario in (life, overtaking, rescue):
        assert bad_of(scenario) == ""
