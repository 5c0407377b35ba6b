"""How the ranks that save pass plans and receipts to each other: collectives on a gloo group of their own that can be left at any time.

A blocked collective of gloo ends by its timeout alone, or when a peer's process dies: ``abort()`` does nothing there (torch 2.13). So
nobody ever waits inside one. The wait looks at the work, and at whether the save goes on; a group that was left in the middle of a
collective is given up, and never destroyed, since its destructor would wait for that collective.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcp_engine.background.wire import packed, unpacked
from dcp_engine.errors import ExchangeBrokenError

__all__ = ["COORDINATOR", "Exchange"]

COORDINATOR = 0
"""Rank that plans and publishes, as in ``dcp.save``."""

_FIRST_WAIT_SECS = 0.0002
_LONGEST_WAIT_SECS = 0.02


class Exchange:
    """Collectives of objects, as ``dcp.save`` makes them.

    All ranks make the same calls in the same order.

    Args:
        group: gloo, with this rank in it; None for a single rank.
        check: called while waiting; what it raises ends the wait.

    Attributes:
        rank, size: of the group.
        is_broken: a collective failed or was left, so that the group is of no use any more.

    Thread-safety: none; one thread makes all calls.
    """

    def __init__(self, group: Any, check: Callable[[], None]) -> None:
        self._group = group
        self.check = check
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.is_broken = False

    @classmethod
    def make(cls, store: Any, rank: int, size: int, timeout_secs: float) -> Exchange:
        """With a gloo group that nobody else knows of. All its ranks make it at the same time.

        Args:
            store: for this group alone.
            rank, size: of this rank in it.
            timeout_secs: of its collectives.

        Raises:
            ExchangeBrokenError: they do not.
        """
        if size == 1:
            return cls(None, _nothing)
        try:
            group = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=timeout_secs))
        except RuntimeError as error:
            raise ExchangeBrokenError("the process group of saving cannot be made", found=_first_line(error)) from error
        return cls(group, _nothing)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and publishes."""
        return self.rank == COORDINATOR

    def gather(self, data: bytes) -> list[bytes]:
        """The coordinator gets everybody's, by rank; the others nothing."""
        if self.size == 1:
            return [data]
        sizes = self._sizes(len(data))
        mine = _padded(data, max(sizes))
        places = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if self.is_coordinator else []
        options = dist.GatherOptions()
        options.rootRank = COORDINATOR
        self._run(lambda: self._group.gather([places] if places else [], [mine], options))
        return [_bytes_of(place, size) for place, size in zip(places, sizes, strict=False)]

    def scatter(self, parts: list[bytes]) -> bytes:
        """Every rank gets its part of what the coordinator has."""
        if self.size == 1:
            return parts[0]
        lengths = torch.tensor([len(part) for part in parts] if self.is_coordinator else [0] * self.size)
        self._broadcast(lengths)
        longest = int(lengths.max())
        place = torch.empty(longest, dtype=torch.uint8)
        options = dist.ScatterOptions()
        options.rootRank = COORDINATOR
        given = [[_padded(part, longest) for part in parts]] if self.is_coordinator else []
        self._run(lambda: self._group.scatter([place], given, options))
        return _bytes_of(place, int(lengths[self.rank]))

    def broadcast(self, data: bytes) -> bytes:
        """Every rank gets what the coordinator has."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)])
        self._broadcast(length)
        place = _padded(data, int(length)) if self.is_coordinator else torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(place)
        return _bytes_of(place, int(length))

    def everyone(self, value: object) -> list[Any]:
        """Every rank gets the values of all, by rank."""
        data = packed(value)
        if self.size == 1:
            return [unpacked(data)]
        sizes = self._sizes(len(data))
        places = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        mine = _padded(data, max(sizes))
        self._run(lambda: self._group.allgather([places], [mine]))
        return [unpacked(_bytes_of(place, size)) for place, size in zip(places, sizes, strict=True)]

    def give_up(self) -> None:
        """Never use the group again, nor free it."""
        if self._group is not None:
            # A reference that nothing takes back: the destructor would wait, holding the interpreter's lock, for a collective that hangs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            self._group = None
        self.is_broken = True

    def _sizes(self, size: int) -> list[int]:
        places = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([places], [torch.tensor([size])]))
        return [int(place) for place in places]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = COORDINATOR
        self._run(lambda: self._group.broadcast([tensor], options))

    def _run(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
            wait_secs = _FIRST_WAIT_SECS
            while not work.is_completed():
                self.check()
                time.sleep(wait_secs)
                wait_secs = min(_LONGEST_WAIT_SECS, wait_secs * 1.5)
            work.wait()
        except RuntimeError as error:
            self.is_broken = True
            raise ExchangeBrokenError("the ranks that save have lost each other", found=_first_line(error)) from error
        except BaseException:
            self.is_broken = True
            raise


def _nothing() -> None:
    """What is checked before there is a save."""


def _padded(data: bytes, length: int) -> torch.Tensor:
    tensor = torch.zeros(length, dtype=torch.uint8)
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor


def _bytes_of(tensor: torch.Tensor, length: int) -> bytes:
    return tensor[:length].numpy().tobytes()


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:500]
