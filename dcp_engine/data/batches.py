"""How an epoch is cut into global batches, and these into the parts of ranks. Pure: numbers in, numbers out.

A *global batch* is what all ranks together take in one step: ``batch_size * world_size`` samples that follow each other in the order of
the epoch. Rank 0 takes the first part of it, rank 1 the next. It begins where the one before ended, on however many ranks that was.

The end of an epoch, where fewer samples remain:

- ``drop_last``: they are left out. All batches are equally large.
- otherwise they are one more batch, whose parts differ by one sample at most. When they are fewer than ranks, and ``pad`` is
  - ``True``: every rank still gets a part. The batch before gives up as many samples as are short, where it can; where it cannot (one
    sample a rank and batch, or fewer samples than ranks in all), ranks without a sample get one of the batch again: the only samples that
    are ever handed out twice in an epoch.
  - ``False``: some ranks get no batch. Nothing is handed out twice, and whatever waits for all ranks must know of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_engine.data.order import Ids

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What decides the cuts.

    Attributes:
        batch_size: samples of one rank's batch.
        world_size: number of ranks that take different samples (data-parallel size).
        drop_last: whether the remainder of an epoch is left out.
        pad: whether every rank gets a part of every batch.
    """

    batch_size: int
    world_size: int
    drop_last: bool
    pad: bool

    @property
    def global_size(self) -> int:
        """Samples of a full global batch."""
        return self.batch_size * self.world_size

    def take(self, num_left: int) -> int:
        """Samples of the next global batch, where ``num_left`` are left of the epoch; 0: there is none."""
        full = self.global_size
        if num_left <= full:
            return 0 if self.drop_last and num_left < full else num_left
        num_short = self.world_size - (num_left - full)
        if self.pad and not self.drop_last and 0 < num_short <= full - self.world_size:
            return full - num_short
        return full

    def reach(self, num_left: int) -> int:
        """How many of the ``num_left`` samples that are left of the epoch will be taken."""
        return num_left - num_left % self.global_size if self.drop_last else num_left

    def num_batches(self, num_left: int) -> int:
        """Global batches in the ``num_left`` samples that are left of the epoch."""
        return -(-self.reach(num_left) // self.global_size)

    def part(self, rank: int, size: int) -> Ids:
        """Which samples of a global batch are a rank's: int64 offsets into it; empty: this rank has none.

        Args:
            rank: from 0, below ``world_size``.
            size: samples of the global batch, at least 1.
        """
        share, num_larger = divmod(size, self.world_size)
        start = rank * share + min(rank, num_larger)
        stop = start + share + (rank < num_larger)
        if start == stop and self.pad:
            return np.array([rank % size], dtype=np.int64)
        return np.arange(start, stop, dtype=np.int64)

    def num_repeated(self, size: int) -> int:
        """How many samples of a global batch of ``size`` are handed to a second rank."""
        return max(self.world_size - size, 0) if self.pad else 0
