"""Local files: modes, short calls, full disks, failing flushes, and what a hostile directory may hold."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from support.checkpoints import unprivileged, world_readable_directory

from dcp_engine.errors import MissingFileError, StorageError, StorageFullError, StoragePermissionError
from dcp_engine.storage.backends.calls import SystemCalls
from dcp_engine.storage.backends.directories import is_mount_point, make_directories
from dcp_engine.storage.backends.linux import exchange
from dcp_engine.storage.backends.local import LocalDirectory, next_piece_bytes


@pytest.fixture
def directory(tmp_path: Path) -> LocalDirectory:
    return LocalDirectory(str(tmp_path))


def fail_with(code: int) -> object:
    def fail(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o000, 0o666)])
def test_files_have_the_modes_of_the_umask(directory: LocalDirectory, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        directory.create("x").commit()
        make_directories(f"{directory.path}/a/b")
    finally:
        os.umask(before)

    assert stat.S_IMODE(os.stat(f"{directory.path}/x").st_mode) == mode
    assert stat.S_IMODE(os.stat(f"{directory.path}/a").st_mode) == 0o777 & ~umask
    assert stat.S_IMODE(os.stat(f"{directory.path}/a/b").st_mode) == 0o777 & ~umask


def test_a_parent_that_cannot_be_looked_at_is_an_error_and_no_endless_climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "stat", fail_with(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        make_directories(f"{tmp_path}/a/b")


@pytest.mark.parametrize("name", ["lstat", "stat", "statvfs", "listdir", "mkdir", "rmdir", "unlink", "rename"])
def test_a_call_of_a_name_that_is_interrupted_is_repeated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python repeats calls of descriptors alone."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    places = {"mkdir": ["new"], "rmdir": ["directory"], "rename": ["file", "other"], "listdir": ["directory"]}.get(name, ["file"])
    real, left = getattr(os, name), [1, 1]

    def interrupted(*args: object) -> object:
        if left:
            left.pop()
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return real(*args)

    monkeypatch.setattr(os, name, interrupted)
    getattr(SystemCalls(), name)(*(str(tmp_path / place) for place in places))
    monkeypatch.undo()
    there = {
        "mkdir": ["directory", "file", "new"],
        "rmdir": ["file"],
        "unlink": ["directory"],
        "rename": ["directory", "other"],
    }
    assert sorted(os.listdir(tmp_path)) == there.get(name, ["directory", "file"])
    assert left == []


def test_short_writes_are_continued(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, position: os.pwrite(fd, bytes(views[0][:7]), position))
    file = directory.create("x")
    file.write([b"a" * 20, b"b" * 7, b"c", b"d" * 15])

    assert file.position == 43
    file.commit()
    assert Path(directory.path, "x").read_bytes() == b"a" * 20 + b"b" * 7 + b"c" + b"d" * 15


def test_short_writes_of_pieces_are_continued(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, position: os.pwrite(fd, bytes(views[0][:300_000]), position))
    part = bytes(range(250)) * 5000
    seen: list[int] = []
    file = directory.create("x")
    file.write_pieces(0, part, lambda piece: seen.append(len(piece)))

    assert file.position == sum(seen) == len(part)
    file.commit()
    assert Path(directory.path, "x").read_bytes() == part


def test_short_reads_are_continued(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(directory.path, "x").write_bytes(bytes(range(100)))

    def short(fd: int, views: Sequence[memoryview], position: int) -> int:
        data = os.pread(fd, min(7, views[0].nbytes), position)
        views[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(os, "preadv", short)
    parts = [bytearray(20), bytearray(7), bytearray(30)]
    file = directory.open("x")
    file.read_into(10, [memoryview(part) for part in parts])
    file.close()
    assert b"".join(parts) == bytes(range(10, 67))


def test_a_device_that_takes_nothing_does_not_hang(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, position: 0)
    file = directory.create("x")
    with pytest.raises(StorageError, match="takes no more bytes"):
        file.write([b"a"])
    file.abort()


def test_a_file_beyond_the_size_limit_is_a_full_storage(directory: LocalDirectory) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = directory.create("x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageFullError) as caught:
            file.write([bytes(60_000), bytes(60_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert (caught.value.errno, caught.value.file, caught.value.path) == (errno.EFBIG, "x", directory.path)
    with pytest.raises(StorageError, match="failed before"):
        file.write([b"more"])
    with pytest.raises(StorageError, match="failed before"):
        file.commit()
    file.abort()
    assert directory.names() == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_in_mid_write_is_told(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    file = directory.create("x")
    file.write([b"12345"])
    monkeypatch.setattr(os, "pwritev", fail_with(code))

    with pytest.raises(StorageFullError) as caught:
        file.write([b"6"])
    assert caught.value.errno == code
    assert caught.value.message == "cannot write at byte 5"
    assert caught.value.remedy is not None
    file.abort()


def test_after_a_failed_flush_the_file_is_dead(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    file = directory.create("x")
    file.write([b"1"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(errno.EIO))
        with pytest.raises(StorageError, match="flush") as caught:
            file.commit()
    assert caught.value.errno == errno.EIO
    with pytest.raises(StorageError, match="failed before"):
        file.commit()
    file.abort()
    assert directory.names() == []


def test_an_error_on_closing_is_told(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    file = directory.create("x")
    close = os.close

    def close_and_fail(fd: int) -> NoReturn:
        close(fd)
        raise OSError(errno.EDQUOT, "quota")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_and_fail)
        with pytest.raises(StorageFullError):
            file.commit()
    file.abort()
    assert directory.names() == []


def test_a_file_is_flushed_once(directory: LocalDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    file = directory.create("x")
    for _ in range(20):
        file.write([bytes(2**20)])
    file.commit()
    assert len(flushed) == 1


def test_a_vanished_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        LocalDirectory(str(tmp_path / "gone")).create("x")
    assert caught.value.errno == errno.ENOENT
    assert "removed the directory" in str(caught.value)
    with pytest.raises(StorageError):
        LocalDirectory(str(tmp_path / "gone")).names()


def test_links_pipes_sockets_and_directories_are_no_files(
    directory: LocalDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name in ("link", "dangling", "folder", "pipe", "socket"):
            with pytest.raises(MissingFileError, match="not a regular file"):
                directory.open(name)
            with pytest.raises(MissingFileError, match="not a regular file"):
                directory.file_size(name)
            with pytest.raises(StorageError):
                directory.create(name)
    assert (tmp_path / "target").read_bytes() == b"secret"
    assert not (tmp_path / "nothing").exists()


def test_what_permissions_forbid_is_told() -> None:
    with world_readable_directory() as place:
        directory = LocalDirectory(str(place))
        (place / "secret").write_bytes(b"1")
        (place / "secret").chmod(0o000)
        (place / "closed").mkdir(mode=0o700)
        (place / "closed").chmod(0o000)
        place.chmod(0o555)
        with unprivileged():
            with pytest.raises(StoragePermissionError) as caught:
                directory.open("secret")
            assert caught.value.file == "secret"
            with pytest.raises(StoragePermissionError):
                directory.create("new")
            with pytest.raises(StoragePermissionError):
                LocalDirectory(str(place / "closed")).names()
            with pytest.raises(StoragePermissionError):
                LocalDirectory(str(place / "closed")).file_size("x")


def test_mount_points_are_known(tmp_path: Path) -> None:
    assert is_mount_point("/proc")
    assert not is_mount_point(str(tmp_path))
    assert not is_mount_point(str(tmp_path / "absent"))


def test_two_directories_swap_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if exchange(str(tmp_path / "one"), str(tmp_path / "two")):  # a file system may lack it, and must then have done nothing
        assert (os.listdir(tmp_path / "one"), os.listdir(tmp_path / "two")) == (["two"], ["one"])
    else:
        assert (os.listdir(tmp_path / "one"), os.listdir(tmp_path / "two")) == (["one"], ["two"])
    with pytest.raises(FileNotFoundError):
        exchange(str(tmp_path / "one"), str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("piece_bytes", "num_bytes", "secs", "expected"),
    [
        (512 * 1024, 512 * 1024, 0.0001, 512 * 1024),  # 5 GB/s: memory
        (512 * 1024, 512 * 1024, 0.002, 8 * 2**20),  # 0.26 GB/s: a device
        (512 * 1024, 64 * 1024, 1.0, 512 * 1024),  # too short to tell
        (8 * 2**20, 8 * 2**20, 0.006, 8 * 2**20),  # 1.4 GB/s: could be either
        (8 * 2**20, 8 * 2**20, 0.002, 512 * 1024),
        (8 * 2**20, 8 * 2**20, 0.0, 512 * 1024),  # a clock that stands still
    ],
)
def test_reads_are_long_while_bytes_come_from_a_device(piece_bytes: int, num_bytes: int, secs: float, expected: int) -> None:
    assert next_piece_bytes(piece_bytes, num_bytes, secs) == expected
