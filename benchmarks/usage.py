"""What this process and its children hold: to see whether anything grows from save to save."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
from dataclasses import dataclass

__all__ = ["Usage", "usage", "without_huge_pages"]

_PR_SET_THP_DISABLE = 41
_SHARED_PREFIXES = ("/dev/shm/", "/memfd:")


@dataclass(frozen=True, slots=True)
class Usage:
    """This process and those that it started with ``multiprocessing`` together.

    Attributes:
        memory_bytes: resident; what several have mapped counts for each.
        shared_bytes: shared memory that any of them has mapped, its files counted once; also where their names are gone.
        threads: of all.
        descriptors: open in all.
    """

    memory_bytes: int
    shared_bytes: int
    threads: int
    descriptors: int


def without_huge_pages() -> bool:
    """Have this process and those that it starts from now on get no transparent huge pages: numpy asks for them for arrays that it frees
    again, and the kernel then fills up runs of 2 MB of the heap, a few megabytes at times that mean nothing. Whether that was done.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0


def usage() -> Usage:
    """What is held now, after a collection of garbage."""
    gc.collect()
    processes = [str(os.getpid()), *(str(child.pid) for child in multiprocessing.active_children())]
    files: dict[str, int] = {}
    for process in processes:
        files |= _shared_files(process)
    return Usage(
        memory_bytes=sum(_resident_bytes(process) for process in processes),
        shared_bytes=sum(files.values()),
        threads=sum(len(os.listdir(f"/proc/{process}/task")) for process in processes),
        descriptors=sum(len(os.listdir(f"/proc/{process}/fd")) for process in processes),
    )


def _resident_bytes(process: str) -> int:
    with open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _shared_files(process: str) -> dict[str, int]:
    """Device and inode of a file of shared memory -> mapped bytes."""
    found: dict[str, int] = {}
    with open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(_SHARED_PREFIXES):
                begin, end = (int(part, 16) for part in fields[0].split("-"))
                key = f"{fields[3]} {fields[4]}"
                found[key] = found.get(key, 0) + end - begin
    return found
