"""A real disk that is full when a test says so: a small tmpfs, where this process may mount one."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["resize", "small_disk", "used_pages"]

_MS_REMOUNT, _MNT_DETACH = 32, 2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """A tmpfs of 16 MiB at ``place``, gone afterwards. False: not allowed here."""
    place.mkdir()
    if not _mount(place, "size=16m"):
        yield False
        return
    try:
        yield True
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(place), _MNT_DETACH)


def _mount(place: Path, options: str, flags: int = 0) -> bool:
    return bool(ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(place), b"tmpfs", ctypes.c_ulong(flags), options.encode()) == 0)


def resize(place: Path, num_pages: int) -> None:
    """Give it so many pages in all, used ones included."""
    assert _mount(place, f"size={num_pages * _PAGE_BYTES}", _MS_REMOUNT)


def used_pages(place: Path) -> int:
    """How many are taken."""
    stats = os.statvfs(place)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize // _PAGE_BYTES
