"""Remote storages: spooling, failing drivers, drivers that promise less than they seem to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.fake_storage import FakeFileSystem, fresh_options

from dcp_engine.errors import InvalidOptionError, MissingFileError, StorageError, StorageFullError, StoragePermissionError
from dcp_engine.storage.backends import spool
from dcp_engine.storage.backends.remote import RemoteDirectory


def fresh(url: str) -> RemoteDirectory:
    return RemoteDirectory.at(url, fresh_options())


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteDirectory]:
    monkeypatch.setattr(FakeFileSystem, "failures", {})
    yield fresh("fake://run/7")
    FakeFileSystem.empty()


def test_small_objects_are_put_from_memory_and_large_ones_from_disk(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "IN_MEMORY_BYTES", 10)
    FakeFileSystem.failures["put_file"] = AssertionError("a small object went through the disk")
    small = directory.create("small")
    small.write([b"12345", b"67890"])
    small.commit()
    FakeFileSystem.failures = {"pipe_file": AssertionError("a large object went through memory")}
    large = directory.create("large")
    large.write([b"12345", b"67890"])
    large.write([b"!"])
    large.write([b"tail"])
    large.commit()

    assert directory.read_small("small", 99) == b"1234567890"
    assert directory.read_small("large", 99) == b"1234567890!tail"


def test_the_spool_leaves_no_name_behind(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spool, "IN_MEMORY_BYTES", 10)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = directory.create("x")
    file.write([bytes(100)])
    assert list(tmp_path.iterdir()) == []
    file.abort()


def test_a_full_spool_names_the_local_directory(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool, "IN_MEMORY_BYTES", 10)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    file = directory.create("x")
    with pytest.raises(StorageFullError) as caught:
        file.write([bytes(100)])
    assert caught.value.path == str(tmp_path)
    assert "TMPDIR" in str(caught.value.remedy)
    with pytest.raises(StorageError, match="failed before"):
        file.commit()
    assert directory.names() == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(13, "AccessDenied"), StoragePermissionError),
        (PermissionError("AccessDenied"), StoragePermissionError),
        (OSError(122, "quota"), StorageFullError),
        (TimeoutError("slow"), StorageError),
        (KeyError("a driver's own type"), StorageError),
    ],
)
def test_errors_of_a_driver_are_translated(directory: RemoteDirectory, error: Exception, kind: type[StorageError]) -> None:
    def send() -> None:
        file = directory.create("new")
        file.write([b"1"])
        file.commit()

    directory.replace("there", b"12345")
    reader = directory.open("there")
    calls = {
        "pipe_file": send,
        "ls": directory.names,
        "info": lambda: directory.open("there"),
        "cat_file": lambda: reader.read_into(0, [memoryview(bytearray(5))]),
        "create": lambda: directory.create_only("new", b"1"),
    }
    for name, call in calls.items():
        FakeFileSystem.failures = {name: error}
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind
        assert type(error).__name__ in str(caught.value.found)
        assert caught.value.__cause__ is error


def test_an_object_that_went_away_while_open_is_named(directory: RemoteDirectory) -> None:
    directory.replace("x", b"12345")
    file = directory.open("x")
    directory.remove("x")
    directory.remove("x")
    with pytest.raises(MissingFileError) as caught:
        file.read_into(0, [memoryview(bytearray(5))])
    assert caught.value.file == "x"


def test_an_object_that_did_not_arrive_whole_is_told(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MemoryFileSystem.pipe_file
    monkeypatch.setattr(FakeFileSystem, "pipe_file", lambda self, path, value, **options: whole(self, path, value[:-1]))
    file = directory.create("x")
    file.write([b"12345"])
    with pytest.raises(StorageError, match="did not arrive whole") as caught:
        file.commit()
    assert (caught.value.expected, caught.value.found) == ("5 bytes", "4 bytes")


def test_conditional_creation_is_found_out_by_trying(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert directory.creates_conditionally("PROBE")
    assert directory.names() == []
    monkeypatch.setattr(FakeFileSystem, "ignores_condition", True)
    assert not fresh("fake://run/7").creates_conditionally("PROBE")


def test_a_driver_that_refuses_the_condition_does_not_have_it(directory: RemoteDirectory) -> None:
    FakeFileSystem.failures["create"] = TypeError("unexpected keyword argument 'mode'")
    assert not directory.creates_conditionally("PROBE")
    assert directory.names() == []


def test_a_driver_that_asks_first_does_not_create_conditionally() -> None:
    assert not fresh("asksfirst://run/7").creates_conditionally("PROBE")


def test_the_probe_is_made_once_a_storage(directory: RemoteDirectory) -> None:
    assert directory.creates_conditionally("PROBE")
    FakeFileSystem.failures = {"create": AssertionError("probed again"), "pipe_file": AssertionError("probed again")}
    assert directory.child("elsewhere").creates_conditionally("PROBE")


def test_a_storage_that_cannot_be_written_fails_the_probe(directory: RemoteDirectory) -> None:
    FakeFileSystem.failures = {"create": PermissionError("denied"), "pipe_file": PermissionError("denied")}
    with pytest.raises(StoragePermissionError):
        directory.creates_conditionally("PROBE")
    FakeFileSystem.failures = {}
    assert directory.creates_conditionally("PROBE")


@pytest.mark.parametrize("url", ["nonsense://bucket/x", "oss://bucket/x"])
def test_a_url_without_a_driver_is_refused(url: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        RemoteDirectory.at(url)
    assert caught.value.path == url
