"""A root in an object store: what tombstones stop, what a lost answer has done, what is removed and what never is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.checkpoints import write_files
from support.fake_storage import FakeFileSystem, fresh_options
from support.roots import RootPlace

from dcp_engine.errors import CommitError, ConcurrentCommitError, FencedError, RetiredError, StorageError
from dcp_engine.storage.attempts import read_marker
from dcp_engine.storage.backends import requests, resolve
from dcp_engine.storage.publish import AttemptRef, Publisher, open_checkpoint, open_publisher, require_unchanged
from dcp_engine.storage.tombstones import is_tombstone, parse_tombstone

LOOKS = {"cat_file", "info", "ls", "rm_file"}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[RootPlace]:
    monkeypatch.setattr(FakeFileSystem, "failures", {})
    monkeypatch.setattr(FakeFileSystem, "intercept", None)
    monkeypatch.setattr(requests, "_FIRST_WAIT_SECS", 0.0)
    FakeFileSystem.empty()
    yield RootPlace("fake://bucket/run", fresh_options())
    FakeFileSystem.empty()


def objects() -> list[str]:
    return sorted(path.partition("/run/")[2] for path in FakeFileSystem.store)


def content(name: str) -> bytes:
    data: bytes = next(file for path, file in FakeFileSystem.store.items() if path.endswith(f"/run/{name}")).getvalue()
    return data


def begun(place: RootPlace, step: int, fence: Any = None) -> tuple[Publisher, AttemptRef, list[tuple[str, int]]]:
    publisher = open_publisher(place.root().path_of(step), storage_options=place.storage_options, fence=fence)
    ref = publisher.begin()
    return publisher, ref, write_files(publisher, ref)


def test_a_claim_puts_tombstones_before_attempts_and_nowhere_else(place: RootPlace) -> None:
    old = place.root().claim()
    place.save(1, old)
    attempts = [begun(place, step, old) for step in (2, 2, 3)]
    before = objects()
    place.root().claim()

    assert set(objects()) - set(before) == {".epochs/00000002", "step-00000002/COMPLETE", "step-00000003/COMPLETE"}
    tombstone = parse_tombstone(content("step-00000002/COMPLETE"), path="p")
    assert tombstone.nonces == tuple(sorted(ref.nonce for _, ref, _ in attempts[:2]))
    assert place.loaded(1) == [1, 0]
    for publisher, ref, files in attempts:
        with pytest.raises(FencedError):
            publisher.commit(ref, bytes(64), files)
        publisher.abort(ref)
    assert place.root().steps() == [1]


def test_a_writer_without_a_fence_is_stopped_by_the_tombstone(place: RootPlace) -> None:
    publisher, ref, files = begun(place, 2)
    place.root().claim()
    with pytest.raises(ConcurrentCommitError) as caught:
        publisher.commit(ref, bytes(64), files)
    assert caught.value.found == "retired"


def test_what_is_left_of_revoked_attempts_is_cleaned_and_the_step_can_be_saved(place: RootPlace) -> None:
    begun(place, 2)
    claim = place.root().claim()
    assert place.root().clean(claim) == ("step-00000002",)
    assert objects() == [".epochs/00000001", "step-00000002/COMPLETE"]
    assert place.root().clean(claim) == ()
    place.save(2, claim, writer=4)
    assert place.root().clean(claim) == ()
    assert place.loaded(2) == [2, 4]


def test_a_retired_step_keeps_its_tombstone_alone(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    opened = open_checkpoint(root.path_of(1), storage_options=place.storage_options)
    assert root.prune(1, claim).retired == (1,)
    assert [name for name in objects() if name.startswith("step-00000001/")] == ["step-00000001/COMPLETE"]
    assert parse_tombstone(content("step-00000001/COMPLETE"), path="p").nonces == (opened.marker.nonce,)
    # A reader that had it open learns why it is gone.
    with pytest.raises(RetiredError):
        require_unchanged(root.path_of(1), opened.marker, storage_options=place.storage_options)
    with pytest.raises(RetiredError, match="retired"):
        read_marker(resolve(root.path_of(1), place.storage_options))


def test_data_that_could_not_be_removed_is_removed_later(place: RootPlace, caplog: pytest.LogCaptureFixture) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    FakeFileSystem.failures["rm_file"] = PermissionError("not allowed")
    assert root.prune(1, claim).retired == (1,)
    assert root.steps() == [2]
    assert "could not remove all data" in caplog.text
    assert len([name for name in objects() if name.startswith("step-00000001/")]) > 1
    FakeFileSystem.failures.clear()
    assert root.clean(claim) == ("step-00000001",)
    assert [name for name in objects() if name.startswith("step-00000001/")] == ["step-00000001/COMPLETE"]


@pytest.mark.parametrize("applied", [True, False])
def test_a_claim_whose_answer_was_lost_is_read_back(place: RootPlace, applied: bool) -> None:
    place.root().claim()

    def lose(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        if call == "create" and path.endswith("/.epochs/00000002"):
            if applied:
                proceed()
            raise TimeoutError("no answer")
        return proceed()

    FakeFileSystem.intercept = lose
    if applied:
        assert place.root().claim().epoch == 2
    else:
        with pytest.raises(StorageError):
            place.root().claim()
    FakeFileSystem.intercept = None
    assert place.root().claim().epoch == 3 if applied else 2


def test_two_who_claim_at_once_get_two_epochs(place: RootPlace) -> None:
    other = []

    def meanwhile(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        if call == "create" and path.endswith("/.epochs/00000001") and not other:
            other.append(None)
            other[0] = place.root().claim("other")
        return proceed()

    place.root()
    resolve(place.path + "/.epochs", place.storage_options).creates_conditionally("PROBE")  # type: ignore[attr-defined]
    FakeFileSystem.intercept = meanwhile
    mine = place.root().claim("mine")
    assert (other[0].epoch, mine.epoch) == (1, 2)
    with pytest.raises(FencedError, match="run 'mine'"):
        other[0].check()


def test_a_retirement_whose_answer_was_lost_is_read_back(place: RootPlace) -> None:
    root, claim = place.root(), place.root().claim()
    for step in (1, 2, 3):
        place.save(step, claim)

    def lose(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        if call in LOOKS or not path.endswith("/COMPLETE"):
            return proceed()
        if path.endswith("step-00000001/COMPLETE"):
            proceed()
        raise TimeoutError("no answer")

    FakeFileSystem.intercept = lose
    assert root.prune(2, claim).retired == (1,)
    with pytest.raises(StorageError):
        root.prune(1, claim)
    FakeFileSystem.intercept = None
    assert root.steps() == [2, 3]
    assert place.loaded(2) == [2, 0]


def test_a_store_without_conditions_is_told_of_and_no_attempt_is_touched(
    place: RootPlace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeFileSystem, "ignores_condition", True)
    old = place.root().claim()
    publisher, ref, files = begun(place, 2, old)
    caplog.set_level(logging.WARNING)
    new = place.root().claim()
    assert [old.epoch, new.epoch] == [1, 2]
    assert "cannot create an object only if there is none" in caplog.text
    assert "step-00000002/COMPLETE" not in objects()
    with pytest.raises(FencedError):
        publisher.commit(ref, bytes(64), files)
    assert place.root().steps() == []


def test_a_tombstone_is_not_taken_for_a_checkpoint_of_another_writer(place: RootPlace) -> None:
    claim = place.root().claim()
    for step in (1, 2):
        place.save(step, claim)
    place.root().retire(2, claim)
    late, ref, files = begun(place, 2, claim)
    place.save(2, claim, writer=5)
    with pytest.raises(CommitError):
        late.commit(ref, bytes(64), files)
    assert place.loaded(2) == [2, 5]
    assert not is_tombstone(content("step-00000002/COMPLETE"))
