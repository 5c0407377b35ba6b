"""Whether this machine could hold what a checkpoint claims, asked before memory is taken: a few megabytes can claim terabytes."""

from __future__ import annotations

import os

from dcp_engine.errors import LimitExceededError

__all__ = ["memory_bytes", "require_memory"]


def memory_bytes() -> int:
    """Physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(num_bytes: int, *, what: str, tensor: str | None = None) -> None:
    """Refuse a size beyond the machine's whole memory.

    The system itself may promise any size, and end the process when the memory is filled.

    Args:
        num_bytes: to be allocated, on the CPU.
        what: what for, beginning of the message.
        tensor: its key.

    Raises:
        LimitExceededError: it is larger than the physical memory.

    Thread-safety: safe.
    """
    there = memory_bytes()
    if num_bytes > there:
        raise LimitExceededError(
            f"{what} is larger than this machine's memory",
            tensor=tensor,
            expected=f"at most {there} bytes",
            found=f"{num_bytes} bytes",
            remedy="load a part of it, or on more ranks; if you did not expect such a size, do not trust this checkpoint",
        )
