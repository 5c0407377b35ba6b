"""A root on a file system: locks of readers, the trash, names that merely resemble ours, and what two who prune at once leave."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_files
from support.roots import RootPlace

from dcp_engine import ShardReader, verify_checkpoint
from dcp_engine.errors import CheckpointNotFoundError, RetiredError, StepInUseError, StorageError
from dcp_engine.storage.backends import calls
from dcp_engine.storage.holds import hold_for_reading, hold_for_retiring
from dcp_engine.storage.publish import attach_checkpoint, open_checkpoint, open_publisher
from dcp_engine.storage.tombstones import tombstone_bytes

NONCE = "0123456789abcdef" * 2


@pytest.fixture
def place(tmp_path: Path) -> RootPlace:
    return RootPlace(str(tmp_path / "run"))


def names(place: RootPlace) -> list[str]:
    return sorted(os.listdir(place.path))


def trash(place: RootPlace) -> list[str]:
    return [name for name in names(place) if name.startswith(".trash-")]


class Calls(calls.SystemCalls):
    """The system's calls, some of which fail or show another time."""

    def __init__(self, *, flock: int = 0, rename: int = 0, shift_secs: float = 0) -> None:
        self.failures = {"flock": flock, "rename": rename}
        self.shift_secs = shift_secs
        """Added to the time of files that are made from now on."""
        self._shifted: set[str] = set()

    def flock(self, fd: int, operation: int) -> None:
        if self.failures["flock"]:
            raise OSError(self.failures["flock"], os.strerror(self.failures["flock"]))
        super().flock(fd, operation)

    def rename(self, source: str, target: str) -> None:
        if self.failures["rename"]:
            raise OSError(self.failures["rename"], os.strerror(self.failures["rename"]))
        super().rename(source, target)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._shifted.add(path)
        return super().open(path, flags, mode)

    def lstat(self, path: str) -> os.stat_result:
        found = super().lstat(path)
        if path not in self._shifted or not self.shift_secs:
            return found
        values = list(found)
        values[8] = int(found.st_mtime + self.shift_secs)
        return os.stat_result(values)


# -- readers ----------------------------------------------------------------------------------------------------------


def test_an_open_reader_keeps_its_step(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2, 3):
        place.save(step, claim)
    reader = ShardReader(root.path_of(1))
    reader.read_metadata()

    report = root.prune(1, claim)
    assert (report.retired, report.in_use, report.kept, report.guarded) == ((2,), (1,), (3,), True)
    with pytest.raises(StepInUseError):
        root.retire(1, claim)
    assert place.loaded(1) == [1, 0]
    again = root.prune(1, claim)
    assert (again.retired, again.in_use, again.guarded) == ((), (1,), True)  # a load that ends frees its own hold alone
    reader.reset()
    assert root.prune(1, claim).retired == (1,)
    assert names(place) == [".epochs", "step-00000003"]


@pytest.mark.parametrize("how", ["open", "attach", "hold"])
def test_whoever_opens_a_step_holds_it(place: RootPlace, how: str) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    if how == "open":
        hold = open_checkpoint(root.path_of(1)).hold
    elif how == "attach":
        first = open_checkpoint(root.path_of(1))
        hold = attach_checkpoint(root.path_of(1), first.marker, first.manifest_bytes).hold
        first.hold.release()
    else:
        hold = root.hold(1)
    assert hold.locked
    assert root.prune(1, claim).in_use == (1,)
    hold.release()
    hold.release()
    assert not hold.locked
    assert root.prune(1, claim).retired == (1,)


def test_a_step_is_free_after_a_load_a_walk_and_a_failed_one(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2, 3, 4):
        place.save(step, claim)
    assert place.loaded(1) == [1, 0]
    verify_checkpoint(root.path_of(2)).raise_if_bad()
    (Path(root.path_of(3)) / "MANIFEST").write_bytes(b"")
    with contextlib.suppress(Exception):
        open_checkpoint(root.path_of(3))
    assert root.prune(1, claim).retired == (1, 2, 3)


def test_a_reader_in_another_process_is_seen(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    program = """
import sys
from dcp_engine.storage.publish import open_checkpoint
opened = open_checkpoint(sys.argv[1])
print("open", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, root.path_of(1)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        assert root.prune(1, claim).in_use == (1,)
        reader.kill()
        reader.wait()
        assert root.prune(1, claim).retired == (1,)


def test_a_read_only_step_can_be_read_and_retired(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    os.chmod(Path(root.path_of(1)) / "COMPLETE", 0o444)
    with open_checkpoint(root.path_of(1)).hold as hold:
        assert hold.locked
    assert root.prune(1, claim).retired == (1,)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF])
def test_without_locks_steps_go_and_their_trash_stays_for_a_while(place: RootPlace, code: int) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    with calls.installed(Calls(flock=code)):
        opened = open_checkpoint(root.path_of(1))
        assert not opened.hold.locked
        file = opened.directory.open("COMPLETE")
        report = root.prune(1, claim)
        assert (report.retired, report.guarded) == ((1,), False)
        assert len(trash(place)) == 1
        assert root.clean(claim) == ()
        file.read_into(0, [memoryview(bytearray(8))])
        file.close()
        assert len(root.clean(claim, older_than_secs=0)) == 1
    assert names(place) == [".epochs", "step-00000002"]


def test_a_reader_that_meets_one_who_retires_waits_for_it(place: RootPlace) -> None:
    place.save(1)
    path = place.root().path_of(1)
    exclusive = hold_for_retiring(path)
    assert exclusive is not None
    asked = 0

    class Busy(calls.SystemCalls):
        def flock(self, fd: int, operation: int) -> None:
            nonlocal asked
            if operation == fcntl.LOCK_SH | fcntl.LOCK_NB:
                asked += 1
                if asked == 3:
                    os.rename(path, path + ".gone")
                    exclusive.release()
            super().flock(fd, operation)

    with calls.installed(Busy()):
        hold = hold_for_reading(path)
    assert asked == 3
    assert not hold.locked  # it locked what has another name by now, looked again, and found nothing
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(path)


def test_a_lock_is_not_kept_by_a_child(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    opened = open_checkpoint(root.path_of(1))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    try:
        assert root.prune(1, claim).in_use == (1,)
        opened.hold.release()
        assert root.prune(1, claim).retired == (1,)
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_a_child_that_drops_its_copy_of_a_hold_frees_nothing(place: RootPlace) -> None:
    """As a forked loader of data does that lets go of a reader."""
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    opened = open_checkpoint(root.path_of(1))
    child = os.fork()
    if child == 0:
        opened.hold.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert root.prune(1, claim).in_use == (1,)
    opened.hold.release()
    assert root.prune(1, claim).retired == (1,)


# -- names ------------------------------------------------------------------------------------------------------------


def tree(path: Path) -> dict[str, Any]:
    return {
        str(each.relative_to(path)): os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else None
        for each in sorted(path.rglob("*"))
    }


def test_strangers_survive_everything(place: RootPlace, tmp_path: Path) -> None:
    run = tmp_path / "run"
    strangers = RootPlace(str(tmp_path / "strangers"))
    strangers.save(1)
    whole = tmp_path / "strangers" / "step-00000001"
    run.mkdir()
    for name in (
        "step-7.tmp",
        "step-007",
        "notes",
        "step-00000007.tmp",
        "Step-00000001",
        "step-00000002 ",
        ".trash",
        ".trash-" + "0" * 31,
        ".trash-" + "A" * 32,
        ".tmp-step-7-" + NONCE,
        ".tmp-step-00000001-" + "0" * 31,
        ".tmp-notes-" + NONCE,
        ".tmp-step-00000001",
    ):
        (run / name).mkdir()
        (run / name / "COMPLETE").write_bytes((whole / "COMPLETE").read_bytes())
    (run / "step-00000002").symlink_to(whole)
    (run / f".trash-{NONCE}").symlink_to(whole)
    (run / f".tmp-step-00000003-{NONCE}").symlink_to(whole)
    (run / "README").write_bytes(b"do not remove")
    before = tree(run)

    root = place.root()
    claim = root.claim()
    for step in (10, 11, 12):
        place.save(step, claim)
    root.set_latest(12, claim)
    assert root.steps() == [10, 11, 12]
    assert root.prune(1, claim).retired == (10, 11)
    claim = root.claim()
    assert root.clean(claim, older_than_secs=0) == ()
    with pytest.raises(CheckpointNotFoundError):
        root.retire(7, claim)
    after = tree(run)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {".epochs", "LATEST", "step-00000012"}
    assert strangers.loaded(1) == [1, 0]


def test_a_link_in_place_of_a_step_is_not_retired(place: RootPlace, tmp_path: Path) -> None:
    root, claim = place.root(), place.root().claim()
    elsewhere = RootPlace(str(tmp_path / "elsewhere"))
    elsewhere.save(1)
    place.save(2, claim)
    (Path(place.path) / "step-00000001").symlink_to(elsewhere.root().path_of(1))

    for call in (root.retire, root.set_latest):
        with pytest.raises(CheckpointNotFoundError) as caught:
            call(1, claim)
        assert caught.value.found == "a symbolic link"
    assert root.prune(1, claim).retired == ()
    assert (Path(place.path) / "step-00000001").is_symlink()
    assert elsewhere.loaded(1) == [1, 0]


# -- the trash --------------------------------------------------------------------------------------------------------


def begun(place: RootPlace, step: int) -> Path:
    """An attempt whose writer is gone."""
    publisher = open_publisher(place.root().path_of(step))
    ref = publisher.begin()
    write_files(publisher, ref)
    return Path(ref.attempt)


def test_a_claim_takes_attempts_away_and_they_go_once_they_are_old(place: RootPlace) -> None:
    place.root().claim()
    attempts = [begun(place, step) for step in (1, 2)]
    claim = place.root().claim()
    assert not any(attempt.exists() for attempt in attempts)
    assert len(trash(place)) == 2

    root = place.root()
    assert root.clean(claim) == ()
    for shift_secs, gone in ((-1e6, 0), (3500, 0), (3700, 2)):  # a clock set back, too early, late enough
        with calls.installed(Calls(shift_secs=shift_secs)):
            assert len(root.clean(claim)) == gone
    assert names(place) == [".epochs"]
    # An attempt of its own epoch is none of its business, however old it is.
    attempt = begun(place, 3)
    with calls.installed(Calls(shift_secs=1e9)):
        assert root.clean(claim) == ()
    assert attempt.is_dir()


def test_what_may_be_all_that_is_left_is_not_cleaned_away(place: RootPlace, caplog: pytest.LogCaptureFixture) -> None:
    root, claim = place.root(), place.root().claim()
    place.save(1, claim)
    kept = Path(place.path) / f".trash-{NONCE}"
    os.rename(root.path_of(1), kept)  # as where a replacement was cut off between its two renames
    begun(place, 2)
    claim = root.claim()

    assert len(root.clean(claim, older_than_secs=0)) == 1
    assert trash(place) == [kept.name]
    assert "it may be a whole checkpoint" in caplog.text
    place.save(3, claim)
    assert root.clean(claim, older_than_secs=0) == (kept.name,)


def test_a_crash_in_the_middle_of_retiring_leaves_trash_and_no_half_step(place: RootPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    monkeypatch.setattr("dcp_engine.storage.root_posix.remove_tree", lambda path: False)
    assert root.prune(1, claim).retired == (1,)
    monkeypatch.undo()
    assert root.steps() == [2]
    assert len(trash(place)) == 1
    assert len(root.clean(claim, older_than_secs=0)) == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EBUSY])
def test_a_step_that_cannot_be_renamed_stays(place: RootPlace, code: int) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    with calls.installed(Calls(rename=code)), pytest.raises(StorageError) as caught:
        root.prune(1, claim)
    assert caught.value.errno == code
    assert root.steps() == [1, 2]
    assert place.loaded(1) == [1, 0]
    assert root.prune(1, claim).retired == (1,)


def test_a_claim_that_cannot_take_an_attempt_away_is_none(place: RootPlace) -> None:
    old = place.root().claim()
    attempt = begun(place, 1)
    with calls.installed(Calls(rename=errno.EACCES)), pytest.raises(StorageError, match="take an attempt away"):
        place.root().claim()
    assert attempt.is_dir()
    with pytest.raises(Exception, match="lost the root"):
        old.check()
    place.root().claim().check()
    assert not attempt.exists()


def test_a_tombstone_that_was_copied_here_stays_one(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    place.save(1, claim)
    copied = Path(root.path_of(2))
    copied.mkdir()
    (copied / "COMPLETE").write_bytes(tombstone_bytes([NONCE]))
    assert root.steps() == [1]
    for call in (open_checkpoint, verify_checkpoint):
        with pytest.raises(RetiredError):
            call(str(copied))
    place.save(2, claim, writer=5)
    assert place.loaded(2) == [2, 5]
    assert root.steps() == [1, 2]


# -- two at once ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def between(call: str, action: Any) -> Iterator[None]:
    """Does something right before the first call of a name, as another process may."""
    done = False

    class Interposed(calls.SystemCalls):
        def __getattribute__(self, name: str) -> Any:
            nonlocal done
            if name == call and not done:
                done = True
                action()
            return super().__getattribute__(name)

    with calls.installed(Interposed()):
        yield
    assert done


@pytest.mark.parametrize("call", ["flock", "rename", "fsync"])
def test_two_who_prune_at_once_leave_what_both_want(place: RootPlace, call: str) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2, 3, 4):
        place.save(step, claim)
    reports = []
    with between(call, lambda: reports.append(place.root().prune(1, claim))):
        reports.append(root.prune(2, claim))
    gone = [step for report in reports for step in report.retired]
    assert sorted(gone) == sorted(set(gone))
    assert root.prune(1, claim).kept == (4,)
    assert place.loaded(4) == [4, 0]


def test_the_step_that_stays_cannot_be_retired_while_others_go(place: RootPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_engine.storage.holds._PATIENCE_SECS", 0.0)
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    errors = []

    def rollback() -> None:
        try:
            place.root().retire(2, claim)
        except StepInUseError as error:
            errors.append(error.step)

    with between("rename", rollback):
        assert root.prune(1, claim).retired == (1,)
    assert errors == [2]
    assert place.loaded(2) == [2, 0]


def test_an_overtaken_claim_takes_nothing_away_from_a_newer_one(place: RootPlace) -> None:
    newer: list[Any] = []

    def overtake() -> None:
        newer.append(place.root().claim("newer"))
        newer.append(begun(place, 7))

    place.root().claim()
    # Between the listing of attempts and the look at the epochs: what the listing shows is older than the newer claim.
    listed = 0

    class Interposed(calls.SystemCalls):
        def listdir(self, path: str) -> list[str]:
            nonlocal listed
            found = super().listdir(path)
            if path == place.path:
                listed += 1
                if listed == 2:
                    overtake()
            return found

    with calls.installed(Interposed()), pytest.raises(Exception, match="lost the root"):
        place.root().claim("slow")
    claim, attempt = newer
    claim.check()
    assert attempt.is_dir()
