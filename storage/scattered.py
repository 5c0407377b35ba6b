"""Moves many short runs of bytes between one buffer and addresses all over this process's memory.

An array, a tensor or a call of ``memmove`` for each would cost several times the move. Knows nothing of tensors; whoever has the addresses
vouches for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["gather", "scatter"]

_Int64s = NDArray[np.int64]

_INDEXED_ITEMS = 256
"""Runs of up to so many items on average are moved item by item through an index of them; longer ones by a call each."""
_PIECE_ITEMS = 1 << 16
"""Items that are indexed at once, about: an index takes several times the memory of what it moves."""


def gather(addresses: _Int64s, num_bytes: _Int64s) -> NDArray[np.uint8]:
    """A copy of some runs of bytes, back to back.

    Args:
        addresses: where each run begins. Readable for the whole call.
        num_bytes: its length, at least 1.
    """
    out = np.empty(int(num_bytes.sum()), dtype=np.uint8)
    starts = np.cumsum(num_bytes) - num_bytes
    width = _common_width(addresses, num_bytes)
    if len(out) > _INDEXED_ITEMS * width * len(addresses):
        _move_one_by_one(starts + out.ctypes.data, addresses, num_bytes)
        return out
    for rows, memory, places in _pieces(addresses, num_bytes, width):
        begin = int(starts[rows.start])
        out[begin : begin + len(places) * width].view(memory.dtype)[:] = memory[places]
    return out


def scatter(buffer: NDArray[np.uint8], starts: _Int64s, addresses: _Int64s, num_bytes: _Int64s) -> None:
    """Copy some runs of bytes out of a buffer.

    Args:
        buffer: contiguous; holds every run.
        starts: where each run begins in the buffer.
        addresses: where it goes. Writable for the whole call; no two runs may overlap.
        num_bytes: its length, at least 1.
    """
    assert int((starts + num_bytes).max(initial=0)) <= len(buffer), "a run reaches out of its buffer"
    width = _common_width(addresses, num_bytes, starts, np.array([buffer.ctypes.data]))
    if int(num_bytes.sum()) > _INDEXED_ITEMS * width * len(addresses):
        _move_one_by_one(addresses, starts + buffer.ctypes.data, num_bytes)
        return
    items = buffer[: len(buffer) // width * width].view(f"u{width}")
    for rows, memory, places in _pieces(addresses, num_bytes, width):
        memory[places] = items[_item_numbers(starts[rows] // width, num_bytes[rows] // width)]


def _move_one_by_one(targets: _Int64s, sources: _Int64s, num_bytes: _Int64s) -> None:
    move = ctypes.memmove
    for target, source, length in zip(targets.tolist(), sources.tolist(), num_bytes.tolist(), strict=True):
        move(target, source, length)


def _pieces(addresses: _Int64s, num_bytes: _Int64s, width: int) -> Iterator[tuple[slice, NDArray[Any], _Int64s]]:
    """Some runs after the other: which, memory as items of ``width`` bytes, and the places in it of all items of these runs."""
    if not len(addresses):
        return
    begin, end = int(addresses.min()), int((addresses + num_bytes).max())
    memory = np.asarray(_Memory(begin, (end - begin) // width, width))
    counts = num_bytes // width
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        done = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, done + _PIECE_ITEMS, side="right")))
        rows = slice(first, stop)
        yield rows, memory, _item_numbers((addresses[rows] - begin) // width, counts[rows])
        first = stop


def _item_numbers(firsts: _Int64s, counts: _Int64s) -> _Int64s:
    """``firsts[0], firsts[0] + 1, ...``, as many as ``counts[0]``, and so on."""
    before = np.cumsum(counts) - counts
    return np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))


def _common_width(*columns: _Int64s) -> int:
    """The largest item, of at most 8 bytes, of which all addresses and lengths are multiples."""
    bits = 8
    for column in columns:
        bits |= int(np.bitwise_or.reduce(column))
    return bits & -bits


class _Memory:
    """A stretch of this process's memory as numpy sees it: mostly not ours, so only places that somebody vouched for may be touched."""

    def __init__(self, begin: int, num_items: int, width: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (begin, False),
            "shape": (num_items,),
            "typestr": np.dtype(f"u{width}").str,
        }
