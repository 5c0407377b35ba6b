"""Copies of host memory into a buffer, by address and in parallel: done when the call returns."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from dcp_engine.staging.layout import StagePlan

__all__ = ["HostCopier", "Run", "copy_runs"]

Run = tuple[int, int, int]
"""Target address, source address, number of bytes."""

_ALONE_BYTES = 4 * 1024**2
"""Below this a second thread costs more than it copies."""
_PIECE_BYTES = 8 * 1024**2


class HostCopier:
    """Copies what lies in host memory.

    Args:
        threads: that copy, the caller's among them. The others are started when there is enough for them to do.

    Thread-safety: ``copy`` from one thread at a time, and not after ``close``.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._helpers: ThreadPoolExecutor | None = None

    def copy(self, plan: StagePlan, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Fill the slots of ``plan`` that lie in host memory.

        Args:
            plan: where everything goes.
            tensors: the plan's tensors, in its order.
            flat: the buffer, uint8 of shape ``(at least plan.num_bytes,)``.
        """
        with torch.no_grad():
            for slot in plan.host_values:
                tensor = tensors[slot.member]
                flat[slot.offset : slot.offset + slot.num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        if self._threads > 1 and self._helpers is None and plan.num_bytes > _ALONE_BYTES:
            self._helpers = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="dcp-engine-copy")
        address = flat.data_ptr()
        copy_runs([(address + offset, start, num_bytes) for offset, start, num_bytes in plan.host_runs], self._helpers, self._threads)

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)


def copy_runs(runs: Sequence[Run], pool: ThreadPoolExecutor | None, threads: int) -> None:
    """Copy runs of memory.

    Args:
        runs: that do not overlap; the caller keeps both sides alive.
        pool: of at least ``threads - 1`` threads; None: the caller's thread does it all.
        threads: that copy, the caller's among them.
    """
    total = sum(num_bytes for _, _, num_bytes in runs)
    if pool is None or threads < 2 or total <= _ALONE_BYTES:
        _copy(runs)
        return
    shares = list(_shares(runs, -(-total // threads)))
    others = [pool.submit(_copy, share) for share in shares[1:]]
    try:
        _copy(shares[0])
    finally:
        for other in others:
            other.result()


def _copy(runs: Sequence[Run]) -> None:
    memmove = ctypes.memmove  # releases the interpreter's lock
    for target, source, num_bytes in runs:
        memmove(target, source, num_bytes)


def _shares(runs: Sequence[Run], share_bytes: int) -> Iterator[list[Run]]:
    """The runs in order, cut into shares of about equal bytes."""
    share: list[Run] = []
    room = share_bytes
    for target, source, num_bytes in runs:
        done = 0
        while done < num_bytes:
            piece = min(num_bytes - done, room if num_bytes > _PIECE_BYTES else num_bytes)
            share.append((target + done, source + done, piece))
            done += piece
            room -= piece
            if room <= 0:
                yield share
                share, room = [], share_bytes
    if share:
        yield share
