"""The object-store part of the fault campaign in its quick size, and that it notices a protocol that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from faults.campaign import object_store
from faults.campaign.object_store import Point, impatient, try_point
from support.storage_faults import LASTS

from dcp_engine.errors import StorageError
from dcp_engine.storage import publish_remote
from dcp_engine.storage.backends.answers import Answer
from dcp_engine.storage.backends.remote import RemoteDirectory
from dcp_engine.storage.publish_remote import RemotePublisher


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_fault_of_an_object_store_breaks_a_promise() -> None:
    outcome = object_store.run(full=False, seed=20261129)
    assert outcome.bad == ()
    assert outcome.facts["in the process"] >= 4000
    assert outcome.facts["through sockets"] >= 6


def _forgets_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: RemotePublisher, ref: Any, original: Callable[..., None] = RemotePublisher.abort) -> None:
        self._uncertain.clear()
        original(self, ref)

    commit = RemotePublisher.commit

    def commit_or_clean(self: RemotePublisher, ref: Any, manifest: bytes, files: Any) -> None:
        try:
            commit(self, ref, manifest, files)
        except BaseException:
            forget(self, ref)
            raise

    monkeypatch.setattr(RemotePublisher, "commit", commit_or_clean)


def _overwrites_without_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteDirectory, "swaps", lambda self, probe: False)


def _believes_that_absent_means_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    put_once = RemoteDirectory.put_once

    def definite(self: RemoteDirectory, name: str, data: bytes, **condition: Any) -> tuple[Answer, StorageError | None]:
        answer, failure = put_once(self, name, data, **condition)
        return (Answer.BUSY if answer is Answer.UNKNOWN else answer), failure

    monkeypatch.setattr(RemoteDirectory, "put_once", definite)


def _believes_that_a_put_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(self: RemotePublisher, directory: RemoteDirectory, ref: Any, marker: bytes, condition: Any) -> None:
        directory.put_once("COMPLETE", marker, create=condition.create, over=condition.over)

    monkeypatch.setattr(RemotePublisher, "_publish", believe)


def _removes_what_is_replaced_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = RemotePublisher._publish

    def remove_first(self: RemotePublisher, directory: RemoteDirectory, ref: Any, marker: bytes, condition: Any) -> None:
        if ref.replaces is not None:
            old = directory.child(ref.replaces)
            publish_remote._remove_replaced([(old, name) for name in old.names()])
        publish(self, directory, ref, marker, condition)

    monkeypatch.setattr(RemotePublisher, "_publish", remove_first)


def _creates_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    put_once = RemoteDirectory.put_once
    monkeypatch.setattr(RemoteDirectory, "put_once", lambda self, name, data, **_: put_once(self, name, data))
    monkeypatch.setattr(RemoteDirectory, "creates_conditionally", lambda self, probe: True)


@pytest.mark.parametrize(
    ("plant", "scenario", "fault", "settles_last"),
    [
        (_forgets_that_it_does_not_know, "save", "late", False),
        (_overwrites_without_a_condition, "overwrite", "late", True),
        (_overwrites_without_a_condition, "retire", "late", True),
        (_believes_that_absent_means_failed, "save", "late", False),
        (_believes_that_a_put_has_arrived, "save", "503", False),
        (_removes_what_is_replaced_too_early, "overwrite", "dropped", False),
        (_creates_whatever_is_there, "rival", "503", False),
    ],
)
def test_a_planted_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], scenario: str, fault: str, settles_last: bool
) -> None:
    with impatient():
        num_requests = len(object_store.dry_run("fake", scenario))
        plant(monkeypatch)
        found = [
            text
            for at in range(num_requests)
            for lasts in LASTS
            for text in try_point(Point(scheme="fake", scenario=scenario, fault=fault, at=at, lasts=lasts, settles_last=settles_last))[1]
        ]
    assert found
