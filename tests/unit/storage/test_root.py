"""A root on every kind of storage: who may write, what is there, what goes, and what is refused before anything happens."""

from __future__ import annotations

import pickle
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import unprivileged, world_readable_directory, write_files
from support.engine import refused
from support.roots import RootPlace, save_step
from support.s3 import make_bucket, storage_options

from dcp_engine import EpochClaim, RunRoot, committed_steps, verify_checkpoint
from dcp_engine.errors import (
    CheckpointNotFoundError,
    CommitError,
    CorruptCheckpointError,
    DcpEngineError,
    DigestMismatchError,
    FencedError,
    InvalidOptionError,
    MalformedCheckpointError,
    MissingFileError,
    StorageError,
    StoragePermissionError,
    UnsupportedVersionError,
)
from dcp_engine.storage.backends import Directory, locate, resolve
from dcp_engine.storage.epochs import EpochRecord
from dcp_engine.storage.publish import open_checkpoint, open_publisher
from dcp_engine.storage.root import Decision

EVERYWHERE = pytest.mark.parametrize("place", ["local", "memory", "s3"], indirect=True)
"""Elsewhere memory stands for all object stores: a save to a server takes a second."""


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RootPlace:
    if request.param == "local":
        return RootPlace(str(tmp_path / "run"))
    if request.param == "s3":
        return RootPlace(f"s3://{make_bucket()}/run", storage_options())
    return RootPlace(f"memory://{uuid.uuid4().hex}/run")


def directory(place: RootPlace, name: str = "") -> Directory:
    location = locate(place.path)
    return resolve(location.child(name) if name else location, place.storage_options)


def put(place: RootPlace, name: str, content: bytes, under: str = "") -> None:
    """A file that somebody else writes."""
    into = directory(place, under)
    if "://" in place.path:
        into.replace(name, content)  # type: ignore[attr-defined]
    else:
        (Path(into.path) / name).write_bytes(content)


# -- who writes -------------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_each_claim_takes_the_next_epoch_and_overtakes_the_one_before(place: RootPlace) -> None:
    first = place.root().claim("night run")
    first.check()
    second = place.root().claim("day run")

    assert [first.epoch, second.epoch] == [1, 2]
    assert directory(place, ".epochs").names() == ["00000001", "00000002"]
    second.check()
    with pytest.raises(FencedError) as caught:
        first.check()
    assert caught.value.path == place.root().path
    assert str(caught.value.found) == str(second.record)
    assert str(second.record).startswith("epoch 2 of run 'day run', claimed by host ")
    assert "epoch 1 of run 'night run'" in str(caught.value.expected)


@EVERYWHERE
def test_a_claim_crosses_processes_and_is_of_its_root_alone(place: RootPlace) -> None:
    claim = place.root().claim()
    copy = pickle.loads(pickle.dumps(claim))
    copy.check()
    assert copy == claim
    assert isinstance(copy, EpochClaim)
    secret = "loopback"
    assert secret not in repr(claim)

    place.root().claim()
    with pytest.raises(FencedError):
        copy.check()


@EVERYWHERE
def test_an_overtaken_writer_publishes_nothing_and_leaves_nothing(place: RootPlace) -> None:
    old = place.root().claim()
    place.save(1, old)
    new = place.root().claim()

    failure = refused(place.save, 2, old)
    assert isinstance(failure, FencedError)
    assert place.root().steps() == [1]
    assert [name for name in directory(place).names() if name.startswith((".tmp-", ".trash-"))] == []
    place.save(2, new, writer=7)
    assert place.loaded(2) == [2, 7]


@EVERYWHERE
def test_an_attempt_that_was_begun_before_the_claim_cannot_be_published_after_it(place: RootPlace) -> None:
    old = place.root().claim()
    publisher = open_publisher(place.root().path_of(5), storage_options=place.storage_options, fence=old)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    new = place.root().claim()

    with pytest.raises(FencedError):
        publisher.commit(ref, bytes(64), reported)
    publisher.abort(ref)
    assert place.root().steps() == []
    # The same step again, by whoever has the root now, on whatever was left.
    place.save(5, new, writer=3)
    assert place.loaded(5) == [5, 3]
    assert place.root().steps() == [5]


@EVERYWHERE
def test_an_attempt_that_asks_before_the_claim_and_renames_after_it_fails_too(place: RootPlace) -> None:
    class Meanwhile:
        """The fence of a writer that is stopped between its question and its rename, while another run claims the root."""

        def __init__(self, claim: EpochClaim) -> None:
            self.claim, self.asked = claim, 0

        def check(self) -> None:
            self.claim.check()
            self.asked += 1
            if self.asked == 2:
                place.root().claim("new")

    fence = Meanwhile(place.root().claim("old"))
    publisher = open_publisher(place.root().path_of(5), storage_options=place.storage_options, fence=fence)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    with pytest.raises(FencedError, match="lost the root"):
        publisher.commit(ref, bytes(64), reported)
    assert fence.asked == 2
    assert place.root().steps() == []


@EVERYWHERE
def test_a_claim_whose_file_is_gone_or_replaced_is_no_claim(place: RootPlace) -> None:
    claim = place.root().claim()
    other = EpochRecord(1, "0" * 32, "x", "elsewhere", 4, "2030-01-01T00:00:00Z")
    put(place, "00000001", other.encode(), under=".epochs")
    with pytest.raises(FencedError, match="in its own file"):
        claim.check()
    put(place, "00000001", b"", under=".epochs")
    with pytest.raises(FencedError):
        claim.check()


def test_names_that_are_no_epochs_do_not_count(place: RootPlace) -> None:
    claim = place.root().claim()
    for name in ("7", "00000009.tmp", "0000000099", "notes", "00000000", "9" * 19):
        put(place, name, b"x", under=".epochs")
    claim.check()
    assert place.root().claim().epoch == 2


def test_an_epoch_that_a_listing_does_not_show_is_seen_all_the_same(place: RootPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place.root().claim()
    kind = type(directory(place))
    everything = kind.names

    def late(self: Any) -> list[str]:
        return [name for name in everything(self) if name not in ("00000002", "00000003")]

    monkeypatch.setattr(kind, "names", late)
    assert place.root().claim().epoch == 2
    with pytest.raises(FencedError, match="epoch 2"):
        first.check()
    assert place.root().claim().epoch == 3


# -- what is there ----------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_latest_is_the_newest_committed_step(place: RootPlace) -> None:
    root = place.root()
    assert root.latest() is None
    assert root.hint() is None
    claim = root.claim()
    for step in (3, 20):
        place.save(step, claim)
        root.set_latest(step, claim)
    assert (root.latest(), root.steps()) == (20, [3, 20])
    hint = root.hint()
    assert hint is not None
    assert hint.step == 20
    assert hint.nonce == open_checkpoint(root.path_of(20), storage_options=place.storage_options).marker.nonce
    assert [name for name in directory(place).names() if name.startswith(".trash-")] == []


def test_a_stale_hint_hides_nothing(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    place.save(1, claim)
    root.set_latest(1, claim)
    place.save(2, claim)
    assert root.latest() == 2


@EVERYWHERE
def test_a_hint_at_what_is_not_there_is_told_and_not_believed(place: RootPlace, caplog: pytest.LogCaptureFixture) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    root.set_latest(2, claim)
    root.retire(2, claim)

    with pytest.raises(CheckpointNotFoundError):
        root.hint()
    assert root.latest() == 1
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert "the hint at the newest step is of no use" in caplog.text


def test_a_hint_from_another_root_is_foreign(place: RootPlace, tmp_path: Path) -> None:
    other = RootPlace(str(tmp_path / "other"))
    for each in (place, other):
        each.save(1)
    other.root().set_latest(1)
    put(place, "LATEST", (tmp_path / "other" / "LATEST").read_bytes())

    with pytest.raises(CommitError, match="LATEST names another checkpoint"):
        place.root().hint()
    assert place.root().latest() == 1
    place.root().set_latest(1)
    assert place.root().hint() is not None


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", MalformedCheckpointError),
        (b"global_step100", MalformedCheckpointError),
        (b"step-00000001\n", MalformedCheckpointError),
        (b"dcp-engine latest 2\nanything", UnsupportedVersionError),
        (bytes(range(256)), MalformedCheckpointError),
        (b"dcp-engine latest 1\n" + b"x" * 70_000, CorruptCheckpointError),
    ],
)
def test_a_damaged_hint_is_named(place: RootPlace, content: bytes, error: type[DcpEngineError], caplog: pytest.LogCaptureFixture) -> None:
    place.save(1)
    put(place, "LATEST", content)
    with pytest.raises(error) as caught:
        place.root().hint()
    assert caught.value.file == "LATEST"
    assert place.root().latest() == 1
    assert "LATEST" in caplog.text
    place.root().set_latest(1)
    assert place.root().hint() is not None


def test_a_flipped_bit_of_latest_is_found(tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path))
    place.save(1)
    place.root().set_latest(1)
    content = (tmp_path / "LATEST").read_bytes()
    for bit in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "LATEST").write_bytes(damaged)
        with pytest.raises((MalformedCheckpointError, DigestMismatchError, UnsupportedVersionError)):
            place.root().hint()
    for length in range(len(content)):
        (tmp_path / "LATEST").write_bytes(content[:length])
        with pytest.raises(MalformedCheckpointError):
            place.root().hint()


@pytest.mark.parametrize("what", ["a directory", "a symbolic link"])
def test_latest_that_is_no_file_is_named(tmp_path: Path, what: str) -> None:
    place = RootPlace(str(tmp_path / "run"))
    for step in (1, 2):
        place.save(step)
    latest = tmp_path / "run" / "LATEST"
    place.root().set_latest(1)
    content = latest.read_bytes()
    latest.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    if what == "a directory":
        latest.mkdir()
    else:
        latest.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(MissingFileError) as caught:
        place.root().hint()
    assert caught.value.found == what
    assert place.root().latest() == 2
    if what == "a directory":
        with pytest.raises(StorageError):
            place.root().set_latest(2)
        assert latest.is_dir()
    else:
        place.root().set_latest(2)
        assert not latest.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == content
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["LATEST", "step-00000001", "step-00000002"]


def test_latest_names_committed_steps_alone(place: RootPlace) -> None:
    claim = place.root().claim()
    place.save(1, claim)
    with pytest.raises(CheckpointNotFoundError):
        place.root().set_latest(2, claim)
    place.root().claim()
    with pytest.raises(FencedError):
        place.root().set_latest(1, claim)
    assert place.root().hint() is None


def test_a_root_with_a_key_takes_only_steps_that_are_signed_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, other = b"k" * 32, b"o" * 32
    root = RunRoot(tmp_path, signing_key=key)
    claim = root.claim()
    save_step(root, 1, claim, signing_key=key)
    save_step(root, 2, claim, signing_key=other)
    save_step(root, 3, claim)
    decision = root.decide()
    assert decision is not None
    assert decision.step == 1
    assert "step 3 does not count as a good one" in caplog.text
    assert "step 2 does not count as a good one" in caplog.text
    with pytest.raises(InvalidOptionError, match="the last good step is never retired"):
        root.retire(1, claim)
    report = root.prune(1, claim)
    assert (report.retired, report.kept) == ((), (1, 2, 3))
    assert (root.steps(), root.latest()) == ([1], 1)
    assert committed_steps(tmp_path, signing_key=other) == [2]
    anyones = RunRoot(tmp_path)
    assert (anyones.steps(), anyones.latest()) == ([1, 2, 3], 3)
    decision = anyones.decide()
    assert decision is not None
    assert decision.step == 3
    with pytest.raises(InvalidOptionError, match="signing_key"):
        RunRoot(tmp_path, signing_key=b"short")


def test_a_signed_step_under_the_name_of_another_one_is_no_good_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = b"k" * 32
    root = RunRoot(tmp_path, signing_key=key)
    claim = root.claim()
    save_step(root, 1, claim, signing_key=key)
    save_step(root, 2, claim, signing_key=key)
    shutil.copytree(root.path_of(1), root.path_of(7))
    decision = root.decide()
    assert decision is not None
    assert decision.step == 2
    assert "step 7 does not count as a good one: the checkpoint is signed for another step than that of its name" in caplog.text
    root.set_latest(7)  # by COMPLETE alone it is a step, and signed
    assert (root.steps(), root.latest()) == ([1, 2, 7], 2)
    assert root.prune(1, claim).retired == (1,)
    assert root.steps() == [2, 7]


def test_alone_a_process_decides_for_the_newest_good_step(place: RootPlace, caplog: pytest.LogCaptureFixture) -> None:
    assert place.root().decide() is None
    for step in (1, 2):
        place.save(step)
    opened = [open_checkpoint(place.root().path_of(step), storage_options=place.storage_options) for step in (1, 2)]
    first, second = (Decision(step, o.marker.nonce, o.marker.manifest_sha256) for step, o in zip((1, 2), opened, strict=True))
    assert place.root().decide() == second

    put(place, "model-00000.shard", b"cut", under="step-00000002" if opened[1].marker.data == "." else f"step-00000002/{second.nonce}")
    assert place.root().decide() == first
    assert "step 2 does not count as a good one" in caplog.text
    put(place, "MANIFEST", b"cut", under="step-00000001" if opened[0].marker.data == "." else f"step-00000001/{first.nonce}")
    with pytest.raises(CorruptCheckpointError, match="none of them is good"):
        place.root().decide()


def test_a_newer_release_is_not_passed_over(tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path))
    for step in (1, 2):
        place.save(step)
    marker = tmp_path / "step-00000002" / "COMPLETE"
    marker.write_bytes(marker.read_bytes().replace(b"checkpoint 1\n", b"checkpoint 2\n"))
    with pytest.raises(UnsupportedVersionError):
        place.root().decide()
    # Nor does it stand for the last good step.
    claim = place.root().claim()
    assert place.root().prune(1, claim).retired == ()
    assert place.root().steps() == [1, 2]


# -- what goes --------------------------------------------------------------------------------------------------------


@EVERYWHERE
def test_the_newest_steps_stay(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2, 3, 40, 500):
        place.save(step, claim)
    report = root.prune(2, claim)

    assert (report.retired, report.in_use, report.kept) == ((1, 2, 3), (), (40, 500))
    assert report.guarded is ("://" not in place.path)
    assert root.steps() == committed_steps(place.path, storage_options=place.storage_options) == [40, 500]
    assert place.loaded(40) == [40, 0]
    again = root.prune(2, claim)
    assert (again.retired, again.guarded) == ((), None)  # nothing was asked of the storage, so that nothing is known of it
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(root.path_of(1), storage_options=place.storage_options)
    # A step that was retired may come again.
    place.save(1, claim, writer=9)
    assert place.loaded(1) == [1, 9]
    assert verify_checkpoint(root.path_of(1), storage_options=place.storage_options).faults == ()


def test_a_damaged_newest_step_does_not_count(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2, 3):
        place.save(step, claim)
    marker = open_checkpoint(root.path_of(3), storage_options=place.storage_options).marker
    put(place, "MANIFEST", b"", under="step-00000003" if marker.data == "." else f"step-00000003/{marker.nonce}")

    assert root.prune(1, claim).retired == (1,)
    assert root.steps() == [2, 3]
    with pytest.raises(InvalidOptionError, match="last good step"):
        root.retire(2, claim)
    assert place.loaded(2) == [2, 0]
    root.retire(3, claim)
    assert root.steps() == [2]


def test_without_a_good_step_nothing_goes(tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path))
    claim = place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
        (tmp_path / f"step-0000000{step}" / "MANIFEST").write_bytes(b"")
    report = place.root().prune(1, claim)
    assert (report.retired, report.kept) == ((), (1, 2))


def test_the_last_step_is_never_retired(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    place.save(1, claim)
    with pytest.raises(InvalidOptionError, match="the last good step is never retired"):
        root.retire(1, claim)
    with pytest.raises(CheckpointNotFoundError):
        root.retire(2, claim)
    place.save(2, claim)
    root.retire(2, claim)
    assert root.steps() == [1]
    assert place.loaded(1) == [1, 0]


def test_an_overtaken_run_removes_nothing(place: RootPlace) -> None:
    root, old = place.root(), place.root().claim()
    for step in (1, 2, 3):
        place.save(step, old)
    root.claim()
    for call in (lambda: root.prune(1, old), lambda: root.retire(1, old), lambda: root.clean(old, older_than_secs=0)):
        with pytest.raises(FencedError):
            call()
    assert root.steps() == [1, 2, 3]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_last", [0, -1, 1.0, True, None, "1"])
def test_a_number_of_steps_to_keep_is_at_least_one(place: RootPlace, keep_last: Any) -> None:
    claim = place.root().claim()
    place.save(1, claim)
    with pytest.raises(InvalidOptionError, match="an int of at least 1"):
        place.root().prune(keep_last, claim)
    assert place.root().steps() == [1]


@pytest.mark.parametrize("secs", [-1, float("nan"), "1", True, None])
def test_an_age_is_not_negative(tmp_path: Path, secs: Any) -> None:
    root = RunRoot(tmp_path)
    with pytest.raises(InvalidOptionError):
        root.clean(root.claim(), older_than_secs=secs)


def test_a_claim_of_another_root_is_refused(place: RootPlace, tmp_path: Path) -> None:
    foreign = RunRoot(tmp_path / "other").claim()
    for step in (1, 2):
        place.save(step)
    root = place.root()
    for claim in (foreign, None, "claim"):
        for call in (root.retire, root.prune):
            with pytest.raises(InvalidOptionError, match="not a claim of this root"):
                call(1, claim)  # type: ignore[arg-type]
        with pytest.raises(InvalidOptionError):
            root.clean(claim)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError):
        root.set_latest(1, foreign)
    assert root.steps() == [1, 2]


@pytest.mark.parametrize("run_id", [None, 7, "x" * 4097])
def test_a_run_has_a_name(tmp_path: Path, run_id: Any) -> None:
    with pytest.raises(InvalidOptionError):
        RunRoot(tmp_path / "run").claim(run_id)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run_id", ["", "ü\n\0 x", "\ud800", "check 1\n", "x" * 4096])
def test_a_run_may_have_any_name(tmp_path: Path, run_id: str) -> None:
    claim = RunRoot(tmp_path).claim(run_id)
    content = (tmp_path / ".epochs" / "00000001").read_bytes()
    assert EpochRecord.decode(content, file="x", path="y") == claim.record
    assert claim.record.run == run_id


@EVERYWHERE
def test_a_file_is_no_root(place: RootPlace) -> None:
    put_at = RootPlace(place.path.rpartition("/")[0], place.storage_options)
    put(put_at, "run", b"a file")
    with pytest.raises(InvalidOptionError, match="cannot be a root"):
        place.root().claim()
    assert place.root().steps() == []


def test_a_checkpoint_is_no_root(place: RootPlace) -> None:
    place.save(1)
    inside = RootPlace(place.root().path_of(1), place.storage_options)
    before = directory(inside).names()
    with pytest.raises(InvalidOptionError, match="this is a checkpoint, not a root"):
        inside.root().claim()
    assert directory(inside).names() == before


@EVERYWHERE
@pytest.mark.parametrize("below", ["run", "deeper/run"])
def test_a_root_within_a_step_is_refused_since_it_would_go_with_that(place: RootPlace, below: str) -> None:
    place.save(1)
    names = directory(place, "step-00000001").names()
    with pytest.raises(InvalidOptionError, match="the root lies in what another root removes") as caught:
        RootPlace(f"{place.root().path_of(1)}/{below}", place.storage_options).root().claim()
    assert caught.value.found == repr(place.root().path_of(1))
    assert directory(place, "step-00000001").names() == names


@pytest.mark.parametrize("name", [".trash-" + "a" * 32, ".tmp-step-00000003-" + "b" * 32, ".epochs"])
@pytest.mark.parametrize("below", ["", "/run"])
def test_a_root_within_what_is_removed_by_its_name_is_refused(place: RootPlace, name: str, below: str) -> None:
    with pytest.raises(InvalidOptionError, match="the root lies in what another root removes"):
        RootPlace(f"{place.path}/{name}{below}", place.storage_options).root().claim()


@pytest.mark.parametrize("name", ["step-00000009", "step-9", ".trash-1", ".tmp-notes-" + "0" * 32])
def test_a_root_within_what_no_root_removes_is_claimed(place: RootPlace, name: str) -> None:
    inner = RootPlace(f"{place.path}/{name}/run", place.storage_options).root()
    assert inner.claim().epoch == 1
    assert inner.claim().epoch == 2


def test_a_root_that_a_link_leads_into_a_step_is_refused(tmp_path: Path) -> None:
    outer = RootPlace(str(tmp_path / "run"))
    outer.save(1)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "step-00000001")
    with pytest.raises(InvalidOptionError, match="the root lies in what another root removes"):
        RunRoot(tmp_path / "link" / "run").claim()


def test_a_checkpoint_of_the_stock_format_is_no_root(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(InvalidOptionError, match="not a root"):
        RunRoot(tmp_path).claim()
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]


def test_a_link_to_nothing_and_a_taken_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InvalidOptionError, match="cannot be a root"):
        RunRoot(tmp_path / "link").claim()
    for name, make in (("a", lambda path: path.write_bytes(b"")), ("b", lambda path: path.symlink_to(tmp_path))):
        (tmp_path / name).mkdir()
        make(tmp_path / name / ".epochs")
        with pytest.raises(InvalidOptionError, match="name of the directory of epochs is taken"):
            RunRoot(tmp_path / name).claim()


def test_a_directory_of_somebody_else_is_refused() -> None:
    with world_readable_directory() as where:
        (where / "run").mkdir(mode=0o755)
        with unprivileged(), pytest.raises(StoragePermissionError):
            RunRoot(where / "run").claim()
        with unprivileged(), pytest.raises(StoragePermissionError):
            RunRoot(where / "run" / "deeper").claim()
        assert list((where / "run").iterdir()) == []


@pytest.mark.parametrize("path", ["", "nosuch://b/run", "s3:/b/run", "s3://", b"a\0b", 7])
def test_what_can_be_no_root_is_refused_when_it_is_named(path: Any) -> None:
    with pytest.raises(InvalidOptionError):
        RunRoot(path)


@pytest.mark.parametrize("step", [-1, 2**63])
def test_what_is_no_step_is_refused(place: RootPlace, step: int) -> None:
    claim = place.root().claim()
    for call in (place.root().path_of, place.root().hold, place.root().set_latest, lambda number: place.root().retire(number, claim)):
        with pytest.raises(InvalidOptionError):
            call(step)
