"""DCP and the engine under the same faults: the quick part of the campaign, and proof that its verdicts mean what they say."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from faults.campaign import peer
from faults.campaign.faulty_calls import Call, Fault
from faults.campaign.outcome import Outcome
from faults.campaign.peer import ENGINE, ONE_THREAD, SIDES, TWO_THREADS
from torch.distributed.checkpoint import CheckpointException

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
def test_the_engine_loses_nothing_and_is_never_silent() -> None:
    outcome = peer.run(full=False, seed=0)
    assert outcome.bad == ()
    for row in peer.ROWS:
        ours = peer.shares(outcome.facts, "dcp-engine", row)
        assert (ours["lost"], ours["silent"], ours["died"]) == (0, 0, 0), row
        for side in SIDES:
            assert sum(peer.shares(outcome.facts, side.NAME, row).values()) >= 2, (side, row)
    assert outcome.points >= 900
    # What it is there to show: in any version so far, overwriting in place cannot be undone.
    assert peer.shares(outcome.facts, ONE_THREAD.NAME, "killed at an I/O call, overwriting")["lost"] >= 1


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.NAME)
def test_a_save_without_faults_is_the_step_that_was_saved(side: peer.Side, tmp_path: Path) -> None:
    side.save(tmp_path / "step", 1)
    assert peer.step_of(lambda: side.load(tmp_path / "step")) == 1
    side.save(tmp_path / "step", 2)
    assert peer.step_of(lambda: side.load(tmp_path / "step")) == 2
    assert peer.step_of(lambda: side.load(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.NAME)
def test_the_same_calls_are_made_in_every_run(side: peer.Side, tmp_path: Path) -> None:
    assert side.save(tmp_path / "a" / "step", 1) == side.save(tmp_path / "b" / "step", 1)


def test_values_of_two_steps_together_are_no_step() -> None:
    mixed = {"model": {**peer.state(1)["model"], "a": peer.state(2)["model"]["a"]}}
    assert peer.step_of(lambda: mixed) == 0
    assert peer.step_of(lambda: peer.state(2)) == 2


def test_an_error_of_the_disk_reaches_dcp_where_it_is_put(tmp_path: Path) -> None:
    fault = Fault(Call("write", ".metadata.tmp", 0), "ENOSPC")
    with pytest.raises(CheckpointException, match="No space left"):
        TWO_THREADS.save(tmp_path / "step", 1, fault)


def test_every_flip_is_undone(tmp_path: Path) -> None:
    before: dict[str, bytes] = {}
    for side, _, verdict, _ in peer._flips(ENGINE, tmp_path, 3, random.Random(0)):
        assert (side, verdict) == ("dcp-engine", "told")
        files = {file.name: file.read_bytes() for file in next(tmp_path.glob("*/step")).iterdir()}
        before = before or files
        assert files == before


def test_a_load_that_takes_its_process_down_is_told_from_one_that_fails() -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("damaged")

    assert peer._verdict_apart(fail) == "told"
    assert peer._verdict_apart(lambda: peer.state(1)) == "right"
    assert peer._verdict_apart(lambda: peer.state(2)) == "silent"
    assert peer._verdict_apart(lambda: os.kill(os.getpid(), signal.SIGKILL) or {}) == "died"


def test_the_table_shows_both_sides() -> None:
    facts = {"DCP, 2 threads: a bit flips in a data file: silent": 3, "dcp-engine: a bit flips in a data file: told": 4}
    text = peer.extra(Outcome(part="peer", points=7, seed=0, facts=facts, bad=(), secs=0.0))
    lines = text.splitlines()
    assert "| a bit flips in a data file | DCP, 2 threads | 3 | 0 | 0 | 0 | 3 | 0 |" in lines
    assert "| a bit flips in a data file | dcp-engine | 4 | 0 | 4 | 0 | 0 | 0 |" in lines
    assert len(lines) == 2 + 3 * len(peer.ROWS)
