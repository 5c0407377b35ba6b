"""Errors at every I/O call: the quick part of the campaign, and proof that it sees an engine that swallows, leaks or leaves litter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from faults.campaign import errors, real_limits
from faults.campaign.errors import SCENARIOS, BrokenError, check_read, check_save, read_calls, save_calls
from faults.campaign.faulty_calls import Call, Fault, FaultyCalls, RunawayError, faults_of
from faults.campaign.ranks_in_turn import save_in_turn, state_of, writers_for

from dcp_engine.storage import publish_posix
from dcp_engine.storage.backends.calls import SystemCalls, installed
from dcp_engine.storage.backends.local import LocalReadFile, LocalWriteFile

NEXT_SAVE = SCENARIOS[1]
SHARD, ATTEMPT = ".tmp-step-00000002-*/model-00000.shard", ".tmp-step-00000002-*"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
def test_no_error_at_any_call_breaks_a_promise() -> None:
    outcome = errors.run(full=False, seed=0)
    assert outcome.bad == ()
    assert outcome.points >= 450
    for kind in ("EIO told", "ENOSPC told", "EDQUOT told", "ESTALE told", "EINTR survived", "short survived", "nothing told"):
        assert outcome.facts[kind] >= 5, kind
    assert outcome.facts["RLIMIT_FSIZE told"] >= 10
    assert outcome.facts["/dev/full told"] >= 6
    assert real_limits.NO_MOUNT in outcome.facts or outcome.facts["full tmpfs told"] >= 10


def test_every_call_of_a_save_is_a_place_for_faults(tmp_path: Path) -> None:
    calls = save_calls(NEXT_SAVE, tmp_path)
    assert Call("fsync", SHARD, 0) in calls
    assert Call("rename", ATTEMPT, 0) in calls
    assert {call.method for call in calls} >= {"open", "close", "pwritev", "fsync", "mkdir", "rename", "lstat", "listdir", "stat"}
    assert save_calls(NEXT_SAVE, tmp_path) == calls
    assert len(list(faults_of(calls))) >= 12 * len(calls)


def test_the_sample_holds_every_kind_at_every_method(tmp_path: Path) -> None:
    points: list[tuple[Any, Fault]] = [(NEXT_SAVE, fault) for fault in faults_of(save_calls(NEXT_SAVE, tmp_path))]
    kinds = {(fault.call.method, fault.kind, fault.lasts) for _, fault in points}
    some = errors.sampled(points, len(kinds), 3)
    assert {(fault.call.method, fault.kind, fault.lasts) for _, fault in some} == kinds
    assert some == errors.sampled(points, len(kinds), 3)
    assert some != errors.sampled(points, len(kinds), 4)


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_a_swallowed_error_of_a_flush_is_seen(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LocalWriteFile.commit

    def forgiving(file: LocalWriteFile) -> None:
        try:
            commit(file)
        except Exception:
            file._committed = True
            os.close(file._fd)

    fault = Fault(Call("fsync", SHARD, 0), kind)
    assert not check_save(NEXT_SAVE, fault, tmp_path)
    monkeypatch.setattr(LocalWriteFile, "commit", forgiving)
    with pytest.raises(BrokenError, match="was lost"):
        check_save(NEXT_SAVE, fault, tmp_path)


def test_what_is_left_behind_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(Call("pwritev", SHARD, 0), "ENOSPC")
    assert not check_save(NEXT_SAVE, fault, tmp_path)
    monkeypatch.setattr(publish_posix, "remove_tree", lambda path: True)
    with pytest.raises(BrokenError, match="did not clean up"):
        check_save(NEXT_SAVE, fault, tmp_path)


def test_a_leaked_descriptor_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_turn(writers_for(tmp_path / "step-00000001", 2), [state_of(1, rank) for rank in range(2)])
    fault = Fault(Call("preadv", "step-00000001/model-00001.shard", 0), "EIO")
    assert fault.call in read_calls("load", tmp_path)
    assert not check_read("load", fault, tmp_path)
    monkeypatch.setattr(LocalReadFile, "close", lambda file: None)
    with pytest.raises(BrokenError, match=r"descriptors are left open.*model-00001"):
        check_read("load", fault, tmp_path)


def test_an_untyped_error_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(Call("mkdir", ATTEMPT, 0), "EDQUOT")
    assert not check_save(NEXT_SAVE, fault, tmp_path)
    monkeypatch.setattr(publish_posix, "storage_failure", lambda error, *args, **kwargs: error)
    with pytest.raises(BrokenError, match="not of the engine"):
        check_save(NEXT_SAVE, fault, tmp_path)


def test_a_loop_without_end_is_seen(tmp_path: Path) -> None:
    with installed(FaultyCalls(str(tmp_path))) as _, pytest.raises(RunawayError, match="lstat of x"):
        while True:
            publish_posix.name_exists(str(tmp_path / "x"))


def test_an_interrupted_call_reaches_the_real_one_afterwards(tmp_path: Path) -> None:
    calls = FaultyCalls(str(tmp_path), Fault(Call("mkdir", "d", 0), "EINTR", "sticky"))
    calls.mkdir(str(tmp_path / "d"))
    assert (tmp_path / "d").is_dir()
    assert calls.num_fired == 1


def test_calls_that_are_not_faulty_are_the_real_ones() -> None:
    """A method that ``SystemCalls`` gains is a place for faults at once."""
    hints = {"start_writeback", "await_writeback"}
    names = {name for name in vars(SystemCalls) if not name.startswith("_")} - hints
    assert all(getattr(FaultyCalls, name) is not getattr(SystemCalls, name) for name in names)
