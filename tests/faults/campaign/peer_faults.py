"""DCP's own writer under faults: its files and names go through calls that can fail, as the engine's do."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

__all__ = ["Hook", "hooked", "hooked_writer"]

Hook = Callable[[str, str], None]
"""Called with a call's name and the file's name before each call; may raise ``OSError``, or never return."""


class _File(io.FileIO):
    """A file as Python opens it, whose calls of the system are announced first."""

    def __init__(self, path: Path, mode: str, hook: Hook) -> None:
        self._hook = hook
        self._label = path.name
        hook("open", path.name)
        super().__init__(path, mode)

    def write(self, data: Any, /) -> int:
        self._hook("write", self._label)
        return super().write(data) or 0

    def close(self) -> None:
        was_open = not self.closed
        super().close()
        if was_open and self.writable_mode:
            self._hook("close", self._label)

    @property
    def writable_mode(self) -> bool:
        return "w" in self.mode or "+" in self.mode


class _Files(FileSystem):
    """DCP's ``FileSystem`` with every call announced."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        raw = _File(Path(path), mode, self._hook)
        # What Path.open() makes: a buffered stream over a FileIO.
        with cast("io.IOBase", io.BufferedWriter(raw) if "w" in mode else io.BufferedReader(raw)) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._hook("rename", Path(new_path).name)
        super().rename(path, new_path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._hook("mkdir", Path(path).name)
        super().mkdir(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._hook("unlink", Path(path).name)
        super().rm_file(path)


@contextlib.contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Has ``os.fsync`` announced too, which DCP calls by itself."""
    fsync = os.fsync

    def announced(fd: int) -> None:
        hook("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    quiet = threading.excepthook  # an error that a thread of DCP's loses would be printed
    threading.excepthook = lambda _: None
    try:
        with mock.patch.object(os, "fsync", announced):
            yield
    finally:
        threading.excepthook = quiet


def hooked_writer(path: Path, hook: Hook, *, thread_count: int) -> FileSystemWriter:
    """A ``FileSystemWriter`` whose calls are announced."""
    writer = FileSystemWriter(path, thread_count=thread_count)
    writer.fs = _Files(hook)
    return writer
