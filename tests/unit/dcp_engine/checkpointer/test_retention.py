"""What stays of real steps: after saves, beside readers and strangers, across processes, with damaged ones among them."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_engine import Checkpointer, RunRoot
from dcp_engine.checkpointer.options import CheckpointerOptions
from dcp_engine.checkpointer.policy_record import PolicyRecord
from dcp_engine.checkpointer.record import SaveRecord
from dcp_engine.checkpointer.retention import Retention
from dcp_engine.errors import (
    FencedError,
    InvalidOptionError,
    MalformedCheckpointError,
    StorageFullError,
    UnencodableObjectError,
    UnsupportedVersionError,
)
from dcp_engine.policies import Best, Health, HealthVerdict, Keep, Room, When
from dcp_engine.storage.backends.calls import SystemCalls, installed


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step))}


def _save(checkpointer: Checkpointer, *steps: int, **options: Any) -> None:
    for step in steps:
        checkpointer.save(step, _state(step), wait=True, **options)


def _shard(root: Path, step: int) -> Path:
    return next((root / f"step-{step:08d}").glob("*.shard"))


# -- retention after saves ----------------------------------------------------------------------------------------------------


def test_after_each_save_what_no_rule_names_goes(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep(last=2, every=3, pinned={2})) as checkpointer:
        there = []
        for step in range(1, 9):
            _save(checkpointer, step)
            there.append(checkpointer.steps())
        assert there == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 3, 4, 5], [2, 3, 5, 6], [2, 3, 6, 7], [2, 3, 6, 7, 8]]
        assert all(not checkpointer.verify(step).faults for step in checkpointer.steps())
    assert RunRoot(tmp_path).latest() == 8


def test_without_rules_everything_stays(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        _save(checkpointer, 1, 2, 3)
        assert checkpointer.steps() == [1, 2, 3]
        with pytest.raises(InvalidOptionError, match="nothing says what to keep"):
            checkpointer.retention_plan()


def test_a_dry_run_tells_and_removes_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep(last=9)) as checkpointer:
        _save(checkpointer, 1, 2, 3)
        assert checkpointer.retention_plan().surplus == ()
        assert str(checkpointer.retention_plan(Keep(every=2))) == (
            "step 1: goes: no rule names it\n"
            "step 2: stays: a multiple of 2\n"
            "step 3: stays: the newest good step, the last healthy step, one of the last 1"
        )
        assert checkpointer.steps() == [1, 2, 3]


def test_a_step_that_is_read_stays_until_the_next_time(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep()) as checkpointer:
        _save(checkpointer, 1)
        with RunRoot(tmp_path).hold(1) as hold:
            assert hold.locked
            _save(checkpointer, 2, 3)
            assert checkpointer.steps() == [1, 3]
        _save(checkpointer, 4)
        assert checkpointer.steps() == [4]


def test_strangers_survive(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep()) as checkpointer:
        _save(checkpointer, 1)
        for name in ("step-7.tmp", "step-007", "notes"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text("mine")
        elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
        elsewhere.mkdir()
        os.symlink(elsewhere, tmp_path / "step-00000000")
        _save(checkpointer, 2, 3)
    assert RunRoot(tmp_path).steps() == [3]
    assert all((tmp_path / name / "file").read_text() == "mine" for name in ("step-7.tmp", "step-007", "notes"))
    assert (tmp_path / "step-00000000").is_symlink()


def test_one_step_is_kept_across_a_resume(tmp_path: Path) -> None:
    for first in (1, 3):
        with Checkpointer(tmp_path, keep=Keep(last=1)) as checkpointer:
            checkpointer.restore(_state(0), missing_ok=True)
            _save(checkpointer, first, first + 1)
            assert checkpointer.steps() == [first + 1]


def test_a_pinned_step_stays_whatever_a_later_process_is_told(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep(pinned={1})) as checkpointer:
        _save(checkpointer, 1, 2)
    with Checkpointer(tmp_path, keep=Keep()) as checkpointer:
        checkpointer.restore(_state(0))
        _save(checkpointer, 3, 4)
        assert checkpointer.steps() == [1, 4]


def test_a_save_that_fails_removes_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep(last=1)) as checkpointer:
        _save(checkpointer, 1)
        with pytest.raises(UnencodableObjectError):
            checkpointer.save(2, {"w": lambda: None}, wait=True)
        assert checkpointer.steps() == [1]
        assert not checkpointer.verify(1).faults


def test_a_run_that_was_overtaken_removes_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep(last=3)) as old:
        _save(old, 1, 2, 3)
        retention, claim = Retention(RunRoot(tmp_path), CheckpointerOptions()), RunRoot(tmp_path).claim()
        RunRoot(tmp_path).claim("newer")
        with pytest.raises(FencedError):
            retention.run(Keep(), claim, 3)
        assert old.steps() == [1, 2, 3]


# -- what counts ----------------------------------------------------------------------------------------------------------------


def test_silent_divergence_does_not_age_the_last_healthy_step_out(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep(last=2), health=Health()) as checkpointer:
        for step in range(1, 8):
            _save(checkpointer, step, metadata={"loss": 1.0 if step <= 3 else math.nan})
        assert checkpointer.steps() == [3, 6, 7]


def test_the_best_by_evaluations_stay_and_else_the_best_by_what_was_saved(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=Keep(last=1, best=Best(metric="loss"))) as checkpointer:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
            _save(checkpointer, step, metadata={"loss": loss})
        assert checkpointer.steps() == [2, 4]
        checkpointer.record_evaluation(4, {"loss": 0.5})
        checkpointer.record_evaluation(2, {"loss": 0.7})
        _save(checkpointer, 5, metadata={"loss": 0.1})
        assert checkpointer.steps() == [4, 5]


def test_a_damaged_step_counts_for_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        _save(checkpointer, 1, 2, 3)
    _shard(tmp_path, 3).unlink()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.retention_plan(Keep()).kept == (2, 3)
        assert checkpointer.retention_plan(Keep(last=2)).kept == (1, 2, 3)


def test_what_is_not_what_was_written_lets_nothing_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, writer_options={"codec": "raw"}) as checkpointer:
        _save(checkpointer, 1, 2, 3)
    shard = _shard(tmp_path, 3)
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    root = RunRoot(tmp_path)
    retention, claim = Retention(root, CheckpointerOptions()), root.claim()
    report = retention.run(Keep(verified=True), claim, 3)
    assert (report.retired, report.plan.kept) == ((), (1, 2, 3))
    assert "step 3 is not what was written, and nothing is removed for it" in caplog.text
    content[5000] ^= 1
    shard.write_bytes(content)
    report = retention.run(Keep(verified=True), claim, 3)
    assert (report.retired, root.steps()) == ((1, 2), [3])


def test_what_a_newer_release_wrote_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        _save(checkpointer, 1, 2, 3)
        look = RunRoot.look

        def newer(root: RunRoot, step: int) -> Any:
            if step == 1:
                raise UnsupportedVersionError("newer")
            return look(root, step)

        monkeypatch.setattr(RunRoot, "look", newer)
        assert checkpointer.retention_plan(Keep()).kept == (1, 3)


def test_days_come_from_the_checkpoints(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        _save(checkpointer, 1, 2)
        day = str(checkpointer.look(2).saved_at)[:10]
        reasons = checkpointer.retention_plan(Keep(daily=True)).decisions[1].reasons
    assert f"the last of {day}" in reasons


# -- room -----------------------------------------------------------------------------------------------------------------------


class _Disk(SystemCalls):
    """A disk of so many bytes, of which the files below a directory take some."""

    def __init__(self, root: Path, num_bytes: int) -> None:
        self._root = root
        self.num_bytes = num_bytes

    def statvfs(self, path: str) -> os.statvfs_result:
        free = self.num_bytes - _used_bytes(self._root)
        return os.statvfs_result((1, 1, self.num_bytes, free, free, 0, 0, 0, 0, 255))


class _DiskWithoutLocks(_Disk):
    def flock(self, fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")


def _used_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def test_a_save_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, room=Room()) as checkpointer:
        _save(checkpointer, 1, 2)
        size_bytes = checkpointer.look(2).stored_bytes
        before = sorted(tmp_path.rglob("*"))
        full = _Disk(tmp_path, _used_bytes(tmp_path) + size_bytes)  # a tenth is missing
        with installed(full), pytest.raises(StorageFullError, match="no room for the next save") as caught:
            _save(checkpointer, 3)
        assert caught.value.found == f"{size_bytes:,}"
        assert f"{math.ceil(1.1 * size_bytes):,} bytes free" in str(caught.value.expected)
        assert sorted(tmp_path.rglob("*")) == before
        with installed(_Disk(tmp_path, _used_bytes(tmp_path) + math.ceil(1.1 * size_bytes))):
            _save(checkpointer, 4)
        assert checkpointer.steps() == [1, 2, 4]


def test_what_was_retired_makes_room(tmp_path: Path) -> None:
    disk = _DiskWithoutLocks(tmp_path, 1 << 30)
    with installed(disk), Checkpointer(tmp_path, room=Room(), keep=Keep(last=1)) as checkpointer:
        _save(checkpointer, 1, 2)
        assert any(path.name.startswith(".trash-") for path in tmp_path.iterdir())  # somebody may be reading there
        disk.num_bytes = _used_bytes(tmp_path) + checkpointer.look(2).stored_bytes // 2
        _save(checkpointer, 3)
        assert checkpointer.steps() == [3]


def test_the_first_save_has_nothing_to_go_by(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, room=Room()) as checkpointer, installed(_Disk(tmp_path, 0)):
        _save(checkpointer, 1)
        assert checkpointer.steps() == [1]


# -- what is noted --------------------------------------------------------------------------------------------------------------


def test_what_policies_note_comes_back() -> None:
    record = PolicyRecord(
        health=HealthVerdict(is_healthy=False, reason="loss is nan"),
        is_pinned=True,
        running_secs=12.5,
        failures=3,
        stalls=(1.0, 2.0),
        durable_secs=4.0,
    )
    assert PolicyRecord.from_dict(record.as_dict()) == record
    assert PolicyRecord.from_dict(None) == PolicyRecord()


@pytest.mark.parametrize(
    "change",
    [
        {"is_healthy": 1},
        {"failures": -1},
        {"failures": "2"},
        {"stalls": 5},
        {"stalls": [math.nan]},
        {"running_secs": None},
        {"is_pinned": 0},
    ],
)
def test_what_they_did_not_note_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedCheckpointError, match="policies"):
        PolicyRecord.from_dict({**PolicyRecord().as_dict(), **change})


# -- options --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"when": When(steps=5), "save_every": 5}, "save_every and when contradict each other"),
        ({"when": "often"}, "when is not known"),
        ({"when": 5}, "when is not known"),
        ({"keep": 5}, "Keep(last=5)"),
        ({"health": True}, "Health(at_most="),
        ({"room": 5}, "Room(growth=0.1)"),
    ],
)
def test_wrong_options_are_refused_before_anything_happens(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        Checkpointer(tmp_path / "run", **options)
    assert expected in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpointer_saves_by_its_rules(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, when=When(steps=3)) as checkpointer:
        handles = [checkpointer.maybe_save(step, _state(step), wait=True) for step in range(1, 11)]
        assert [handle.step for handle in handles if handle is not None] == [3, 6, 9]
        with pytest.raises(InvalidOptionError, match="steps go backwards"):
            checkpointer.save(2, _state(2))
    with Checkpointer(tmp_path, when=When(steps=4), keep=Keep()) as checkpointer:
        checkpointer.restore(_state(0))
        steps = [step for step in range(10, 20) if checkpointer.maybe_save(step, _state(step), wait=True)]
        assert (steps, checkpointer.steps()) == ([12, 16], [16])


def test_what_saves_cost_and_how_long_the_run_lives_is_in_the_checkpoint(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, when="auto") as checkpointer:
        assert checkpointer.maybe_save(1, _state(1), wait=True) is not None  # at once: it tells what it costs
        _save(checkpointer, 2)
    for step, failures in ((3, 1), (4, 2)):
        with Checkpointer(tmp_path, when="auto") as checkpointer:
            checkpointer.restore(_state(0))
            assert checkpointer.maybe_save(step, _state(step)) is None  # that is known already
            _save(checkpointer, step)
            info = checkpointer.look(step)
        noted = SaveRecord.read(info.metadata, path=info.path).policies
        assert noted.failures == failures
        assert len(noted.stalls) == 1
        assert noted.running_secs > 0
