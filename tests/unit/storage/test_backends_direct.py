"""Writes past the page cache: of staged memory alone; the bytes are the same, and what a device does not take goes the usual way."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dcp_engine.errors import StorageError
from dcp_engine.leases import Lease
from dcp_engine.storage.backends import calls
from dcp_engine.storage.backends.local import LocalDirectory

MIB = 2**20
NUM_BYTES = 9 * MIB


def nothing() -> None:
    """For callbacks that a test has no use for."""


@pytest.fixture
def memory() -> Iterator[NDArray[np.uint8]]:
    """Staged memory that begins a page."""
    run = np.random.default_rng(7).integers(0, 256, NUM_BYTES + 4096, dtype=np.uint8)
    start = -run.ctypes.data % 4096
    found = run[start : start + NUM_BYTES]
    lease = Lease(found.ctypes.data, NUM_BYTES, owner="a test", on_writing=nothing, on_release=nothing, check=nothing)
    yield found
    lease.release()


class Calls(calls.SystemCalls):
    """Notes how bytes are written, on a disk that takes direct writes, whatever the tests' disk is; fails them as told."""

    def __init__(self, fails_at: int | None = None, code: int = errno.EINVAL, *, takes: int | None = None) -> None:
        self.direct: list[tuple[int, int]] = []
        self.buffered: list[tuple[int, int]] = []
        self._fds: set[int] = set()
        self._fails_at = fails_at
        self._code = code
        self._takes = takes

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = super().open(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            self._fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._fds.discard(fd)
        super().close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        found = super().fstat(fd)
        return os.stat_result([*found[:2], os.makedev(8, 1), *found[3:10]])

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        if fd not in self._fds:
            self.buffered.append((position, sum(map(len, views))))
            return super().pwritev(fd, views, position)
        if position == self._fails_at:
            raise OSError(self._code, os.strerror(self._code))
        taken = super().pwritev(fd, [views[0][: self._takes]], position)
        self.direct.append((position, taken))
        return taken

    @property
    def num_open(self) -> int:
        return len(self._fds)


class Blind(Calls):
    """Cannot tell what a descriptor for direct writes is of."""

    def fstat(self, fd: int) -> os.stat_result:
        if fd in self._fds:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().fstat(fd)


def written(directory: Path, system: Calls, part: memoryview, position: int = 4096) -> tuple[bytes, bytes]:
    """What the file holds from ``position`` on, and what was shown piece by piece."""
    seen = []
    with calls.installed(system):
        file = LocalDirectory(str(directory)).create("a.shard")
        file.write([bytes(position)])
        file.write_pieces(position, part, lambda piece: seen.append(bytes(piece)))
        assert file.position == position + len(part)
        file.commit()
    assert system.num_open == 0
    return (directory / "a.shard").read_bytes()[position:], b"".join(seen)


def test_staged_pages_go_past_the_page_cache(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    system = Calls()
    assert written(tmp_path, system, memory.data) == (memory.tobytes(), memory.tobytes())
    assert system.direct == [(4096, 4 * MIB), (4096 + 4 * MIB, 4 * MIB), (4096 + 8 * MIB, MIB)]
    assert system.buffered == [(0, 4096)]


@pytest.mark.parametrize(
    ("begin", "end", "position"),
    [(1, 4 * MIB + 1, 4096), (0, 4 * MIB, 4096 + 64), (0, 4 * MIB - 64, 4096), (0, 4096, 4096)],
    ids=["memory within a page", "place within a page", "length within a page", "short"],
)
def test_what_does_not_lie_in_whole_pages_is_written_as_ever(
    tmp_path: Path, memory: NDArray[np.uint8], begin: int, end: int, position: int
) -> None:
    system = Calls()
    part = memory[begin:end]
    assert written(tmp_path, system, part.data, position) == (part.tobytes(), part.tobytes())
    assert system.direct == []


def test_a_descriptor_that_cannot_be_looked_at_is_closed_and_not_used(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    system = Blind()
    assert written(tmp_path, system, memory.data) == (memory.tobytes(), memory.tobytes())
    assert system.direct == []


def test_a_tail_within_a_page_is_written_as_ever(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    system = Calls()
    part = memory[: 5 * MIB + 64]
    assert written(tmp_path, system, part.data) == (part.tobytes(), part.tobytes())
    assert system.direct == [(4096, 4 * MIB)]


def test_memory_that_nobody_has_staged_is_written_as_ever(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    system = Calls()
    other = np.empty(NUM_BYTES + 4096, dtype=np.uint8)[-memory.ctypes.data % 4096 :][:NUM_BYTES]
    other[:] = memory
    assert written(tmp_path, system, other.data)[0] == memory.tobytes()
    assert system.direct == []


def test_a_device_that_refuses_gets_the_rest_as_ever(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    system = Calls(fails_at=4096 + 4 * MIB)
    assert written(tmp_path, system, memory.data) == (memory.tobytes(), memory.tobytes())
    assert system.direct == [(4096, 4 * MIB)]


def test_a_short_write_is_continued_as_ever(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    system = Calls(takes=MIB + 512)
    assert written(tmp_path, system, memory.data) == (memory.tobytes(), memory.tobytes())
    assert system.direct == [(4096, MIB + 512)]


def test_a_full_disk_is_a_typed_error_and_leaves_no_file(tmp_path: Path, memory: NDArray[np.uint8]) -> None:
    system = Calls(fails_at=4096, code=errno.ENOSPC)
    with calls.installed(system):
        file = LocalDirectory(str(tmp_path)).create("a.shard")
        file.write([bytes(4096)])
        with pytest.raises(StorageError) as caught:
            file.write_pieces(4096, memory.data, lambda _: None)
        assert (caught.value.kind, caught.value.file) == ("storage_full", "a.shard")
        file.abort()
    assert system.num_open == 0
    assert list(tmp_path.iterdir()) == []


def test_a_real_disk_holds_the_same_bytes(memory: NDArray[np.uint8], tmp_path: Path) -> None:
    file = LocalDirectory(str(tmp_path)).create("a.shard")
    file.write([bytes(4096)])
    file.write_pieces(4096, memory.data, lambda _: None)
    file.write([b"end"])
    file.commit()
    assert (tmp_path / "a.shard").read_bytes() == bytes(4096) + memory.tobytes() + b"end"
