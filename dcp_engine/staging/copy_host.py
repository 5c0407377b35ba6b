"""Copies of host memory into a buffer, by address and in parallel: done when the call returns."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Run", "copy_runs"]

Run = tuple[int, int, int]
"""Target address, source address, number of bytes."""

_ALONE_BYTES = 4 * 1024**2
"""Below this a second thread costs more than it copies."""
_PIECE_BYTES = 8 * 1024**2


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
