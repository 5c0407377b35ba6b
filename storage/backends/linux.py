"""The calls of Linux that Python's ``os`` lacks. Each says whether it was done, so that other systems go without."""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["await_writeback", "exchange", "start_writeback"]

_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 7
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_UNAVAILABLE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})

_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)
_renameat2 = getattr(_libc, "renameat2", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
if _renameat2 is not None:
    _renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


def start_writeback(fd: int, start: int, num_bytes: int) -> None:
    """Asks the kernel to begin writing a range of a file to the device, and waits for nothing.

    A hint: the flush at the end then waits for the last few megabytes instead of all of them. It reports no error, since the kernel keeps
    what went wrong for ``fsync``.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, start, num_bytes, _SYNC_FILE_RANGE_WRITE)


def await_writeback(fd: int, start: int, num_bytes: int) -> bool:
    """Has the kernel write a range of a file to the device, and waits for that; returns whether it was done.

    No substitute for ``fsync``, which alone makes bytes durable. What went wrong is reported there.
    """
    return _sync_file_range is not None and _sync_file_range(fd, start, num_bytes, _SYNC_FILE_RANGE_WRITE_AND_WAIT) == 0


def exchange(one: str, other: str) -> bool:
    """Swaps two names of one file system in one step: no reader ever finds either of them absent.

    Returns:
        False where the system or the file system cannot do it, and nothing happened.

    Raises:
        OSError: as ``os.rename``.
    """
    if _renameat2 is None:
        return False
    if _renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNAVAILABLE:
        return False
    raise OSError(code, os.strerror(code), one, None, other)
