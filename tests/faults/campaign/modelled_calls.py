"""Lets the real readers read a state that exists only in the model of a file system."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from itertools import count

from dcp_engine.storage.backends.calls import SystemCalls

__all__ = ["ModelledCalls"]

# None is a descriptor of the process, so that a call which missed this class would fail; none is used twice, since one that was not closed
# in time may be closed when another state is judged.
_DESCRIPTORS = count(1 << 20)


class ModelledCalls(SystemCalls):
    """One flat directory of files in memory, read-only, under a path of its own. All else does not exist, and nothing can be changed.

    Thread-safety: any thread.
    """

    def __init__(self, path: str, files: Mapping[str, bytes]) -> None:
        self._path = path
        self._files = files
        self._open: dict[int, bytes] = {}

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        content, fd = self._content(path), next(_DESCRIPTORS)
        self._open[fd] = content
        return fd

    def close(self, fd: int) -> None:
        if self._open.pop(fd, None) is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def flock(self, fd: int, operation: int) -> None:
        pass  # nobody else is there

    def preadv(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        content, begin = self._open[fd], position
        for view in views:
            part = content[position : position + view.nbytes]
            view[: len(part)] = part
            position += len(part)
        return position - begin

    def fstat(self, fd: int) -> os.stat_result:
        return _facts(stat.S_IFREG | 0o644, len(self._open[fd]))

    def lstat(self, path: str) -> os.stat_result:
        if path == self._path:
            return _facts(stat.S_IFDIR | 0o755, 0)
        return _facts(stat.S_IFREG | 0o644, len(self._content(path)))

    def stat(self, path: str) -> os.stat_result:
        return self.lstat(path)

    def listdir(self, path: str) -> list[str]:
        if path != self._path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return list(self._files)

    def pwritev(self, fd: int, views: Sequence[memoryview], position: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def rmdir(self, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def unlink(self, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def rename(self, source: str, target: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)

    def exchange(self, one: str, other: str) -> bool:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), one)

    def _content(self, path: str) -> bytes:
        directory, _, name = path.rpartition("/")
        if directory != self._path or name not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._files[name]


def _facts(mode: int, size_bytes: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, 0, 0, size_bytes, 0, 0, 0))
