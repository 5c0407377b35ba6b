"""The quick size of the part where saves are killed, and that its harness finds engines that are wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults.campaign.crash import in_processes, run
from faults.campaign.crash_calls import NAMES
from faults.campaign.crash_cases import SCENARIOS, Case
from faults.campaign.crash_mutants import MUTANTS
from faults.campaign.crash_ranks import save_in_turn
from faults.campaign.crash_states import blank, difference, make_state
from faults.campaign.crash_trace import bypassed
from faults.campaign.crash_worker import Found, Job, faults_of
from support.engine import contents

from dcp_engine import BalancedSavePlanner, ShardWriter

pytestmark = pytest.mark.timeout(1800)  # the whole takes two minutes, unless others want the processors too


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_or_the_new_step() -> None:
    outcome = run(full=False, seed=0)
    assert outcome.bad == ()
    assert outcome.points >= 5_000
    kinds = {"before", "after", "torn", "one", "all", "world 1", "world 2", "world 4", *SCENARIOS}
    kinds |= {"then old", "then new", "then retired"}
    assert kinds <= {fact for fact, count in outcome.facts.items() if count >= 10}
    assert outcome.facts["then aside"] >= 2  # the moment between two renames is one call long


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """What the campaign says of every wrong engine, in one process for all."""
    jobs = [Job(case=Case(scenario=scenario, kind="tiny", world_size=1), mutant=name) for name, (scenario, _) in MUTANTS.items()]
    (answer,) = in_processes([jobs], seed=0, points=10_000)
    return answer


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        ("published before its manifest", "steps [] are committed, not [2]"),
        ("moved file by file", "names of steps are ['step-00000001', 'step-00000002'], of which [1] are committed"),
        ("old one removed first", "step 2: verify: the file is not there"),
        ("written in place", "step 2: verify: the file is not there"),
        ("said too early", "the save was said to be through, and the old state is there"),
        ("attempt of a fixed name", "the next save fails: StorageError: cannot create the attempt directory"),
        ("abort that sweeps", "steps [] are committed, not [1]"),
        ("retired in place", "step 1: verify: the file is not there"),
        ("hint written in place", "the hint: MalformedCheckpointError"),
    ],
)
def test_an_engine_that_is_wrong_is_found(found: dict[str, Found], mutant: str, said: str) -> None:
    assert len(found[mutant].bad) == 1
    assert said in found[mutant].bad[0]


def test_every_wrong_engine_is_looked_at(found: dict[str, Found]) -> None:
    assert found.keys() == MUTANTS.keys()


def test_every_call_of_the_layer_is_a_place_to_die() -> None:
    assert {"open", "close", "pwritev", "fsync", "mkdir", "rename", "exchange", "unlink", "rmdir", "flock"} <= set(NAMES)


def test_deaths_are_before_and_after_each_call_and_within_each_write() -> None:
    alone = list(faults_of(Case(scenario="first", kind="tiny", world_size=1), [["mkdir", "pwritev"]]))
    assert [(fault.call, fault.mode) for fault in alone] == [(1, "before"), (1, "after"), (2, "before"), (2, "after"), (2, "torn")]
    assert len(list(faults_of(Case(scenario="first", kind="tiny", world_size=2), [["mkdir"], ["open", "fsync"]]))) == 12


def test_ranks_in_turn_write_what_dcp_writes(tmp_path: Path) -> None:
    state = make_state("components", 1, "values")
    save_in_turn(state.ranks, lambda: ShardWriter(tmp_path / "step-00000001", codec="raw", threads=1))
    dcp.save(
        state.ranks[0],
        storage_writer=ShardWriter(tmp_path / "dcp" / "step-00000001", codec="raw", threads=1),
        planner=BalancedSavePlanner(),
    )
    assert contents(tmp_path / "step-00000001") == contents(tmp_path / "dcp" / "step-00000001")


def test_a_bit_that_differs_is_a_difference() -> None:
    whole = make_state("packed", 1, "values").whole
    other = make_state("packed", 1, "values").whole
    assert difference(other, whole) is None
    other["model"]["t3"].view(torch.uint8)[0, 0] ^= 1
    assert difference(other, whole) == "model.t3 is not what was saved"
    assert difference(blank(whole), whole) is not None


def test_a_call_that_goes_around_the_layer_is_told() -> None:
    assert bypassed([Counter(mkdir=1, fsync=2), Counter(renameat2=1, close=9)], ["mkdir", "fsync", "fsync", "exchange", "close"]) == []
    assert bypassed([Counter(mkdir=1, fsync=3)], ["mkdir", "fsync", "fsync"]) == ["fsync was called 2 times, and made 3 times"]
