"""Publishing by one small object: what is accepted and refused, and what a lost reply turns out to have done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from support.checkpoints import FILES, MANIFEST, publish, write_files
from support.fake_storage import FakeFileSystem, PreconditionFailedError, fresh_options
from support.s3 import make_bucket, storage_options
from support.storage_faults import ServerError

from dcp_engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    CommitStateUnknownError,
    ConcurrentCommitError,
    DcpEngineError,
    MissingFileError,
    RankDisagreementError,
    StorageError,
    StoragePermissionError,
    TruncatedFileError,
)
from dcp_engine.storage.backends import requests
from dcp_engine.storage.publish import AttemptRef, Publisher, open_checkpoint, open_publisher


class Place:
    """A target in a storage, and a look at its objects past the code under test."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options
        self.fs, self.key = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)

    def publisher(self, *, overwrite: bool = False) -> Publisher:
        return open_publisher(self.url, storage_options=self.options, overwrite=overwrite)

    def publish(self, **options: Any) -> AttemptRef:
        return publish(self.url, storage_options=self.options, **options)

    def begin(self, *, overwrite: bool = False) -> tuple[Publisher, AttemptRef, list[tuple[str, int]]]:
        publisher = self.publisher(overwrite=overwrite)
        ref = publisher.begin()
        return publisher, ref, write_files(publisher, ref)

    def nonce(self) -> str | None:
        try:
            return open_checkpoint(self.url, storage_options=self.options).marker.nonce
        except CheckpointNotFoundError:
            return None

    def objects(self) -> list[str]:
        self.fs.invalidate_cache()
        return sorted(path.removeprefix(self.key + "/") for path in self.fs.find(self.key))

    def put(self, name: str, content: bytes = b"content") -> None:
        self.fs.pipe_file(f"{self.key}/{name}", content)


@pytest.fixture(params=["memory", "s3"])
def place(request: pytest.FixtureRequest) -> Place:
    name = f"{make_bucket()}/run/step-00000001"
    return Place(f"memory://{name}", {}) if request.param == "memory" else Place(f"s3://{name}", storage_options())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(requests, "_FIRST_WAIT_SECS", 0.0)
    monkeypatch.setattr(FakeFileSystem, "failures", {})
    monkeypatch.setattr(FakeFileSystem, "intercept", None)
    yield Place("fake://run/x", fresh_options())
    FakeFileSystem.empty()


def under(nonce: str) -> list[str]:
    return sorted(f"{nonce}/{name}" for name in [*FILES, "MANIFEST"])


# -- what is published ------------------------------------------------------------------------------------------------


def test_the_marker_names_the_attempt(place: Place) -> None:
    ref = place.publish()

    assert place.objects() == sorted(["COMPLETE", *under(ref.nonce)])
    assert place.fs.cat_file(f"{place.key}/COMPLETE").splitlines()[1:3] == [f"nonce {ref.nonce}".encode(), f"data {ref.nonce}".encode()]
    assert ref.attempt == f"{place.url}/{ref.nonce}"
    opened = open_checkpoint(place.url, storage_options=place.options)
    assert (opened.marker.nonce, opened.manifest_bytes, opened.directory.path) == (ref.nonce, MANIFEST, ref.attempt)


def test_nothing_is_there_before_the_commit(place: Place) -> None:
    publisher, ref, reported = place.begin()
    assert place.nonce() is None
    publisher.commit(ref, MANIFEST, reported)
    assert place.nonce() == ref.nonce


def test_what_failed_attempts_left_does_not_count(place: Place) -> None:
    _, dead, _ = place.begin()
    ref = place.publish()
    assert place.nonce() == ref.nonce
    assert f"{dead.nonce}/model-00000.shard" in place.objects()


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_not_replaced_unasked(place: Place) -> None:
    ref = place.publish()
    with pytest.raises(CheckpointExistsError) as caught:
        place.publisher().begin()
    assert (caught.value.path, caught.value.found) == (place.url, "'COMPLETE'")
    assert place.nonce() == ref.nonce


@pytest.mark.parametrize("overwrite", [False, True])
def test_objects_of_others_are_never_replaced(place: Place, overwrite: bool) -> None:
    place.put("notes")
    place.put("more/notes")
    with pytest.raises(CheckpointExistsError) as caught:
        place.publisher(overwrite=overwrite).begin()
    assert caught.value.found == "'more', 'notes'"
    assert place.objects() == ["more/notes", "notes"]


def test_an_unfinished_copy_is_not_replaced_unasked(place: Place) -> None:
    place.put("model-00000.shard")
    with pytest.raises(CheckpointExistsError) as caught:
        place.publisher().begin()
    assert caught.value.found == "'model-00000.shard'"
    ref = place.publish(overwrite=True)
    assert place.objects() == sorted(["COMPLETE", *under(ref.nonce)])


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_object_of_that_name_is_refused(place: Place, overwrite: bool) -> None:
    place.fs.pipe_file(place.key, b"content")
    with pytest.raises(CheckpointExistsError) as caught:
        place.publisher(overwrite=overwrite).begin()
    assert caught.value.found == "an object"


def test_a_rank_with_another_path_is_told(place: Place) -> None:
    ref = place.publisher().begin()
    with pytest.raises(RankDisagreementError):
        open_publisher(f"{place.url}1", storage_options=place.options).attempt(ref)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda place, nonce: place.fs.rm_file(f"{place.key}/{nonce}/model-00001.shard"), MissingFileError),
        (lambda place, nonce: place.put(f"{nonce}/model-00001.shard", b"other"), TruncatedFileError),
        (lambda place, nonce: place.put(f"{nonce}/model-00002.shard"), CommitError),
    ],
    ids=["missing", "length", "unreported"],
)
def test_an_attempt_that_is_not_what_was_reported_is_not_published(
    place: Place, damage: Callable[[Place, str], None], kind: type[DcpEngineError]
) -> None:
    publisher, ref, reported = place.begin()
    damage(place, ref.nonce)
    with pytest.raises(kind) as caught:
        publisher.commit(ref, MANIFEST, reported)
    assert caught.value.path == ref.attempt
    publisher.abort(ref)
    assert place.objects() == []


def test_abort_removes_its_own_attempt_only(place: Place) -> None:
    publisher, ref, _ = place.begin()
    _, other, _ = place.begin()
    publisher.abort(ref)
    publisher.abort(ref)
    assert place.objects() == sorted(f"{other.nonce}/{name}" for name in FILES)


def test_abort_after_a_commit_changes_nothing(place: Place) -> None:
    publisher, ref, reported = place.begin()
    publisher.commit(ref, MANIFEST, reported)
    publisher.abort(ref)
    assert place.nonce() == ref.nonce
    assert place.objects() == sorted(["COMPLETE", *under(ref.nonce)])


# -- two writers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_first_of_two_writers_wins(place: Place, overwrite: bool) -> None:
    if overwrite:
        place.publish()
    publisher, first, reported = place.begin(overwrite=overwrite)
    _, second, _ = place.begin(overwrite=overwrite)
    publisher.commit(first, MANIFEST, reported)

    with pytest.raises(ConcurrentCommitError):
        publisher.commit(second, MANIFEST, reported)
    publisher.abort(second)
    assert place.nonce() == first.nonce
    assert place.objects() == sorted(["COMPLETE", *under(first.nonce)])


# -- overwriting -------------------------------------------------------------------------------------------------------------------


def test_overwriting_replaces_the_marker_and_removes_the_old_objects(place: Place) -> None:
    old = place.publish()
    publisher, ref, reported = place.begin(overwrite=True)
    assert place.nonce() == old.nonce
    publisher.commit(ref, MANIFEST, reported)

    assert place.nonce() == ref.nonce
    assert place.objects() == sorted(["COMPLETE", *under(ref.nonce)])


def test_overwriting_replaces_a_copy_from_a_file_system(place: Place, tmp_path: Any) -> None:
    publish(tmp_path / "x")
    place.fs.put(f"{tmp_path}/x", place.key, recursive=True)
    ref = place.publish(overwrite=True)
    assert place.objects() == sorted(["COMPLETE", *under(ref.nonce)])


def test_overwriting_replaces_a_damaged_marker(place: Place) -> None:
    place.put("COMPLETE", b"torn")
    ref = place.publish(overwrite=True)
    assert place.nonce() == ref.nonce


# -- replies that get lost -----------------------------------------------------------------------------------------------------------


def _on_marker(monkeypatch: pytest.MonkeyPatch, handle: Callable[[str, Callable[[], Any], int], Any]) -> None:
    """Puts ``handle(call, proceed, number)`` before every call that touches COMPLETE, numbered from 0 per call."""
    numbers: dict[str, int] = {}

    def intercept(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        if not path.endswith("/x/COMPLETE"):
            return proceed()
        numbers[call] = numbers.get(call, -1) + 1
        return handle(call, proceed, numbers[call])

    monkeypatch.setattr(FakeFileSystem, "intercept", staticmethod(intercept))


def test_a_marker_that_arrived_without_a_reply_is_success(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()

    def lose_reply(call: str, proceed: Callable[[], Any], number: int) -> Any:
        result = proceed()
        if call == "create":
            raise TimeoutError("no reply")
        return result

    _on_marker(monkeypatch, lose_reply)
    publisher.commit(ref, MANIFEST, reported)
    assert fake.nonce() == ref.nonce


def test_a_marker_that_did_not_arrive_is_put_again(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()

    def refuse_twice(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call == "create" and number < 2:
            raise OSError(16, "SlowDown")
        return proceed()

    _on_marker(monkeypatch, refuse_twice)
    publisher.commit(ref, MANIFEST, reported)
    assert fake.nonce() == ref.nonce


def test_a_marker_that_arrives_late_is_success(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()
    late: list[Callable[[], Any]] = []

    def delay(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call == "create" and number == 0:
            late.append(proceed)
            raise TimeoutError("no reply")
        if call == "create" and number == 1:
            late.pop()()  # the first request takes effect at last
        return proceed()

    _on_marker(monkeypatch, delay)
    publisher.commit(ref, MANIFEST, reported)
    assert (late, fake.nonce()) == ([], ref.nonce)


def test_a_lost_reply_can_hide_that_another_writer_won(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()
    _, winner, _ = fake.begin()
    publisher.commit(winner, MANIFEST, reported)

    def no_reply(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call == "create":
            raise TimeoutError("no reply")
        return proceed()

    _on_marker(monkeypatch, no_reply)
    with pytest.raises(ConcurrentCommitError):
        publisher.commit(ref, MANIFEST, reported)
    assert fake.nonce() == winner.nonce


@pytest.mark.parametrize("readable", [True, False])
def test_after_an_unknown_outcome_nothing_is_deleted(fake: Place, monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
    publisher, ref, reported = fake.begin()

    def no_reply(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call == "create" or not readable:
            raise TimeoutError("no reply")
        return proceed()

    with monkeypatch.context() as patch:
        _on_marker(patch, no_reply)
        with pytest.raises(CommitStateUnknownError) as caught:
            publisher.commit(ref, MANIFEST, reported)
        publisher.abort(ref)
    assert (caught.value.path, caught.value.file) == (fake.url, "COMPLETE")
    assert fake.objects() == under(ref.nonce)


def test_a_marker_that_may_not_be_put_is_a_plain_failure(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()

    def deny(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call == "create":
            raise PermissionError("AccessDenied")
        return proceed()

    _on_marker(monkeypatch, deny)
    with pytest.raises(StoragePermissionError):
        publisher.commit(ref, MANIFEST, reported)
    publisher.abort(ref)
    assert fake.objects() == []


def test_abort_leaves_an_attempt_that_may_be_published(fake: Place) -> None:
    publisher, ref, _ = fake.begin()
    FakeFileSystem.failures["cat_file"] = TimeoutError("no reply")
    publisher.abort(ref)
    del FakeFileSystem.failures["cat_file"]
    assert fake.objects() == sorted(f"{ref.nonce}/{name}" for name in FILES)


@pytest.mark.parametrize("status", [409, 503])
def test_a_storage_that_is_busy_for_a_while_is_waited_for(fake: Place, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    publisher, ref, reported = fake.begin()

    def busy(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call == "create" and number < 4:
            raise ServerError(status)
        return proceed()

    _on_marker(monkeypatch, busy)
    publisher.commit(ref, MANIFEST, reported)
    assert fake.nonce() == ref.nonce


def test_a_conflict_without_end_is_a_failure_that_leaves_nothing(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()

    def conflict(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call == "create":
            raise ServerError(409)
        return proceed()

    _on_marker(monkeypatch, conflict)
    with pytest.raises(StorageError) as caught:
        publisher.commit(ref, MANIFEST, reported)
    publisher.abort(ref)
    assert type(caught.value) is StorageError
    assert fake.objects() == []


def test_a_refusal_after_silence_does_not_mean_that_nothing_was_published(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()
    late: list[Callable[[], Any]] = []

    def silence_then_denied(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call != "create":
            return proceed()
        if number == 0:
            late.append(proceed)
            raise TimeoutError("no reply")
        raise PermissionError("the token has expired")

    with monkeypatch.context() as patch:
        _on_marker(patch, silence_then_denied)
        with pytest.raises(CommitStateUnknownError):
            publisher.commit(ref, MANIFEST, reported)
        publisher.abort(ref)
        assert fake.nonce() is None
        late.pop()()
    assert fake.nonce() == ref.nonce
    assert fake.objects() == sorted(["COMPLETE", *under(ref.nonce)])


def test_a_replacing_marker_that_comes_late_displaces_nobody(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.publish()
    publisher, ref, reported = fake.begin(overwrite=True)
    late: list[Callable[[], Any]] = []

    def never_now(call: str, proceed: Callable[[], Any], number: int) -> Any:
        if call in ("swap", "pipe_file"):
            late.append(proceed)
            raise TimeoutError("no reply")
        return proceed()

    with monkeypatch.context() as patch:
        _on_marker(patch, never_now)
        with pytest.raises(CommitStateUnknownError):
            publisher.commit(ref, MANIFEST, reported)
    newer = fake.publish(overwrite=True)
    for proceed in late:
        with pytest.raises(PreconditionFailedError):
            proceed()
    assert (len(late), fake.nonce()) == (6, newer.nonce)


def test_a_storage_that_stalls_ends_a_save_in_bounded_time(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.options = {**fake.options, "request_timeout_secs": 0.2}
    publisher, ref, reported = fake.begin()
    release, stalled = threading.Event(), []

    def stall(call: str, proceed: Callable[[], Any], number: int) -> Any:
        stalled.append(call)
        release.wait()
        raise ConnectionResetError("at last")

    with monkeypatch.context() as patch:
        _on_marker(patch, stall)
        with pytest.raises(CommitStateUnknownError) as caught:
            publisher.commit(ref, MANIFEST, reported)
        publisher.abort(ref)
        release.set()
    assert "no answer within 0.2003 s" in str(caught.value.found)
    assert stalled == ["create", "cat_file", "cat_file"]
    assert fake.objects() == under(ref.nonce)


# -- listings that are late ---------------------------------------------------------------------------------------------------------------


def _listing(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    def intercept(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        return [f"{path}/{name}" for name in names] if call == "ls" else proceed()

    monkeypatch.setattr(FakeFileSystem, "intercept", staticmethod(intercept))


def test_what_is_listed_and_not_there_is_not_there(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _listing(patch, ["COMPLETE", "MANIFEST", "notes"])
        ref = fake.publisher().begin()
    assert ref.replaces is None


def test_what_is_there_and_not_listed_is_not_overwritten(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.publish()
    _listing(monkeypatch, [])
    with pytest.raises(CheckpointExistsError) as caught:
        fake.publisher().begin()
    assert caught.value.found == "'COMPLETE'"


def test_abort_removes_what_it_knows_of_without_a_listing(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()
    winner = fake.publish()
    with monkeypatch.context() as patch:
        _listing(patch, [])
        with pytest.raises(ConcurrentCommitError):
            publisher.commit(ref, MANIFEST, reported)
        publisher.abort(ref)
    assert fake.objects() == sorted(["COMPLETE", *under(winner.nonce)])


def test_a_manifest_that_arrived_otherwise_is_not_published(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, ref, reported = fake.begin()

    def garble(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        result = proceed()
        return result[::-1] if call == "cat_file" and path.endswith("MANIFEST") else result

    with monkeypatch.context() as patch:
        patch.setattr(FakeFileSystem, "intercept", staticmethod(garble))
        with pytest.raises(StorageError, match="did not arrive as it was sent") as caught:
            publisher.commit(ref, MANIFEST, reported)
        publisher.abort(ref)
    assert caught.value.file == "MANIFEST"
    assert fake.objects() == []


# -- storages that lack something --------------------------------------------------------------------------------------------------------


def test_a_storage_without_conditional_creation_works_with_a_warning(fake: Place, caplog: pytest.LogCaptureFixture) -> None:
    place = Place("asksfirst://run/x", fresh_options())
    with caplog.at_level(logging.WARNING):
        publisher, ref, reported = place.begin()
        _, second, _ = place.begin()
    publisher.commit(ref, MANIFEST, reported)
    with pytest.raises(ConcurrentCommitError):
        publisher.commit(second, MANIFEST, reported)

    assert "make sure that only one does" in caplog.text
    assert place.nonce() == ref.nonce


def test_a_storage_without_conditional_replacement_overwrites_with_a_warning(fake: Place, caplog: pytest.LogCaptureFixture) -> None:
    place = Place("createsonly://run/x", fresh_options())
    with caplog.at_level(logging.WARNING):
        place.publish()
        assert caplog.text == ""
        ref = place.publish(overwrite=True)

    assert "cannot replace an object only if it still is what it was" in caplog.text
    assert place.nonce() == ref.nonce
    assert place.objects() == sorted(["COMPLETE", *under(ref.nonce)])


def test_a_storage_that_never_deletes_works(fake: Place) -> None:
    FakeFileSystem.failures = {"rm_file": PermissionError("object lock")}
    old = fake.publish()
    ref = fake.publish(overwrite=True)
    assert fake.nonce() == ref.nonce
    assert f"{old.nonce}/model-00000.shard" in fake.objects()


def test_a_storage_that_cannot_be_written_is_told_at_once(fake: Place) -> None:
    FakeFileSystem.failures = {"create": PermissionError("denied"), "pipe_file": PermissionError("denied")}
    with pytest.raises(StoragePermissionError):
        fake.publisher().begin()


# -- a failure at every call ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True], ids=["refused", "applied"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_whichever_call_fails_a_reader_finds_a_whole_checkpoint_or_the_previous_one(fake: Place, overwrite: bool, applied: bool) -> None:
    calls, fails_at = 0, 0

    def fail_once(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 != fails_at:
            return proceed()
        if applied:
            proceed()
        raise OSError(5, "injected")

    while True:
        place = Place(f"fake://run/{fails_at}", fresh_options())
        old = place.publish().nonce if overwrite else None
        place.options = fresh_options()
        publisher = place.publisher(overwrite=overwrite)
        ref: AttemptRef | None = None
        raised: DcpEngineError | None = None
        calls = 0
        FakeFileSystem.intercept = staticmethod(fail_once)
        try:
            ref = publisher.begin()
            publisher.commit(ref, MANIFEST, write_files(publisher, ref))
        except DcpEngineError as error:
            raised = error
        FakeFileSystem.intercept = None

        new = None if ref is None else ref.nonce
        if raised is None:
            assert place.nonce() == new
        else:
            assert isinstance(raised, StorageError | CommitError)
            if ref is not None:
                publisher.abort(ref)
            assert place.nonce() in (old, new)
        assert place.publish(overwrite=True).nonce == place.nonce()
        if calls <= fails_at:
            break
        fails_at += 1
    assert raised is None
    assert fails_at > 15
