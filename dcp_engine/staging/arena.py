"""The memory behind a staging buffer: one flat run, allocated once, checked against what the machine has before it is taken."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dcp_engine.compat import new_shared_bytes
from dcp_engine.errors import StagingMemoryError

__all__ = ["Arena", "MemoryKind", "available_bytes", "require_room", "shared_memory_bytes"]

MemoryKind = Literal["plain", "pinned", "shared"]

_NUMBERS = itertools.count()
_SHARED_DIRECTORY = "/dev/shm"
_PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for all devices of a process."""
_RESERVE_BYTES = 64 * 1024**2
"""Never taken: a machine that is filled to the last byte kills somebody."""


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, in bytes: the machine's, or the container's where that has less; None where unknown."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    machine = None if found is None else int(found[1]) * 1024
    container = _container_bytes()
    known = [value for value in (machine, container) if value is not None]
    return min(known) if known else None


def _container_bytes() -> int | None:
    """What is left below the memory limit of this process's control group (version 2), None without one."""
    try:
        path = next(line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        group = Path("/sys/fs/cgroup") / path.lstrip("/")
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Pages of files count as used, and are given up when memory is wanted.
        reclaimable = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
        return max(0, int(limit) - int((group / "memory.current").read_text()) + reclaimable)
    except (OSError, StopIteration, ValueError):
        return None


def shared_memory_bytes() -> int | None:
    """Free bytes of the file system behind POSIX shared memory; None where there is none."""
    try:
        status = os.statvfs(_SHARED_DIRECTORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


class Arena:
    """One flat run of host memory for staged tensors.

    Args:
        num_bytes: its size; at least 1.
        kind: ``"plain"`` memory of this process; ``"pinned"``: to be locked by :meth:`pin`;
            ``"shared"``: POSIX shared memory from the start, which other processes map by one descriptor and which never moves.

    Raises:
        StagingMemoryError: there is not that much memory.

    Attributes:
        num_bytes, kind: as given.
        number: of this arena, never given again in this process.
        memory: the run as bytes, shape ``(num_bytes,)``.
        address: of its first byte.

    Thread-safety: none; a buffer has one owner at a time.
    """

    def __init__(self, num_bytes: int, kind: MemoryKind) -> None:
        self.num_bytes = num_bytes
        self.kind = kind
        self.number = next(_NUMBERS)
        require_room(num_bytes, 0, kind, 1)
        self._shared: torch.Tensor | None = None
        self._unpin: weakref.finalize[..., Arena] | None = None
        try:
            if kind == "shared":
                self._shared = new_shared_bytes(num_bytes)
                self.memory: NDArray[np.uint8] = self._shared.numpy()
            else:
                self.memory = np.frombuffer(_anonymous(num_bytes), dtype=np.uint8)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EAGAIN, errno.EFBIG):
                raise _refused(num_bytes, kind, error) from error
            raise _too_large(num_bytes, kind, None) from error
        except RuntimeError as error:  # torch's, for every error of the system: it keeps the text alone
            raise _refused(num_bytes, kind, error) from error
        self.address = int(self.memory.ctypes.data)

    @property
    def shared(self) -> torch.Tensor | None:
        """All of it as other processes can map it; None for other kinds of memory."""
        return self._shared

    def open(self, on_dead: Callable[[], None]) -> torch.Tensor:
        """The whole run as a fresh uint8 tensor of shape ``(num_bytes,)``.

        Args:
            on_dead: called when the tensor and all its views are gone. Never for shared memory, whose storage outlives its users: other
                processes may still read it.
        """
        if self._shared is not None:
            return self._shared
        # torch keeps the array alive for as long as any view of the tensor lives, which is how their death can be seen.
        anchor = self.memory[:]
        weakref.finalize(anchor, on_dead).atexit = False
        return torch.from_numpy(anchor)

    def close(self) -> None:
        """Give the memory back: at once, or when the last view of it is gone. Idempotent."""
        if self._unpin is not None:
            self._unpin()
        self._shared = None
        self.memory = np.empty(0, dtype=np.uint8)

    def pin(self) -> None:
        """Lock it, shared memory included, so that a CUDA device copies into it beside the host's work: into other memory a copy makes
        the host wait. Not before a device's tensors are staged: it initialises CUDA, which a process that forks may not have done.

        Raises:
            StagingMemoryError: the system does not lock that much.
        """
        if self._unpin is not None:
            return
        # A registered mapping has exactly the size that was asked for; torch's own pinned allocator rounds up to a power of two.
        status = torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, _PORTABLE)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise StagingMemoryError(
                "the system does not lock that much memory",
                needed_bytes=self.num_bytes,
                expected=f"{self.num_bytes:,} bytes of pinned memory",
                found=f"CUDA's error {int(status)}",
                remedy='raise the limit of locked memory (ulimit -l), or use memory="plain"',
            )
        # Also when nobody closes it: unmapped but still registered, its pages would stay locked and its addresses be refused next time.
        self._unpin = weakref.finalize(self, _unregister, self.address)
        self._unpin.atexit = False  # CUDA may be gone by then


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _anonymous(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # MADV_HUGEPAGE: fewer faults when it is first touched. MADV_DONTFORK: while a forked process (a DataLoader's) lives, each page that
    # is staged into would be copied first, and kept twice.
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, name):
            with contextlib.suppress(OSError):  # a kernel that does not know it: slower, nothing else
                memory.madvise(getattr(mmap, name))
    return memory


def require_room(num_bytes: int, held_bytes: int, kind: MemoryKind, num_ranks: int) -> None:
    """Refuse what would not fit, before any of it is taken.

    Args:
        num_bytes: that this rank wants, all buffers together.
        held_bytes: of its buffers so far, which it gives back or uses again.
        kind: of memory.
        num_ranks: on this machine, which want as much at about the same time, and hold as much.

    Raises:
        StagingMemoryError: with what this rank needs, and its share of what there is.
    """
    there = available_bytes()
    if there is not None:
        _require(num_bytes, held_bytes + max(0, there - _RESERVE_BYTES) // num_ranks, kind)
    # A page of shared memory that the file system cannot give ends the process by SIGBUS when it is touched.
    there = shared_memory_bytes() if kind == "shared" else None
    if there is not None:
        _require(num_bytes, held_bytes + there // num_ranks, kind)


def _require(num_bytes: int, there: int, kind: MemoryKind) -> None:
    if num_bytes > there:
        raise _too_large(num_bytes, kind, there)


def _too_large(num_bytes: int, kind: MemoryKind, there: int | None) -> StagingMemoryError:
    where = f"shared memory ({_SHARED_DIRECTORY})" if kind == "shared" else "memory"
    return StagingMemoryError(
        f"the staging buffers do not fit into {where}",
        needed_bytes=num_bytes,
        available_bytes=there or 0,
        expected=f"{num_bytes:,} bytes",
        found="less" if there is None else f"{there:,} bytes free",
        remedy="free memory, stage less state on this rank, save without staging (dcp.save), or, where the ranks of a machine hold unequal"
        " states, give each its budget_bytes: without it, each may take an equal share"
        + ("; a container's shared memory grows with --shm-size" if kind == "shared" else ""),
    )


def _refused(num_bytes: int, kind: MemoryKind, error: Exception) -> StagingMemoryError:
    return StagingMemoryError(
        "the system refuses memory for a staging buffer",
        needed_bytes=num_bytes,
        expected=f"{num_bytes:,} bytes of {kind} memory",
        found=f"{type(error).__name__}: {error}",
        remedy="look at the limits of this process (ulimit -a): descriptors, sizes of files, address space",
    )
