"""Every system call on local storage, in one narrow place: what a fault campaign counts, fails, delays, shortens or kills, it does here.

Nobody else in the package calls the system for files of a checkpoint. Code says ``calls.system().fsync(fd)``; a test installs another
:class:`SystemCalls`, and sees or changes every call of saving, publishing, retention and reading, in order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dcp_engine.storage.backends import linux

__all__ = ["SystemCalls", "installed", "system"]

_Result = TypeVar("_Result")


def _repeated(call: Callable[..., _Result], *args: Any) -> _Result:
    """A call of a name, repeated while a signal interrupts it (some network file systems, FUSE): Python does so for descriptors alone."""
    while True:
        try:
            return call(*args)
        except InterruptedError:
            continue


class SystemCalls:
    """The calls themselves, with the arguments, results and errors of their namesakes in :mod:`os` and :mod:`linux`.

    A call that was interrupted by a signal is repeated, but for ``exchange``: done twice, it would be undone.

    Thread-safety: as the system's own. A subclass is called from many threads at once.
    """

    # -- files --------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        """A descriptor."""
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        """Frees a descriptor, and may report what an earlier write met."""
        os.close(fd)

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        """Writes at a byte; returns how many bytes were taken, which may be fewer."""
        return os.pwritev(fd, views, position)

    def preadv(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        """Reads from a byte; returns how many bytes came, 0 at the end of the file."""
        return os.preadv(fd, views, position)

    def fsync(self, fd: int) -> None:
        """Makes a file, or the names in a directory, durable."""
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Facts of an open file."""
        return os.fstat(fd)

    def flock(self, fd: int, operation: int) -> None:
        """Locks an open file among all who ask (``fcntl.LOCK_*``); ``BlockingIOError`` where it was not to wait and would have to."""
        fcntl.flock(fd, operation)

    def start_writeback(self, fd: int, start: int, num_bytes: int) -> None:
        """A hint to begin with the write-back of a range."""
        linux.start_writeback(fd, start, num_bytes)

    def await_writeback(self, fd: int, start: int, num_bytes: int) -> bool:
        """Waits for the write-back of a range; whether that was done."""
        return linux.await_writeback(fd, start, num_bytes)

    # -- names --------------------------------------------------------------------------------------------------------

    def lstat(self, path: str) -> os.stat_result:
        """Facts of what has a name; of a link itself."""
        return _repeated(os.lstat, path)

    def stat(self, path: str) -> os.stat_result:
        """Facts of what a name leads to."""
        return _repeated(os.stat, path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Facts of the file system that a name leads to."""
        return _repeated(os.statvfs, path)

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, in no order."""
        return _repeated(os.listdir, path)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        """A new directory, which must not exist."""
        _repeated(os.mkdir, path, mode)

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        _repeated(os.rmdir, path)

    def unlink(self, path: str) -> None:
        """Removes a name of a file."""
        _repeated(os.unlink, path)

    def rename(self, source: str, target: str) -> None:
        """Gives a file or a directory another name; a file or an empty directory of that name gives way."""
        _repeated(os.rename, source, target)

    def exchange(self, one: str, other: str) -> bool:
        """Swaps two names in one step; False where that cannot be done. After ``InterruptedError``, look before trying again."""
        return linux.exchange(one, other)


_system = SystemCalls()


def system() -> SystemCalls:
    """The calls in force. Asked for at each use: what is installed holds from then on."""
    return _system


@contextlib.contextmanager
def installed(other: SystemCalls) -> Iterator[None]:
    """Has the whole process use other calls for a while. For tests; not to be nested from several threads."""
    global _system
    before, _system = _system, other
    try:
        yield
    finally:
        _system = before
