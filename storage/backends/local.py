"""Local directories (and network file systems that look like them) by plain system calls, which say exactly what failed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from dcp_engine.errors import LimitExceededError, MissingFileError, StorageError, TruncatedFileError
from dcp_engine.storage.backends.base import Buffer
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.direct import DIRECT_BYTES, DirectWrites
from dcp_engine.storage.backends.directories import file_kind
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.backends.locations import check_name

__all__ = ["LocalDirectory", "LocalReadFile", "LocalWriteFile", "next_piece_bytes"]

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, a FIFO planted under the name of a shard would block the open for ever.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MAX_PARTS = min(os.sysconf("SC_IOV_MAX"), 1024) if os.sysconf("SC_IOV_MAX") > 0 else 16
_WRITEBACK_BYTES = 8 * 2**20
# A system call costs about as much as the copying of 10 KB, and this much stays in the cache of one core.
_PIECE_BYTES = 512 * 2**10
# What comes from a device costs least in long reads: on ext4 two thirds of the CPU time.
_COLD_PIECE_BYTES = 8 * 2**20
# Memory gives a core more than 3 GB/s, and a device that is faster than this needs no help.
_COLD_BYTES_PER_SEC = 1e9
_WARM_BYTES_PER_SEC = 2e9


def next_piece_bytes(piece_bytes: int, num_bytes: int, secs: float) -> int:
    """How much to read at once, as the last read suggests: little where the bytes lie in memory, much where they come from a device.

    Args:
        piece_bytes: what it was.
        num_bytes: length of the last read. A short one says nothing.
        secs: what it took. A thread that had to wait for a CPU looks like a device, which costs little.
    """
    if num_bytes < _PIECE_BYTES:
        return piece_bytes
    if num_bytes < _COLD_BYTES_PER_SEC * secs:
        return _COLD_PIECE_BYTES
    return _PIECE_BYTES if num_bytes > _WARM_BYTES_PER_SEC * secs else piece_bytes


def _batches(parts: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """The parts as bytes, without empty ones, in groups that one system call takes."""
    views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
    for start in range(0, len(views), _MAX_PARTS):
        yield views[start : start + _MAX_PARTS]


def _advance(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the views after a call that took only ``num_bytes`` of them."""
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []


class LocalWriteFile:
    """A new file, written by gathered calls at positions, flushed once. See :class:`~dcp_engine.storage.backends.base.WriteFile`."""

    def __init__(self, path: str, name: str, fd: int) -> None:
        self._path = path
        self._name = name
        self._fd = fd
        self._direct = DirectWrites(os.path.join(path, name), fd)
        self._lock = threading.Lock()
        # A measurement that met a closed descriptor might meet another file.
        self._open_lock = threading.Lock()
        self._position = 0
        # What was written since the kernel was last asked to write back: how much, and from where to where.
        self._fresh_bytes = 0
        self._fresh_start = self._fresh_stop = 0
        self._dead = False
        self._committed = False
        self._aborted = False

    @property
    def position(self) -> int:
        """Where the furthest byte that was written ends."""
        return self._position

    def write(self, parts: Sequence[Buffer]) -> None:
        """Appends all bytes of all parts; short writes are continued."""
        self.write_at(self._position, parts)

    def write_at(self, position: int, parts: Sequence[Buffer]) -> None:
        """Writes all bytes of all parts from ``position`` on; short writes are continued."""
        self._check_usable()
        start = position
        for batch in _batches(parts):
            views = batch
            while views:
                num_bytes = self._call(position, views)
                position += num_bytes
                views = _advance(views, num_bytes)
        self._note(start, position)

    def write_pieces(self, position: int, part: Buffer, seen: Callable[[memoryview], object]) -> None:
        """Writes all bytes of one part from ``position`` on, and shows each piece to ``seen`` while it is in the cache.

        Each piece throws the interpreter's own memory out of the cache, so that few of its instructions may run in between.
        """
        self._check_usable()
        view = memoryview(part).cast("B")
        num_bytes = self._write_direct(position, view, seen)
        position, view = position + num_bytes, view[num_bytes:]
        start = position
        for begin in range(0, len(view), _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            num_bytes = self._call(position, (piece,))
            if num_bytes < len(piece):
                self.write_at(position + num_bytes, [piece[num_bytes:]])
            seen(piece)
            position += len(piece)
        if view:
            self._note(start, position)

    def _write_direct(self, position: int, view: memoryview, seen: Callable[[memoryview], object]) -> int:
        """Writes past the page cache what should be; returns how many bytes from the beginning that were."""
        done = 0
        while done < len(view):
            piece = view[done : done + DIRECT_BYTES]
            try:
                num_bytes = self._direct.write(position + done, piece)
            except OSError as error:
                raise self._failed(error, position + done) from error
            for begin in range(0, num_bytes, _PIECE_BYTES):
                seen(piece[begin : min(begin + _PIECE_BYTES, num_bytes)])
            done += num_bytes
            if num_bytes < len(piece):
                break
        if done:
            with self._lock:
                self._position = max(self._position, position + done)
        return done

    def _call(self, position: int, views: Sequence[memoryview]) -> int:
        """One call of the system; returns how many bytes it took."""
        try:
            num_bytes = system().pwritev(self._fd, views, position)
        except OSError as error:
            raise self._failed(error, position) from error
        if num_bytes == 0:
            self._dead = True
            raise StorageError("the file system takes no more bytes and gives no reason", path=self._path, file=self._name)
        return num_bytes

    def _failed(self, error: OSError, position: int) -> StorageError:
        self._dead = True
        return storage_failure(error, f"write at byte {position}", path=self._path, file=self._name)

    def _note(self, start: int, stop: int) -> None:
        """Counts what was written, and has the kernel begin with it once it is enough."""
        with self._lock:
            self._position = max(self._position, stop)
            self._fresh_start = min(self._fresh_start, start) if self._fresh_bytes else start
            self._fresh_stop = max(self._fresh_stop, stop) if self._fresh_bytes else stop
            self._fresh_bytes += stop - start
            if self._fresh_bytes < _WRITEBACK_BYTES:
                return
            self._fresh_bytes = 0
            start, stop = self._fresh_start, self._fresh_stop
        system().start_writeback(self._fd, start, stop - start)

    def settle(self, start: int, num_bytes: int) -> bool:
        """Waits for the write-back of a range; false once the file is being closed."""
        with self._open_lock:
            return not self._dead and system().await_writeback(self._fd, start, num_bytes)

    def commit(self) -> None:
        """Flushes once to the device and closes; an error of either makes the file dead."""
        self._check_usable()
        with self._open_lock:
            self._dead = True
        try:
            self._direct.close()
            system().fsync(self._fd)
            fd, self._fd = self._fd, -1
            system().close(fd)
        except OSError as error:
            raise storage_failure(error, "flush the file to the device", path=self._path, file=self._name) from error
        self._committed = True

    def abort(self) -> None:
        """Closes the file and removes it; what fails is left for the removal of the attempt."""
        if self._committed or self._aborted:
            return
        with self._open_lock:
            self._dead = self._aborted = True
        with contextlib.suppress(OSError):
            self._direct.close()
        fd, self._fd = self._fd, -1
        # The bytes are unwanted, so that errors of both no longer matter: the attempt around them is removed or ignored as a whole.
        if fd >= 0:
            with contextlib.suppress(OSError):
                system().close(fd)
        with contextlib.suppress(OSError):
            system().unlink(os.path.join(self._path, self._name))

    def _check_usable(self) -> None:
        if self._dead:
            raise StorageError("the file was closed or has failed before", path=self._path, file=self._name, remedy="start a new attempt")


class LocalReadFile:
    """An existing file, read by position. See :class:`~dcp_engine.storage.backends.base.ReadFile`."""

    def __init__(self, path: str, name: str, fd: int) -> None:
        self._path = path
        self._name = name
        self._fd = fd
        self._size_bytes = 0
        self._piece_bytes = _PIECE_BYTES  # threads may overwrite each other's: it is a guess

    def look(self) -> None:
        """Notes the size. ``MissingFileError`` if it is no regular file."""
        try:
            info = system().fstat(self._fd)
        except OSError as error:
            raise storage_failure(error, "look at the file", path=self._path, file=self._name) from error
        if not stat.S_ISREG(info.st_mode):
            raise MissingFileError("not a regular file", path=self._path, file=self._name, expected="a file", found=file_kind(info.st_mode))
        self._size_bytes = info.st_size

    @property
    def size_bytes(self) -> int:
        """Size when the file was opened."""
        return self._size_bytes

    @property
    def piece_bytes(self) -> int:
        """Small while the bytes are in memory: a system call is cheap beside their trip through it."""
        return self._piece_bytes

    def read_into(self, position: int, parts: Sequence[memoryview]) -> None:
        """Fills all parts from ``position`` on; short reads are continued."""
        if len(parts) == 1 and self._read(position, parts) == parts[0].nbytes:
            return  # as nearly every read of a load: one call, which gives all
        for batch in _batches(parts):
            views = batch
            while views:
                num_bytes = self._read(position, views)
                if num_bytes == 0:
                    wanted = position + sum(view.nbytes for view in views)
                    raise TruncatedFileError(
                        "the file ends too early",
                        path=self._path,
                        file=self._name,
                        expected=f"at least {wanted} bytes",
                        found=f"{position} bytes",
                    )
                position += num_bytes
                views = _advance(views, num_bytes)

    def _read(self, position: int, parts: Sequence[memoryview]) -> int:
        """One call of the system; how many bytes it gave."""
        begin = perf_counter()
        try:
            num_bytes = system().preadv(self._fd, parts, position)
        except OSError as error:
            raise storage_failure(error, f"read at byte {position}", path=self._path, file=self._name) from error
        secs = perf_counter() - begin
        if num_bytes < _COLD_BYTES_PER_SEC * secs or self._piece_bytes != _PIECE_BYTES:
            self._piece_bytes = next_piece_bytes(self._piece_bytes, num_bytes, secs)
        return num_bytes

    def close(self) -> None:
        """Frees the descriptor. What a close reports about a file that was only read is no news about its bytes."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                system().close(fd)


class LocalDirectory:
    """A directory of the local file system. See :class:`~dcp_engine.storage.backends.base.Directory`."""

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def path(self) -> str:
        """Absolute path."""
        return self._path

    def create(self, name: str) -> LocalWriteFile:
        """A new file with the modes of the umask. The directory must exist."""
        check_name(name, path=self._path)
        try:
            fd = system().open(os.path.join(self._path, name), _CREATE_FLAGS, 0o666)
        except OSError as error:
            raise storage_failure(error, "create the file", path=self._path, file=name) from error
        return LocalWriteFile(self._path, name, fd)

    def open(self, name: str) -> LocalReadFile:
        """An existing regular file, not through a symbolic link."""
        check_name(name, path=self._path)
        try:
            fd = system().open(os.path.join(self._path, name), _OPEN_FLAGS)
        except OSError as error:
            raise self._unreadable(error, name) from error
        file = LocalReadFile(self._path, name, fd)
        try:
            file.look()
        except BaseException:
            file.close()
            raise
        return file

    def read_small(self, name: str, limit_bytes: int) -> bytes:
        """The whole of a file of at most ``limit_bytes``."""
        file = self.open(name)
        try:
            if file.size_bytes > limit_bytes:
                raise LimitExceededError(
                    "the file is too long",
                    path=self._path,
                    file=name,
                    expected=f"at most {limit_bytes} bytes",
                    found=f"{file.size_bytes} bytes",
                )
            data = bytearray(file.size_bytes)
            file.read_into(0, [memoryview(data)])
        finally:
            file.close()
        return bytes(data)

    def file_size(self, name: str) -> int:
        """Size in bytes of a regular file."""
        check_name(name, path=self._path)
        try:
            info = system().lstat(os.path.join(self._path, name))
        except OSError as error:
            raise self._unreadable(error, name) from error
        if not stat.S_ISREG(info.st_mode):
            raise MissingFileError("not a regular file", path=self._path, file=name, expected="a file", found=file_kind(info.st_mode))
        return info.st_size

    def names(self) -> list[str]:
        """Everything in it, sorted."""
        try:
            return sorted(system().listdir(self._path))
        except OSError as error:
            raise storage_failure(error, "list the directory", path=self._path) from error

    def _unreadable(self, error: OSError, name: str) -> StorageError | MissingFileError:
        if error.errno == errno.ELOOP:
            return MissingFileError("not a regular file", path=self._path, file=name, expected="a file", found="a symbolic link")
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return MissingFileError("the file is not there", path=self._path, file=name)
        if error.errno == errno.ENXIO:
            return MissingFileError("not a regular file", path=self._path, file=name, expected="a file", found="a socket or a device")
        return storage_failure(error, "open the file", path=self._path, file=name)
