"""Locks on COMPLETE: who reads a checkpoint holds a shared one, who retires it wants an exclusive one and never waits for it.

Both are advisory, vanish with their process, and are not there on every file system: readers then go without, and whoever retires is told.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from types import TracebackType
from typing import Self

from dcp_engine.storage.attempts import MARKER_NAME
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.failures import storage_failure

__all__ = ["Hold", "hold_for_reading", "hold_for_retiring"]

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# NFS turns the lock into one on bytes, and grants an exclusive one only on a file that is open for writing.
_WRITE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY})
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
# Retiring takes one rename: who meets it waits for its end, not for ever.
_PATIENCE_SECS = 5.0
_POLL_SECS = 0.02
# Some file systems number one file differently each time that they are asked.
_MAX_RENAMED = 3


class Hold:
    """A lock, or the lack of one. Freed by ``release``, at the latest with this object; a forked process that has a copy frees nothing.

    Attributes:
        locked: it is a lock that others respect. False on file systems without locks.
    """

    def __init__(self, fd: int = -1, *, locked: bool = False) -> None:
        self._fd = fd
        self._process = os.getpid()
        self.locked = locked

    def release(self) -> None:
        """Frees it. Harmless when repeated."""
        fd, self._fd, locked, self.locked = self._fd, -1, self.locked, False
        if fd < 0:
            return
        with contextlib.suppress(OSError):
            # In such a child this is a copy of the hold, and the lock still belongs to whoever took it.
            if locked and os.getpid() == self._process:
                system().flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile shares the lock, and would keep it
        with contextlib.suppress(OSError):
            system().close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def hold_for_reading(path: str) -> Hold:
    """A shared lock on the COMPLETE of a local checkpoint. To be taken before COMPLETE is read: what has the name then stays.

    Never raises: where there is no lock to be had, or no COMPLETE, reading goes on without, and says what there is to say.
    """
    deadline, renamed = time.monotonic() + _PATIENCE_SECS, 0
    while True:
        try:
            fd = system().open(os.path.join(path, MARKER_NAME), _READ_FLAGS)
        except OSError:
            return Hold()
        hold = Hold(fd)
        try:
            system().flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            hold.locked = True
            if _has_its_name(fd, path):
                return hold
            renamed += 1
        except BlockingIOError:
            time.sleep(_POLL_SECS)  # it is about to be retired
        except OSError:
            renamed = _MAX_RENAMED  # no locks here
        hold.release()
        if renamed >= _MAX_RENAMED or time.monotonic() >= deadline:
            return Hold()


def hold_for_retiring(path: str) -> Hold | None:
    """An exclusive lock on the COMPLETE of a local checkpoint, without waiting.

    Returns:
        None, where somebody holds a lock on it, or it went away. A hold that is not ``locked``: this file system has no locks.

    Raises:
        StorageError: COMPLETE cannot be opened.
    """
    place = os.path.join(path, MARKER_NAME)
    try:
        try:
            fd = system().open(place, _WRITE_FLAGS)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            fd = system().open(place, _READ_FLAGS)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise storage_failure(error, "open the marker of the step", path=path, file=MARKER_NAME) from error
    hold = Hold(fd)
    try:
        system().flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hold.locked = True
    except BlockingIOError:
        hold.release()
        return None
    except OSError:
        return hold
    if _has_its_name(fd, path):
        return hold
    hold.release()
    return None


def _has_its_name(fd: int, path: str) -> bool:
    """Whether an open file is still the one of its name: a lock on what was renamed meanwhile protects nothing."""
    try:
        there, held = system().lstat(os.path.join(path, MARKER_NAME)), system().fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)
