"""Writes past the page cache, of bytes that wait in a staging buffer: the device takes them from there, and no core copies them.

Beside training that is what counts: half of the CPU time of a raw save is the kernel's copying into fresh pages. A save that somebody
waits for is left alone: on idle cores the page cache is faster (``benchmarks/README.md``, Experiments).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading

from dcp_engine.leases import is_staged
from dcp_engine.storage.backends.calls import system

__all__ = ["DIRECT_BYTES", "DirectWrites"]

DIRECT_BYTES = 4 * 2**20
"""Length of one write: long enough for a device to be busy with."""
_PAGE_BYTES = 4096
"""Memory, place and length are multiples of it: at least what any device of today asks for, and whole pages of the page cache, so that a
buffered write beside it never shares one."""
_LEAST_BYTES = 64 * 2**10
_FLAGS = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)


class DirectWrites:
    """A second way into a new file, opened when it is first of use.

    Args:
        path: of the file.
        fd: its descriptor, which others write by and flush.

    Thread-safety: ``write`` from any thread; ``close`` after the last of them.
    """

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._lock = threading.Lock()
        self._direct_fd: int | None = None
        self._is_off = not hasattr(os, "O_DIRECT")

    def write(self, position: int, view: memoryview) -> int:
        """Write at a byte, if these bytes are staged and lie as a device wants them.

        Returns:
            How many bytes were taken. Those that were not are to be written as any others.

        Raises:
            OSError: of the storage.
        """
        if self._is_off or view.readonly or len(view) < _LEAST_BYTES or position % _PAGE_BYTES or len(view) % _PAGE_BYTES:
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if address % _PAGE_BYTES or not is_staged(address, len(view)) or not self._is_open():
            return 0
        assert self._direct_fd is not None, "just opened"
        try:
            return system().pwritev(self._direct_fd, (view,), position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_off = True  # a device with larger units, or a file system that only seemed to be able to
            return 0

    def close(self) -> None:
        """Free the descriptor. Idempotent.

        Raises:
            OSError: what closing reports.
        """
        fd, self._direct_fd = self._direct_fd, None
        self._is_off = True
        if fd is not None:
            system().close(fd)

    def _is_open(self) -> bool:
        with self._lock:
            if self._direct_fd is None and not self._is_off:
                self._direct_fd = self._opened()
                self._is_off = self._direct_fd is None
            return self._direct_fd is not None

    def _opened(self) -> int | None:
        """A descriptor of the very same file; None where there is none to be had, which is no error."""
        with contextlib.suppress(OSError):
            ours = system().fstat(self._fd)
            if os.major(ours.st_dev) == 0:
                return None  # no device behind it: memory, or a network, where this means something else or nothing
            fd = system().open(self._path, _FLAGS)
            is_ours = False
            try:
                theirs = system().fstat(fd)
                is_ours = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
            finally:
                if not is_ours:
                    system().close(fd)
            return fd if is_ours else None
        return None
