"""Proof that what was written is what was staged: it goes wherever the buffer is written from, another process included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dcp_engine.errors import StagedDataChangedError
from dcp_engine.leases import Lease, SplitRun
from dcp_engine.staging.digests import Place, Thoroughness, place_digests

__all__ = ["SharedBuffer", "StagingProof", "split_runs"]


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A buffer that other processes can map.

    Attributes:
        number: of the buffer, never given again in this process.
        memory: all of it, uint8 of shape ``(num_bytes,)``.
    """

    number: int
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class StagingProof:
    """What a buffer held when it was filled.

    Attributes:
        buffer: its number.
        places: runs of the buffer.
        names: of the tensor that lies there, or of the first of them, one for each place.
        digests: one for each place; none with ``thoroughness="off"``.
        thoroughness: how the digests were taken.
        split: places that hold floats taken apart, and the code of their element type.
    """

    buffer: int
    places: tuple[Place, ...]
    names: tuple[str, ...]
    digests: tuple[int, ...]
    thoroughness: Thoroughness
    split: tuple[tuple[int, int, int], ...] = ()

    def check(self, memory: NDArray[np.uint8]) -> None:
        """Hold the buffer against it.

        Raises:
            StagedDataChangedError: naming the first tensor that is not what was staged.
        """
        if not self.digests:
            return
        found = place_digests(memory, self.places, self.thoroughness)
        for name, before, after in zip(self.names, self.digests, found, strict=True):
            if before != after:
                raise StagedDataChangedError(
                    "a staged tensor has changed while it was written",
                    tensor=name,
                    expected=f"digest {before:016x}",
                    found=f"digest {after:016x}",
                    remedy="find who writes to the staged state: no planner or hook may; nothing was published",
                )

    @contextmanager
    def registered(self, memory: torch.Tensor) -> Iterator[None]:
        """While this is open, a writer that writes from ``memory``, which another process has staged into, checks it at its end, and knows
        which floats have been taken apart.
        """
        lease = Lease(
            memory.data_ptr(),
            memory.numel(),
            owner="another process",
            on_writing=_nothing,
            on_release=_nothing,
            check=lambda: self.check(memory.numpy()),
            split=split_runs(memory.data_ptr(), self.split),
        )
        try:
            yield
        finally:
            lease.release()


def split_runs(address: int, split: Sequence[tuple[int, int, int]]) -> tuple[SplitRun, ...]:
    """The places of :attr:`StagingProof.split` in a buffer at this address."""
    return tuple(SplitRun(address + begin, num_bytes, code) for begin, num_bytes, code in split)


def _nothing() -> None:
    """The buffer's states are kept by the process that owns it."""
