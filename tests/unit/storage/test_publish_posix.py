"""Publishing by rename: what is accepted and refused, what survives each failure, what a rename that reported an error has done."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.checkpoints import FILES, MANIFEST, publish, unprivileged, world_readable_directory, write_files

from dcp_engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    CommitStateUnknownError,
    ConcurrentCommitError,
    DcpEngineError,
    InvalidOptionError,
    MissingFileError,
    RankDisagreementError,
    StorageError,
    StoragePermissionError,
    TruncatedFileError,
)
from dcp_engine.storage import posix_target, publish_posix
from dcp_engine.storage.backends import linux
from dcp_engine.storage.publish import AttemptRef, Publisher, open_checkpoint, open_publisher


def files_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in os.listdir(path)}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "run" / "step-00000100"


# -- what is published ------------------------------------------------------------------------------------------------


def test_a_published_checkpoint_holds_its_files_and_nothing_else(target: Path) -> None:
    ref = publish(target)

    found = files_of(target)
    marker = found.pop("COMPLETE")
    assert found == {**FILES, "MANIFEST": MANIFEST}
    assert marker.splitlines()[:4] == [b"dcp-engine checkpoint 1", f"nonce {ref.nonce}".encode(), b"data .", b"manifest-bytes 256"]
    assert os.listdir(target.parent) == ["step-00000100"]
    opened = open_checkpoint(target)
    assert (opened.marker.nonce, opened.manifest_bytes, opened.directory.path) == (ref.nonce, MANIFEST, str(target))


def test_nothing_has_the_name_before_the_commit(target: Path) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    reported = write_files(publisher, ref)

    assert os.listdir(target.parent) == [f".tmp-step-00000100-{ref.nonce}"]
    assert len(ref.nonce) == 32
    publisher.commit(ref, MANIFEST, reported)
    assert os.listdir(target.parent) == ["step-00000100"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775)])
def test_modes_are_those_of_the_umask(target: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        publish(target)
    finally:
        os.umask(before)

    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert stat.S_IMODE(target.parent.stat().st_mode) == mode
    assert {stat.S_IMODE((target / name).stat().st_mode) for name in os.listdir(target)} == {0o666 & ~umask}


def test_missing_parents_are_created_and_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    ref = publish(tmp_path / "a" / "b" / "c")

    attempt = f"{tmp_path}/a/b/.tmp-c-{ref.nonce}"
    assert flushed[:3] == [str(tmp_path), f"{tmp_path}/a", f"{tmp_path}/a/b"]
    assert flushed[3:-1] == [f"{attempt}/{name}" for name in FILES] + [
        attempt,
        f"{attempt}/MANIFEST",
        attempt,
        f"{attempt}/COMPLETE",
        attempt,
    ]
    assert flushed[-1] == f"{tmp_path}/a/b"


@pytest.mark.parametrize("name", ["x", ".hidden", "ü ' \" $(x) *", "-rf", "step-7.tmp", "a\nb", "\udcff", "n" * 255, "ü" * 127, "COMPLETE"])
def test_any_name_will_do(tmp_path: Path, name: str) -> None:
    publisher = open_publisher(tmp_path / name)
    ref = publisher.begin()
    assert Path(ref.attempt).parent == tmp_path
    assert Path(ref.attempt).name.startswith(".tmp-")
    publisher.commit(ref, MANIFEST, write_files(publisher, ref))

    assert os.listdir(tmp_path) == [name]
    assert open_checkpoint(tmp_path / name).marker.nonce == ref.nonce


def test_paths_are_given_in_any_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish("relative")
    publish(f"{tmp_path}/slash/")
    publish(f"file://{tmp_path}/url")
    publisher = open_publisher("before")
    monkeypatch.chdir("/")
    publisher.commit(ref := publisher.begin(), MANIFEST, write_files(publisher, ref))

    assert sorted(os.listdir(tmp_path)) == ["before", "relative", "slash", "url"]


def test_an_existing_empty_directory_is_accepted(target: Path) -> None:
    target.mkdir(parents=True)
    assert open_checkpoint(target.parent / publish(target).target).manifest_bytes == MANIFEST


def test_a_copy_is_a_checkpoint(target: Path, tmp_path: Path) -> None:
    ref = publish(target)
    shutil.copytree(target, tmp_path / "copy")
    assert open_checkpoint(tmp_path / "copy").marker.nonce == ref.nonce


def test_publishers_and_attempts_cross_processes(target: Path) -> None:
    publisher: Publisher = pickle.loads(pickle.dumps(open_publisher(target)))
    ref: AttemptRef = pickle.loads(pickle.dumps(publisher.begin()))
    other: Publisher = pickle.loads(pickle.dumps(publisher))
    other.commit(ref, MANIFEST, write_files(other, ref))
    assert open_checkpoint(target).marker.nonce == ref.nonce


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_not_replaced_unasked(target: Path) -> None:
    ref = publish(target)
    with pytest.raises(CheckpointExistsError) as caught:
        open_publisher(target).begin()

    assert caught.value.path == str(target)
    assert "'COMPLETE', 'MANIFEST'" in str(caught.value.found)
    assert "overwrite=True" in str(caught.value.remedy)
    assert open_checkpoint(target).marker.nonce == ref.nonce


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", ".metadata", "model.shard", "step-00000001", "model-00000.shard.bak"])
def test_files_of_others_are_never_replaced(target: Path, name: str, overwrite: bool) -> None:
    publish(target)
    (target / name).touch()
    with pytest.raises(CheckpointExistsError) as caught:
        open_publisher(target, overwrite=overwrite).begin()
    assert caught.value.found == repr(name)
    assert (target / name).exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_or_a_directory_under_a_name_of_ours_is_a_strangers(target: Path, overwrite: bool) -> None:
    target.mkdir(parents=True)
    (target / "model-00000.shard").symlink_to("/etc/passwd")
    (target / "MANIFEST").mkdir()
    with pytest.raises(CheckpointExistsError) as caught:
        open_publisher(target, overwrite=overwrite).begin()
    assert caught.value.found == "'MANIFEST', 'model-00000.shard'"


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_and_links_at_the_target_are_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name, found in {"file": "a file", "link": "a symbolic link", "dangling": "a symbolic link"}.items():
        with pytest.raises(CheckpointExistsError) as caught:
            open_publisher(tmp_path / name, overwrite=overwrite).begin()
        assert caught.value.found == found
    assert sorted(os.listdir(tmp_path)) == ["dangling", "empty", "file", "link"]


def test_mount_points_and_roots_are_refused() -> None:
    for path in ("/proc", "/"):
        with pytest.raises(InvalidOptionError) as caught:
            open_publisher(path).begin()
        assert caught.value.path == path


def test_a_bind_mount_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target.mkdir(parents=True)
    monkeypatch.setattr(posix_target, "is_mount_point", lambda path: path == str(target))
    with pytest.raises(InvalidOptionError, match="mount point"):
        open_publisher(target).begin()


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="too long"):
        open_publisher(tmp_path / ("n" * 256)).begin()
    with pytest.raises(StorageError) as caught:
        open_publisher(tmp_path / "/".join(["n" * 250] * 20)).begin()
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_parent_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        open_publisher(tmp_path / "file" / "a" / "b").begin()
    assert caught.value.errno == errno.ENOTDIR


def test_an_unwritable_parent_is_told() -> None:
    with world_readable_directory() as place:
        with unprivileged():
            for path in (place / "x", place / "new" / "x"):
                with pytest.raises(StoragePermissionError) as caught:
                    open_publisher(path).begin()
                assert caught.value.errno == errno.EACCES
                assert str(caught.value.path).startswith(str(place))
        assert os.listdir(place) == []


def test_a_rank_with_another_path_is_told(target: Path) -> None:
    ref = open_publisher(target).begin()
    with pytest.raises(RankDisagreementError) as caught:
        open_publisher(f"{target}1").attempt(ref)
    assert (caught.value.expected, caught.value.found) == (repr(str(target)), repr(f"{target}1"))


def test_a_rank_on_another_file_system_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_posix, "_VISIBILITY_SECS", 0.0)
    publisher = open_publisher(target)
    ref = publisher.begin()
    os.rmdir(ref.attempt)
    with pytest.raises(RankDisagreementError, match="does not see the directory") as caught:
        publisher.attempt(ref)
    assert "host" in str(caught.value.found)


def test_a_directory_that_cannot_be_looked_at_is_told_with_the_reason(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_posix, "_VISIBILITY_SECS", 0.0)
    publisher = open_publisher(target)
    ref = publisher.begin()

    def stale(path: str) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch, pytest.raises(StorageError) as caught:
        patch.setattr(os, "stat", stale)
        publisher.attempt(ref)
    assert (caught.value.errno, caught.value.path) == (errno.ESTALE, ref.attempt)


def test_a_directory_that_shows_late_is_waited_for(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    os.rmdir(ref.attempt)
    monkeypatch.setattr(publish_posix.time, "sleep", lambda secs: os.mkdir(ref.attempt))
    assert publisher.attempt(ref).names() == []


# -- the attempt must hold what was reported -----------------------------------------------------------------------------------


def _remove(attempt: Path) -> None:
    (attempt / "model-00001.shard").unlink()


def _shorten(attempt: Path) -> None:
    os.truncate(attempt / "model-00001.shard", 3)


def _lengthen(attempt: Path) -> None:
    os.truncate(attempt / "model-00001.shard", 300)


def _link(attempt: Path) -> None:
    (attempt / "model-00001.shard").unlink()
    (attempt / "model-00001.shard").symlink_to("model-00000.shard")


def _add(attempt: Path) -> None:
    (attempt / "model-00002.shard").touch()


def _vanish(attempt: Path) -> None:
    shutil.rmtree(attempt)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (_remove, MissingFileError),
        (_shorten, TruncatedFileError),
        (_lengthen, TruncatedFileError),
        (_link, MissingFileError),
        (_add, CommitError),
        (_vanish, MissingFileError),
    ],
)
def test_an_attempt_that_is_not_what_was_reported_is_not_published(
    target: Path, damage: Callable[[Path], None], kind: type[DcpEngineError]
) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    damage(Path(ref.attempt))

    with pytest.raises(kind) as caught:
        publisher.commit(ref, MANIFEST, reported)
    assert caught.value.path == ref.attempt
    publisher.abort(ref)
    assert os.listdir(target.parent) == []


def test_abort_removes_its_own_attempt_only(target: Path) -> None:
    publisher = open_publisher(target)
    one, other = publisher.begin(), publisher.begin()
    write_files(publisher, one)
    publisher.abort(one)
    publisher.abort(one)

    assert os.listdir(target.parent) == [Path(other.attempt).name]


def test_abort_after_a_commit_changes_nothing(target: Path) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    publisher.commit(ref, MANIFEST, write_files(publisher, ref))
    publisher.abort(ref)
    assert open_checkpoint(target).marker.nonce == ref.nonce


# -- two writers --------------------------------------------------------------------------------------------------------------


def test_the_first_of_two_writers_wins(target: Path) -> None:
    publisher = open_publisher(target)
    first, second = publisher.begin(), publisher.begin()
    reported = write_files(publisher, first)
    write_files(publisher, second)
    publisher.commit(first, MANIFEST, reported)

    with pytest.raises(ConcurrentCommitError) as caught:
        publisher.commit(second, MANIFEST, reported)
    assert (caught.value.expected, caught.value.found) == (second.nonce, first.nonce)
    publisher.abort(second)
    assert open_checkpoint(target).marker.nonce == first.nonce
    assert os.listdir(target.parent) == [target.name]


def test_of_two_writers_that_replace_one_checkpoint_the_first_wins(target: Path) -> None:
    publish(target)
    publisher = open_publisher(target, overwrite=True)
    first, second = publisher.begin(), publisher.begin()
    reported = write_files(publisher, first)
    write_files(publisher, second)
    publisher.commit(first, MANIFEST, reported)

    with pytest.raises(ConcurrentCommitError):
        publisher.commit(second, MANIFEST, reported)
    assert open_checkpoint(target).marker.nonce == first.nonce


@pytest.mark.parametrize("took_effect", [False, True])
def test_an_interrupted_exchange_is_repeated_unless_it_took_effect(
    took_effect: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Done twice, it would put the old checkpoint back."""
    publish(target)
    exchange, calls = linux.exchange, list[str]()

    def interrupted(one: str, other: str) -> bool:
        calls.append(one)
        if len(calls) > 1 or took_effect:
            exchange(one, other)
        if len(calls) == 1:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return True

    monkeypatch.setattr(linux, "exchange", interrupted)
    ref = publish(target, overwrite=True)
    assert open_checkpoint(target).marker.nonce == ref.nonce
    assert len(calls) == (1 if took_effect else 2)
    assert os.listdir(target.parent) == [target.name]


def test_a_checkpoint_that_came_between_look_and_exchange_is_put_back(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(target, manifest=b"o" * 64)
    publisher = open_publisher(target, overwrite=True)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    exchange = linux.exchange
    other: list[AttemptRef] = []

    def late(one: str, two: str) -> bool:
        monkeypatch.setattr(linux, "exchange", exchange)
        other.append(publish(target, overwrite=True))
        return exchange(one, two)

    monkeypatch.setattr(linux, "exchange", late)
    with pytest.raises(ConcurrentCommitError) as caught:
        publisher.commit(ref, MANIFEST, reported)
    publisher.abort(ref)
    assert caught.value.found == other[0].nonce
    assert open_checkpoint(target).marker.nonce == other[0].nonce
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("stranger", ["file", "directory", "link"])
def test_what_came_to_lie_there_meanwhile_stays(target: Path, stranger: str) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    if stranger == "file":
        target.write_text("notes")
    elif stranger == "link":
        target.symlink_to(target.parent)
    else:
        target.mkdir()
        (target / "notes").touch()

    with pytest.raises(CheckpointExistsError, match="came to lie") as caught:
        publisher.commit(ref, MANIFEST, reported)
    assert caught.value.found == {"file": "a file", "directory": "'notes'", "link": "a symbolic link"}[stranger]
    assert os.path.lexists(target)
    publisher.abort(ref)
    assert os.listdir(target.parent) == [target.name]


# -- renames that report an error ------------------------------------------------------------------------------------------------


def _rename_then_fail(code: int) -> Callable[[str, str], NoReturn]:
    rename = os.rename

    def call(source: str, destination: str) -> NoReturn:
        rename(source, destination)
        raise OSError(code, os.strerror(code))

    return call


def _fail(code: int) -> Callable[[str, str], NoReturn]:
    def call(source: str, destination: str) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.ETIMEDOUT, errno.ENOTEMPTY])
def test_a_rename_that_took_effect_all_the_same_is_success(target: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _rename_then_fail(code))
        publisher.commit(ref, MANIFEST, reported)
    assert open_checkpoint(target).marker.nonce == ref.nonce


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_after_an_unknown_outcome_nothing_is_deleted(target: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _fail(code))
        with pytest.raises(CommitStateUnknownError) as caught:
            publisher.commit(ref, MANIFEST, reported)
    publisher.abort(ref)

    assert caught.value.path == str(target)
    assert files_of(Path(ref.attempt)).keys() == {*FILES, "MANIFEST", "COMPLETE"}


@pytest.mark.parametrize(("code", "kind"), [(errno.EACCES, StoragePermissionError), (errno.EBUSY, StorageError)])
def test_a_rename_that_was_refused_is_a_plain_failure(
    target: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StorageError]
) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _fail(code))
        with pytest.raises(kind) as caught:
            publisher.commit(ref, MANIFEST, reported)
    assert caught.value.errno == code
    publisher.abort(ref)
    assert os.listdir(target.parent) == []


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_commit_that_fails_leaves_no_descriptor_open(target: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    publisher = open_publisher(target)
    ref = publisher.begin()
    reported = write_files(publisher, ref)

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StorageError) as caught:
            publisher.commit(ref, MANIFEST, reported)
    assert (caught.value.errno, caught.value.file) == (errno.EIO, "MANIFEST")
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(str(target.parent))] == []
    assert sorted(os.listdir(ref.attempt)) == sorted(FILES)


def test_a_target_that_cannot_be_looked_into_is_told() -> None:
    with world_readable_directory() as place:
        inner = place / "x" / ("0" * 32)
        inner.mkdir(parents=True)
        inner.chmod(0)
        place.chmod(0o777)
        with unprivileged(), pytest.raises(StoragePermissionError) as caught:
            open_publisher(place / "x", overwrite=True).begin()
    assert caught.value.path == str(place / "x")


# -- overwriting -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(linux, "exchange", lambda one, other: False)
    return bool(request.param)


def test_overwriting_replaces_a_checkpoint_and_removes_the_old_one(target: Path, swaps: bool) -> None:
    publish(target, manifest=b"o" * 64)
    ref = publish(target, overwrite=True)

    assert open_checkpoint(target).marker.nonce == ref.nonce
    assert os.listdir(target.parent) == [target.name]


def test_overwriting_nothing_is_publishing(target: Path) -> None:
    ref = publish(target, overwrite=True)
    assert open_checkpoint(target).marker.nonce == ref.nonce


@pytest.mark.parametrize("damage", ["no marker", "torn marker"])
def test_overwriting_replaces_a_damaged_checkpoint(target: Path, swaps: bool, damage: str) -> None:
    publish(target)
    if damage == "no marker":
        (target / "COMPLETE").unlink()
    else:
        (target / "COMPLETE").write_bytes(b"dcp-engine")
    ref = publish(target, overwrite=True)
    assert open_checkpoint(target).marker.nonce == ref.nonce
    assert os.listdir(target.parent) == [target.name]


def test_the_old_checkpoint_is_there_until_the_new_one_is_complete(target: Path) -> None:
    old = publish(target)
    publisher = open_publisher(target, overwrite=True)
    ref = publisher.begin()
    write_files(publisher, ref)
    assert open_checkpoint(target).marker.nonce == old.nonce
    publisher.abort(ref)
    assert open_checkpoint(target).marker.nonce == old.nonce
    assert os.listdir(target.parent) == [target.name]


def test_the_old_checkpoint_is_put_back_when_the_new_one_cannot_take_its_place(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = publish(target)
    publisher = open_publisher(target, overwrite=True)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    rename = os.rename

    def refuse_attempt(source: str, destination: str) -> None:
        if source == ref.attempt:
            raise OSError(errno.EACCES, "denied")
        rename(source, destination)

    monkeypatch.setattr(linux, "exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", refuse_attempt)
    with pytest.raises(StoragePermissionError):
        publisher.commit(ref, MANIFEST, reported)
    publisher.abort(ref)

    assert open_checkpoint(target).marker.nonce == old.nonce
    assert os.listdir(target.parent) == [target.name]


def test_the_old_checkpoint_has_a_durable_name_before_the_new_one_is_renamed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(target)
    publisher = open_publisher(target, overwrite=True)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    done: list[str] = []
    rename, fsync = os.rename, os.fsync

    def note_rename(source: str, destination: str) -> None:
        rename(source, destination)
        done.append("set aside" if source == str(target) else "published")

    def note_flush(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == os.path.realpath(target.parent):
            done.append("parent flushed")
        fsync(fd)

    monkeypatch.setattr(linux, "exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(os, "fsync", note_flush)
    publisher.commit(ref, MANIFEST, reported)
    assert done == ["set aside", "parent flushed", "published", "parent flushed"]


def test_when_the_old_checkpoint_cannot_be_put_back_both_are_kept_and_named(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(target)
    publisher = open_publisher(target, overwrite=True)
    ref = publisher.begin()
    reported = write_files(publisher, ref)
    rename = os.rename

    def only_retire(source: str, destination: str) -> None:
        if source != str(target):
            raise OSError(errno.EACCES, "denied")
        rename(source, destination)

    monkeypatch.setattr(linux, "exchange", lambda one, other: False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", only_retire)
        with pytest.raises(CommitStateUnknownError) as caught:
            publisher.commit(ref, MANIFEST, reported)
    publisher.abort(ref)

    kept = sorted(os.listdir(target.parent))
    assert [name[:5] for name in kept] == [".tmp-", ".tras"]
    assert all(name in str(caught.value.remedy) for name in kept)
    assert files_of(target.parent / kept[1]).keys() == files_of(target.parent / kept[0]).keys()


# -- a failure at every call ----------------------------------------------------------------------------------------------------------


class _Crash(BaseException):
    """The process ends here: nobody cleans up."""


def _failing_at(patch: pytest.MonkeyPatch, number: int, error: BaseException, *, applied: bool) -> Iterator[int]:
    """Makes the ``number``-th system call that changes or flushes anything fail, with or without taking effect; yields the calls made."""
    count = 0

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 != number:
                return call(*args, **options)
            if applied or name == "close":  # a descriptor is gone, whatever close reports
                result = call(*args, **options)
                if name == "open":
                    os_close(result)
            raise error

        return counted

    os_close = os.close
    for name in ("mkdir", "open", "pwritev", "fsync", "close", "rename"):
        patch.setattr(os, name, wrap(name, getattr(os, name)))
    patch.setattr(linux, "exchange", wrap("exchange", linux.exchange))
    while True:
        yield count


@pytest.mark.parametrize("applied", [False, True], ids=["refused", "applied"])
@pytest.mark.parametrize("crash", [False, True], ids=["error", "crash"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_whichever_call_fails_a_reader_finds_a_whole_checkpoint_or_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool, overwrite: bool, crash: bool, applied: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of saves: only that and when it is called matters here
    number = 0
    while True:
        target = tmp_path / str(number) / "x"
        old = publish(target, manifest=b"o" * 64).nonce if overwrite else None
        publisher = open_publisher(target, overwrite=overwrite)
        refs: list[AttemptRef] = []
        raised: BaseException | None = None
        with pytest.MonkeyPatch.context() as patch:
            error = _Crash() if crash else OSError(errno.EIO, "injected")
            calls = _failing_at(patch, number, error, applied=applied)
            next(calls)
            try:
                refs.append(publisher.begin())
                publisher.commit(refs[0], MANIFEST, write_files(publisher, refs[0]))
            except (DcpEngineError, _Crash) as caught:
                raised = caught
            num_calls = next(calls)
        if isinstance(raised, DcpEngineError) and refs:
            publisher.abort(refs[0])

        new = refs[0].nonce if refs else None
        try:
            found = open_checkpoint(target).marker.nonce
        except CheckpointNotFoundError:
            found = None
        if raised is None:
            assert found == new
        elif overwrite and not swaps and found is None:
            # Without an exchange there is a moment between two renames: the old one is kept whole beside the target.
            assert any(open_checkpoint(place).marker.nonce == old for place in target.parent.glob(".trash-*"))
        else:
            assert found in (old, new)
        # The next save works, whatever was left behind.
        assert open_checkpoint(publish(target, overwrite=True).target).manifest_bytes == MANIFEST
        if num_calls <= number:
            break
        number += 1
    assert raised is None
    assert number > 20
