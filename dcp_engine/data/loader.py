"""A loader's batches, counted when training gets them rather than when the loader fetches them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from dcp_engine.data.sampler import ResumableSampler
from dcp_engine.data.stream import ResumableStream, StampedBatch
from dcp_engine.errors import InvalidOptionError, UnsupportedModeError, UsageError

__all__ = ["ResumableLoader"]


class ResumableLoader:
    """Iterates a ``DataLoader`` over a ``ResumableSampler`` or ``ResumableStream``, and counts for it what training consumed.

    A batch counts from the moment it is handed out: save after the optimizer's step for it, not before. What the loader's workers fetched
    ahead does not count. One iteration is what is left of the epoch; at its end the next epoch begins::

        for epoch in range(sampler.epoch, num_epochs):
            for batch in loader:
                ...

    A save after the last batch of an epoch resumes there: the first iteration is empty then, and what follows the inner loop runs.

    Iterating draws nothing from the global generator of torch, which a ``DataLoader`` does at the start of each iteration: a resume in the
    middle of an epoch, which starts one more, would change all that is drawn after it. The workers' seeds depend on the run's seed and on
    the position instead.

    Args:
        loader: made with ``batch_sampler=ResumableSampler(...)`` (for data sets that take a list of indices at once
            ``sampler=ResumableSampler(...), batch_size=None``), or with a ``ResumableStream`` and its ``collate()``.

    Raises:
        InvalidOptionError: it is made with neither.
        UnsupportedModeError: it hands batches out in another order than it fetches them, or keeps workers that would go on with a stream
            from where they were.

    Thread-safety: not safe.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        source = _source_of(loader) if isinstance(loader, DataLoader) else None
        if source is None:
            raise InvalidOptionError(
                "the loader has no position to count in",
                expected="a DataLoader with batch_sampler=ResumableSampler(...), or over a ResumableStream",
                found=f"{type(loader).__qualname__} over {type(getattr(loader, 'dataset', None)).__qualname__}",
            )
        if not getattr(loader, "in_order", True):
            raise UnsupportedModeError("batches out of order have no position", expected="a DataLoader with in_order=True")
        if isinstance(source, ResumableStream) and loader.persistent_workers:
            raise UnsupportedModeError("persistent workers keep their place in a stream", expected="persistent_workers=False")
        self._loader = loader
        self._source = source

    @property
    def source(self) -> ResumableSampler | ResumableStream:
        """What holds the position."""
        return self._source

    def __len__(self) -> int:
        """Batches of a whole epoch. A stream has no length."""
        if isinstance(self._source, ResumableStream):
            raise TypeError("a ResumableStream has no length")
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        """Batches from the position on.

        Raises:
            UsageError: between two batches, the position was changed by something else: a state was loaded, another iteration or
                ``consumed()`` counted. Or the loader over a stream lacks ``collate_fn=stream.collate()``.
        """
        if isinstance(self._source, ResumableStream):
            return self._iterate_stream(self._source)
        return self._iterate_sampler(self._source)

    def _iterate_sampler(self, sampler: ResumableSampler) -> Iterator[Any]:
        place = (sampler.epoch, sampler.offset)
        sampler.rewind()
        for batch in self._start(sampler.worker_seed()):
            if (sampler.epoch, sampler.offset) != place:
                raise UsageError(
                    "the position was changed while the loader was iterated",
                    expected="offset {1} of epoch {0}".format(*place),
                    found=f"offset {sampler.offset} of epoch {sampler.epoch}",
                    remedy="load states before iterating, run one iteration at a time, and leave counting to ResumableLoader",
                )
            sampler.consumed()
            place = (sampler.epoch, sampler.offset)
            yield batch
        if (sampler.epoch, sampler.offset) == place:
            sampler.skip_rest()

    def _iterate_stream(self, stream: ResumableStream) -> Iterator[Any]:
        for stamped in self._start(stream.worker_seed()):
            if not isinstance(stamped, StampedBatch):
                raise UsageError(
                    "the loader's batches do not say how far the stream was read",
                    expected="DataLoader(stream, collate_fn=stream.collate(your_collate_fn), ...)",
                    found=type(stamped).__qualname__,
                )
            stream.consumed(stamped)
            yield stamped.batch

    def _start(self, seed: tuple[int, ...]) -> Iterator[Any]:
        """Starts an iteration of the loader, which draws the seed of its workers from a generator: not from training's."""
        generator = self._loader.generator if self._loader.generator is not None else torch.default_generator
        before = generator.get_state()
        data = b"dcp-engine workers 1" + struct.pack(f"<{len(seed)}Q", *seed)
        generator.manual_seed(int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1)  # torch takes seeds below 2**63
        try:
            return iter(self._loader)
        finally:
            generator.set_state(before)

    def state_dict(self) -> dict[str, Any]:
        """That of the sampler or stream."""
        return self._source.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to the position of a checkpoint; before the loader is iterated."""
        self._source.load_state_dict(state_dict)


def _source_of(loader: DataLoader[Any]) -> ResumableSampler | ResumableStream | None:
    # With batch_size=None a loader has no batch sampler, and its sampler gives whole batches.
    ids = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return next((one for one in (ids, loader.dataset) if isinstance(one, ResumableSampler | ResumableStream)), None)
