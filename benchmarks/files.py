"""Folders to save into, and what the kernel knows of files: sizes, cached pages, bytes that this process has read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.options import Options

__all__ = ["Place", "bytes_read", "evict", "fsync_tree", "places", "remove", "size_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where to save.

    Attributes:
        name: as the tables show it.
        folder: on that file system.
        durable: an fsync means something there.
    """

    name: str
    folder: str
    durable: bool

    def path(self, *names: str) -> str:
        """A path below the folder. Names become safe for a file system."""
        return os.path.join(self.folder, *("".join(c if c.isalnum() or c in ".-" else "_" for c in name) for name in names))


def places(options: Options) -> list[Place]:
    """tmpfs, where there is one, and the disk."""
    memory = [Place("tmpfs", options.memory, durable=False)] if options.memory else []
    return [*memory, Place("disk", options.disk, durable=True)]


def remove(path: str) -> None:
    """A file or folder, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.unlink(path)


def size_of(path: str) -> int:
    """Bytes of a file, or of all files below a folder."""
    return sum(os.path.getsize(file) for file in _files(path))


def fsync_tree(path: str) -> None:
    """Makes what other engines leave in the page cache as durable as a checkpoint has to be: files, folder, and its parent."""
    folders = {os.path.dirname(path), *(os.path.dirname(file) for file in _files(path))}
    for name in [*_files(path), *folders]:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def evict(path: str) -> None:
    """Drops files from the page cache, as far as the kernel follows: clean pages that nobody has mapped. No privilege is needed."""
    for name in _files(path):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bytes_read() -> tuple[int, int]:
    """Bytes that this process got from read calls, and those that it made a device deliver. What is mapped is in the second alone."""
    with open("/proc/self/io", encoding="ascii") as file:
        fields = dict(line.split(": ") for line in file)
    return int(fields["rchar"]), int(fields["read_bytes"])


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.join(folder, name)
