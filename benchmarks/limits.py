"""What the machine can do: the same bytes moved by plain calls, each thread its own file, nothing checked, nothing described."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.state import State

__all__ = ["memcpy", "plain_read", "plain_write"]

_CALL_BYTES = 16 << 20
_IOV_MAX = 1024


def plain_write(path: str, state: State, *, threads: int, sync: bool) -> None:
    """pwritev of each thread's share into a new file of its own, then fsync."""
    os.makedirs(path)

    def write(number: int, parts: list[memoryview]) -> None:
        descriptor = os.open(os.path.join(path, str(number)), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _move(lambda views, position: os.pwritev(descriptor, views, position), parts)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    _each(threads, write, state)


def plain_read(path: str, state: State, *, threads: int) -> None:
    """preadv of what :func:`plain_write` wrote, straight into the state's memory."""

    def read(number: int, parts: list[memoryview]) -> None:
        descriptor = os.open(os.path.join(path, str(number)), os.O_RDONLY)
        try:
            _move(lambda views, position: os.preadv(descriptor, views, position), parts)
        finally:
            os.close(descriptor)

    _each(threads, read, state)


def memcpy(source: State, target: State, *, threads: int) -> None:
    """Each thread copies its share from memory to memory."""
    pairs = [(_array(target.flat[name]), _array(tensor)) for name, tensor in source.flat.items()]

    def copy(number: int) -> None:
        for to, of in pairs[number::threads]:
            np.copyto(to, of)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, range(threads)))


def _each(threads: int, work: Callable[[int, list[memoryview]], None], state: State) -> None:
    """Calls ``work`` in every thread with its share: consecutive tensors, cut where the share ends."""
    views = [memoryview(_array(tensor)) for tensor in state.flat.values()]
    share = -(-sum(map(len, views)) // threads)
    shares: list[list[memoryview]] = [[]]
    free = share
    for view in views:
        while len(view):
            if not free:
                shares.append([])
                free = share
            shares[-1].append(view[:free])
            taken = min(free, len(view))
            view, free = view[taken:], free - taken
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(len(shares)), shares))


def _move(call: Callable[[list[memoryview], int], int], parts: Sequence[memoryview]) -> None:
    position = 0
    waiting = [part[begin : begin + _CALL_BYTES] for part in parts for begin in range(0, len(part), _CALL_BYTES)]
    index = 0
    while index < len(waiting):
        batch: list[memoryview] = []
        num = 0
        while index < len(waiting) and len(batch) < _IOV_MAX and num < _CALL_BYTES:
            batch.append(waiting[index])
            num += len(waiting[index])
            index += 1
        moved = call(batch, position)
        if moved != num:
            raise OSError(f"short transfer: {moved} of {num} bytes")
        position += num


def _array(tensor: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array
