"""Notes beside checkpoints: whole or not there, whatever the writer dies of."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from dcp_engine.errors import LimitExceededError, MissingFileError, StorageError, StorageFullError
from dcp_engine.storage.backends import Location, locate
from dcp_engine.storage.backends.calls import SystemCalls, installed
from dcp_engine.storage.entry_names import is_trash
from dcp_engine.storage.notes import add_note, note_names, read_note


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    if request.param == "local":
        yield locate(tmp_path / "run")
        return
    name = f"/notes-{uuid4().hex}"
    yield locate(f"memory:/{name}/run")
    file_system = fsspec.filesystem("memory")
    if file_system.exists(name):
        file_system.rm(name, recursive=True)


def test_notes_come_back_by_name(root: Location) -> None:
    assert note_names(root, "notes") == []
    add_note(root, "notes", "b", b"two")
    add_note(root, "notes", "a", b"")
    assert note_names(root, "notes") == ["a", "b"]
    assert [read_note(root, "notes", name) for name in ("a", "b")] == [b"", b"two"]


def test_what_is_no_note_is_an_error(root: Location) -> None:
    add_note(root, "notes", "long", b"x" * (2**16 + 1))
    with pytest.raises(LimitExceededError):
        read_note(root, "notes", "long")
    with pytest.raises(MissingFileError):
        read_note(root, "notes", "absent")


def test_writers_do_not_meet(root: Location) -> None:
    def write(writer: int) -> None:
        for number in range(5):
            add_note(root, "notes", f"{writer}-{number}", b"%d %d" % (writer, number))

    threads = [Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: read_note(root, "notes", name) for name in note_names(root, "notes")} == {
        f"{writer}-{number}": b"%d %d" % (writer, number) for writer in range(4) for number in range(5)
    }


class Crash(BaseException):
    """The process is gone: nothing that it would still do happens."""


_MUTATING = ("open", "close", "pwritev", "fsync", "mkdir", "unlink", "rename")


class CrashingCalls(SystemCalls):
    """The process dies before its n-th call that changes something."""

    def __init__(self, last: int) -> None:
        self.num_left = last

    def __getattribute__(self, name: str) -> Any:
        call = super().__getattribute__(name)
        if name not in _MUTATING:
            return call

        def counted(*args: Any) -> Any:
            self.num_left -= 1
            if self.num_left < 0:
                raise Crash
            return call(*args)

        return counted


def test_crash_at_any_call_leaves_a_whole_note_or_none(tmp_path: Path) -> None:
    outcomes = []
    for last in range(40):
        place = tmp_path / f"run-{last}"
        place.mkdir()
        root = locate(place)
        add_note(root, "notes", "old", b"old")
        try:
            with installed(CrashingCalls(last)):
                add_note(root, "notes", "new", b"new")
        except Crash:
            done = False
        else:
            done = True
        found = {name: read_note(root, "notes", name) for name in note_names(root, "notes")}
        assert found in ({"old": b"old"}, {"old": b"old", "new": b"new"})
        assert all(is_trash(path.name) for path in place.iterdir() if path.name != "notes")
        outcomes.append((done, "new" in found))
        if done:
            break
    assert outcomes[0] == (False, False)
    assert outcomes[-1] == (True, True)
    assert [done for done, _ in outcomes[:-1]] == [False] * (len(outcomes) - 1)


class FailingCalls(SystemCalls):
    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number

    def fsync(self, fd: int) -> None:
        self._fail("fsync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self._fail("rename")
        super().rename(source, target)

    def _fail(self, name: str) -> None:
        if name == self._name:
            raise OSError(self._number, "failed")


@pytest.mark.parametrize(("call", "number", "kind"), [("fsync", errno.ENOSPC, StorageFullError), ("rename", errno.EIO, StorageError)])
def test_failure_is_a_typed_error_and_leaves_nothing(tmp_path: Path, call: str, number: int, kind: type[StorageError]) -> None:
    root = locate(tmp_path)
    (tmp_path / "notes").mkdir()
    with installed(FailingCalls(call, number)), pytest.raises(kind, match="failed"):
        add_note(root, "notes", "new", b"new")
    assert note_names(root, "notes") == []
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_directory_whose_name_is_taken_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"")
    with pytest.raises(StorageError, match="add a note"):
        add_note(locate(tmp_path), "notes", "new", b"new")
    assert note_names(locate(tmp_path), "notes") == []
