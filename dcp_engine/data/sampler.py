"""Which samples training takes, in an order and from a position that do not depend on the ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from dataclasses import asdict
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from dcp_engine.data.batches import Layout
from dcp_engine.data.options import flag, num_samples_of, place_of, whole
from dcp_engine.data.order import MAX_SEED, ORDER_NAME, hash_ids
from dcp_engine.data.position import WINDOW_IDS, SampleOrder, SavedPosition, next_batch, next_ids, read_position
from dcp_engine.errors import InvalidOptionError, UsageError

__all__ = ["ResumableSampler"]

_LOOKUP_IDS = 8192  # looked up at once: numpy's calls cost as much for one as for some thousand


class ResumableSampler(Sampler[list[int]]):
    """A batch sampler for map-style data whose position is one number for all ranks, and counts what training consumed.

    The order of an epoch depends on ``seed`` and the epoch alone. Each global batch, ``batch_size * world_size`` samples, begins where the
    one before ended, so that a run that goes on with another number of ranks or another batch size neither leaves a sample out nor takes
    one twice. How epochs end is said in :mod:`dcp_engine.data.batches`. The global batches are the same on every number of ranks if
    ``batch_size * world_size`` is, but for the last two of an epoch, and for those too with ``drop_last=True`` or ``pad=False``.

    Calls, on every rank:

    1. ``DataLoader(dataset, batch_sampler=sampler, ...)``, with any number of workers, prefetching and persistent workers.
    2. ``load_state_dict(state)``, when a run is resumed: before the loader is iterated.
    3. ``ResumableLoader(loader)`` is iterated, once an epoch, and counts. Without it: ``set_epoch(epoch)`` before each epoch and
       ``consumed()`` after each batch. Iterating the sampler does not move the position, since a loader does that ahead of training.
    4. ``state_dict()``, between two batches. It is the same on all ranks.

    Args:
        dataset: a data set with a length, or its number of samples.
        batch_size: samples of a batch of this rank.
        seed: of the order, from 0 to 2**64 - 1; the same on all ranks.
        rank: which of the ranks that take different samples this is: with tensor or pipeline parallelism, the data-parallel rank. By
            default that of the default process group, or 0 without one.
        world_size: how many such ranks there are.
        drop_last: leave out what remains of an epoch when it is no full global batch.
        shuffle: ``False``: each epoch is 0, 1, 2, ...
        pad: give every rank a part of the last batch of an epoch, though a sample is handed out twice for it. It has to be with fewer
            samples than ranks left, or with one sample a batch.

    Raises:
        InvalidOptionError: an argument is out of range, or ``drop_last`` would leave out everything.

    Thread-safety: not safe; the loader's workers only ever see ids.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        pad: bool = True,
    ) -> None:
        self._rank, num_ranks = place_of(rank, world_size)
        self._layout = Layout(
            batch_size=whole("batch_size", batch_size, least=1),
            world_size=num_ranks,
            drop_last=flag("drop_last", drop_last),
            pad=flag("pad", pad),
        )
        self._order = SampleOrder(
            order=ORDER_NAME,
            num_samples=num_samples_of(dataset),
            seed=whole("seed", seed, least=0, most=MAX_SEED),
            shuffle=flag("shuffle", shuffle),
        )
        if self._layout.take(self._order.num_samples) == 0:
            raise InvalidOptionError(
                "drop_last would leave out every sample: there are fewer than a global batch",
                expected=f"at least {batch_size} x {num_ranks} samples, or drop_last=False",
                found=str(self._order.num_samples),
            )
        self._epoch = 0
        self._offset = 0
        self._samples_consumed = 0
        self._ids_before: list[int] = []  # from a checkpoint: the last ids before this process
        self._spans: deque[tuple[int, int, int]] = deque()  # epoch, start, stop: what this process consumed, as far as the window reaches
        self._run_out_at: tuple[int, int] | None = None

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next batch. It stays when the last batch is consumed, until the next epoch is begun."""
        return self._epoch

    @property
    def offset(self) -> int:
        """Samples of this epoch that training has behind it, on all ranks."""
        return self._offset

    @property
    def samples_consumed(self) -> int:
        """Samples that training took in all epochs, on all ranks. What was left out does not count, and a repeated one counts once."""
        return self._samples_consumed

    @property
    def num_repeated(self) -> int:
        """How many samples of the next global batch are handed to a second rank, because there are fewer than ranks."""
        size = self._layout.take(self._order.num_samples - self._offset)
        return self._layout.num_repeated(size) if size else 0

    def __len__(self) -> int:
        """Batches of a whole epoch, on a rank that gets a part of every batch."""
        return self._layout.num_batches(self._order.num_samples)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the position to the end of the epoch, as lists of ids.

        Raises:
            UsageError: the epoch was iterated to its end from here before, and nothing was counted since: it would be taken again.
        """
        start = (self._epoch, self._offset)
        if self._run_out_at == start:
            raise UsageError(
                f"epoch {self._epoch} was iterated from offset {self._offset} to its end, and no batch counts as consumed since",
                remedy="iterate ResumableLoader(loader), or call consumed() after each batch and set_epoch() before each epoch",
            )
        return self._batches(*start)

    def rewind(self) -> None:
        """Allows what was iterated to its end, but not consumed, to be iterated again. ``ResumableLoader`` calls it: its loader fetches
        ahead, and may have failed before training got anything."""
        self._run_out_at = None

    def _batches(self, epoch: int, offset: int) -> Iterator[list[int]]:
        order, start = self._order.epoch(epoch), offset
        while True:
            parts: list[np.ndarray[Any, np.dtype[np.int64]]] = []
            num_ids = 0
            while num_ids < _LOOKUP_IDS and (size := self._layout.take(self._order.num_samples - offset)):
                part = self._layout.part(self._rank, size) + offset
                if part.size:
                    parts.append(part)
                num_ids += part.size
                offset += size
            if not parts:
                break
            ids = order.ids(np.concatenate(parts)).tolist()
            first = 0
            for part in parts:
                yield ids[first : first + part.size]
                first += part.size
        if (self._epoch, self._offset) == (epoch, start):
            self._run_out_at = (epoch, start)

    def consumed(self, num_batches: int = 1) -> None:
        """Counts batches that training consumed, on every rank alike. ``ResumableLoader`` calls it.

        Raises:
            InvalidOptionError: the number is negative.
            UsageError: the epoch has fewer batches left; nothing is counted.
        """
        whole("num_batches", num_batches, least=0)
        offset = self._offset
        for _ in range(num_batches):
            size = self._layout.take(self._order.num_samples - offset)
            if size == 0:
                raise UsageError(
                    f"more batches counted as consumed than epoch {self._epoch} has",
                    expected=f"at most {self._layout.num_batches(self._order.num_samples - self._offset)} from offset {self._offset}",
                    found=str(num_batches),
                    remedy="begin the next epoch with set_epoch()",
                )
            offset += size
        if offset > self._offset:
            self._note(offset)

    def _note(self, offset: int) -> None:
        """Moves to ``offset``, and keeps in mind what was taken on the way."""
        start = self._offset
        if self._spans and self._spans[-1][::2] == (self._epoch, start):
            start = self._spans.pop()[1]
        self._spans.append((self._epoch, start, offset))
        while len(self._spans) > 1 and sum(stop - start for _, start, stop in self._spans) - _length(self._spans[0]) >= WINDOW_IDS:
            self._spans.popleft()
        self._samples_consumed += offset - self._offset
        self._offset = offset
        self._run_out_at = None

    def skip_rest(self) -> None:
        """Counts what is left of this epoch as consumed, and begins the next one. ``ResumableLoader`` calls it at the end of an epoch.

        A rank that has no part in the last batch gets past it by this.
        """
        end = self._offset + self._layout.reach(self._order.num_samples - self._offset)
        if end > self._offset:
            self._note(end)
        self.set_epoch(self._epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; the one at hand is left as it is.

        Raises:
            InvalidOptionError: the epoch is no valid number.
            UsageError: it lies behind: training would go backwards.
        """
        if whole("epoch", epoch, least=0, most=MAX_SEED - 1) < self._epoch:
            raise UsageError(
                "the epoch lies behind the position",
                expected=f"epoch {self._epoch} or later",
                found=str(epoch),
                remedy="begin the loop at sampler.epoch; to train on earlier epochs again, make a new sampler",
            )
        if epoch > self._epoch:
            self._epoch, self._offset, self._run_out_at = int(epoch), 0, None

    def worker_seed(self) -> tuple[int, ...]:
        """Numbers that the seeds of a loader's workers may depend on: the run's seed, the position and the rank."""
        return self._order.seed, self._epoch, self._offset, self._rank

    def next_batch_hash(self) -> str:
        """A stable hash of the ids of the next global batch: of all ranks, in order."""
        epoch, start, stop = next_batch(self._order, self._layout, self._epoch, self._offset)
        return hash_ids(self._order.epoch(epoch).between(start, stop))

    def last_ids(self) -> list[int]:
        """What training took last, on all ranks, in this process and before: 1,000 ids at most, oldest first."""
        ids = list(self._ids_before)
        for epoch, start, stop in self._spans:
            ids += self._order.epoch(epoch).between(max(start, stop - WINDOW_IDS), stop).tolist()
        return ids[-WINDOW_IDS:]

    def next_ids(self) -> list[int]:
        """What training takes next, on all ranks: 1,000 ids, as far as this epoch and the next one have them."""
        ids: list[int] = next_ids(self._order, self._layout, self._epoch, self._offset).tolist()
        return ids

    def state_dict(self) -> dict[str, Any]:
        """The position, the order that it is in, and ids on both sides of it: some 20 KB of plain values, equal on all ranks."""
        position = SavedPosition(
            epoch=self._epoch,
            offset=self._offset,
            samples_consumed=self._samples_consumed,
            next_batch_hash=self.next_batch_hash(),
            last_ids=self.last_ids(),
            next_ids=self.next_ids(),
        )
        return {**asdict(self._order), **asdict(self._layout), **asdict(position)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to the position of a checkpoint. Batch size, number of ranks, ``drop_last`` and ``pad`` may be others than at the save.

        Raises:
            DataOrderError: the data set, seed or order is another one, or the position does not fit the ids that were recorded with it.
                Nothing is changed then.
        """
        position = read_position(state_dict, self._order)
        self._epoch = position.epoch
        self._offset = position.offset
        self._samples_consumed = position.samples_consumed
        self._ids_before = list(position.last_ids)
        self._spans.clear()
        self._run_out_at = None


def _length(span: tuple[int, int, int]) -> int:
    return span[2] - span[1]
