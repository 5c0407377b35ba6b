"""Memory: a reserve that keeps free pages backed between runs, and the peak that one run reaches."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

__all__ = ["Reserve", "available_bytes", "peak_during"]


class Reserve:
    """Memory that is held between runs and given back just before one.

    A virtual machine's host takes back pages that stay free for some seconds, and every page costs a fault through the host when it is
    used again: the first system after a pause would pay for it. The reserve is what the pause is spent with.

    Not thread-safe.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._held: mmap.mmap | None = None

    def hold(self) -> None:
        """Take the memory and touch every page, unless it would leave the machine with little."""
        if self._held is None and 0 < self.nbytes < available_bytes() // 2:
            self._held = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0))

    def release(self) -> None:
        """Give it back to the kernel: it is free, and still backed by the host for a while."""
        if self._held is not None:
            self._held.close()
            self._held = None


def available_bytes() -> int:
    """What the kernel thinks can be had without swapping."""
    return _kilobytes("/proc/meminfo", "MemAvailable:") * 1024


def peak_during(run: Callable[[], object]) -> int:
    """Highest resident memory of this process while ``run`` is running, beyond what was resident before. Mapped files count.

    Call it in a process of its own: memory that an earlier run left in the allocator would be used again and not be seen.
    """
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # sets the high-water mark to what is resident now
    before = _kilobytes("/proc/self/status", "VmRSS:")
    run()
    return max(0, _kilobytes("/proc/self/status", "VmHWM:") - before) * 1024


def _kilobytes(path: str, field: str) -> int:
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1])
    raise OSError(f"{path} has no {field} on {os.uname().sysname}")
