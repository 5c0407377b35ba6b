"""Remote storages: spooling, failing drivers, drivers that promise less than they seem to."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.fake_storage import FakeFileSystem, fresh_options
from support.storage_faults import FAULTS, StorageFaults

from dcp_engine.errors import InvalidOptionError, MissingFileError, StorageError, StorageFullError, StoragePermissionError
from dcp_engine.storage.backends import requests, spool
from dcp_engine.storage.backends.remote import RemoteDirectory


def fresh(url: str) -> RemoteDirectory:
    return RemoteDirectory.at(url, fresh_options())


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteDirectory]:
    monkeypatch.setattr(FakeFileSystem, "failures", {})
    monkeypatch.setattr(FakeFileSystem, "intercept", None)
    monkeypatch.setattr(requests, "_FIRST_WAIT_SECS", 0.0)
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


@pytest.mark.parametrize("failing", ["create", "cat_file"])
def test_no_answer_to_the_probe_decides_nothing(directory: RemoteDirectory, failing: str) -> None:
    FakeFileSystem.failures = {failing: ConnectionResetError("no answer")}
    with pytest.raises(StorageError):
        directory.creates_conditionally("PROBE")
    FakeFileSystem.failures = {}
    assert directory.creates_conditionally("PROBE")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "stall" not in fault and fault != "412"])
def test_one_failure_does_not_make_the_probe_wrong(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    for ignores in (False, True):
        monkeypatch.setattr(FakeFileSystem, "ignores_condition", ignores)
        for at in range(12):
            for probe in (RemoteDirectory.creates_conditionally, RemoteDirectory.swaps):
                monkeypatch.setattr(FakeFileSystem, "intercept", StorageFaults(fault, at))
                assert probe(fresh("fake://run/7"), f"PROBE{at}") is not ignores


def test_buckets_of_one_driver_are_probed_each(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    options = fresh_options()
    assert RemoteDirectory.at("fake://first/7", options).creates_conditionally("PROBE")
    monkeypatch.setattr(FakeFileSystem, "ignores_condition", True)
    assert not RemoteDirectory.at("fake://second/7", options).creates_conditionally("PROBE")
    assert RemoteDirectory.at("fake://first/8", options).creates_conditionally("PROBE")


def test_replacing_on_condition_is_found_out_by_trying(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert directory.swaps("PROBE")
    assert not fresh("createsonly://run/7").swaps("PROBE")
    assert directory.names() == []
    monkeypatch.setattr(FakeFileSystem, "ignores_condition", True)
    assert not fresh("fake://run/7").swaps("PROBE")


def test_creation_that_was_repeated_knows_its_own_work(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFileSystem, "intercept", StorageFaults("applied, no answer", 0))
    assert directory.create_only("claim", b"mine")
    monkeypatch.setattr(FakeFileSystem, "intercept", StorageFaults("applied, no answer", 0))
    assert not directory.create_only("claim", b"another's")
    assert directory.read_small("claim", 99) == b"mine"


def test_a_small_object_is_read_as_of_one_moment(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.replace("x", b"short")

    def replaced_before(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        FakeFileSystem.intercept = None
        directory.replace("x", b"rather longer")
        return proceed()

    monkeypatch.setattr(FakeFileSystem, "intercept", staticmethod(replaced_before))
    assert directory.read_small("x", 99) == b"rather longer"


def test_a_request_that_was_given_up_sends_what_it_was_given(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when the spool is closed and its descriptor's number stands for another file."""
    monkeypatch.setattr(spool, "IN_MEMORY_BYTES", 10)
    file = RemoteDirectory.at("fake://run/7", {**fresh_options(), "request_timeout_secs": 0.1}).create("x")
    file.write([b"0123456789 from a file"])
    late = StorageFaults("stalls", 0, lasts="from then on", waits=True)
    sent = threading.Event()

    def send_late(call: str, path: str, proceed: Callable[[], Any]) -> Any:
        try:
            return late(call, path, proceed)
        except ConnectionResetError:
            proceed()
            sent.set()
            raise

    monkeypatch.setattr(FakeFileSystem, "intercept", staticmethod(send_late))
    with pytest.raises(StorageError, match="cannot send the object"):
        file.commit()
    with tempfile.TemporaryFile() as other:
        other.write(b"another file")
        other.flush()
        late.release()
        assert sent.wait(30)
    FakeFileSystem.intercept = None
    assert directory.read_small("x", 99) == b"0123456789 from a file"


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
