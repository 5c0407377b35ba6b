"""Samples from shards that have no index, in mixture ratios, from where a checkpoint left off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from dcp_engine.data.options import flag, place_of, whole
from dcp_engine.data.order import MAX_SEED, hash_texts
from dcp_engine.data.progress import Cursor, Dealt, advance_shard, choose_source, start_cursor
from dcp_engine.data.stream_state import SavedStream, StreamOrder, merge_states, read_stream, without_repeats
from dcp_engine.errors import DataOrderError, InvalidOptionError, UsageError

__all__ = ["ResumableStream", "StampedBatch", "StreamSource", "read_lines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """One source of a mixture.

    Attributes:
        shards: names of its shards: files, URLs, or whatever ``read`` understands; each once.
        read: ``read(shard, offset)`` gives pairs (sample, offset to read on at after it). Offset 0 is the shard's beginning; other ones are
            what ``read`` itself gave: a position in the file, a number of records. A reader that can begin in few places alone, or only at
            the beginning, gives the same offset (0) several times: the samples since then are read again and passed over.
        weight: share in the mixture, relative to that of the other sources.
        repeatable: whether a shard that is read again gives the same samples in the same order. If not, those since the offset cannot be
            passed over: they may come twice after a resume, and count in ``repeat_window``.
    """

    shards: Sequence[str]
    read: Callable[[str, int], Iterable[tuple[Any, int]]]
    weight: float = 1.0
    repeatable: bool = True

    def __post_init__(self) -> None:
        shards = tuple(self.shards) if isinstance(self.shards, Iterable) and not isinstance(self.shards, str | bytes) else ()
        if not shards or not all(isinstance(shard, str) for shard in shards) or len(set(shards)) != len(shards):
            raise InvalidOptionError(
                "the shards of a source are not valid", expected="at least one name, none twice", found=repr(self.shards)[:300]
            )
        object.__setattr__(self, "shards", shards)
        if not callable(self.read):
            raise InvalidOptionError("read is not callable", expected="read(shard, offset)", found=repr(self.read))
        object.__setattr__(self, "weight", _weight(self.weight))
        flag("repeatable", self.repeatable)


class StampedBatch(NamedTuple):
    """A batch on its way from a worker, and how far its lane had read when it was complete.

    Attributes:
        batch: what the collate function made.
        lane: number of the lane.
        cursors: for each source, the fields of its cursor.
    """

    batch: Any
    lane: int
    cursors: tuple[tuple[int, ...], ...]


class ResumableStream(IterableDataset[Any]):
    """Reads the sources' shards, each by one lane alone, and keeps where each is: shard order, offsets and mixture counts.

    A *lane* is one rank, or one worker of a rank. Each takes the source of its next sample by the ratios of the weights, which hold in
    every stretch of samples. A pass over a source ends for each lane when its own shards are read.

    Calls, on every rank:

    1. ``load_state_dict(state)``, when a run is resumed: before the stream is iterated.
    2. Iterate: the stream itself, or ``ResumableLoader(DataLoader(stream, num_workers=n, collate_fn=stream.collate(), ...))`` where the
       stream was made with ``num_workers=n``. Only what was handed to training counts.
    3. ``state_dict()``, between two samples or batches. It is another one on each rank: keep each, by rank. On other numbers of ranks or
       workers, load ``ResumableStream.merge(states)``.

    What comes twice after a resume is known: :attr:`repeat_window`, 0 with sources that are ``repeatable``. Nothing is left out.

    Args:
        sources: name -> source.
        seed: of the orders of shards, from 0 to 2**64 - 1; the same on all ranks.
        rank: which of the ranks that take different samples this is; by default that of the default process group, or 0 without one.
        world_size: how many such ranks there are.
        num_workers: of the rank's loader. Each source needs a shard for each rank and worker.
        num_passes: how often each source is read: ``None`` means without end. A source that has ended leaves the ratios of the others.
        shuffle: ``False``: shards are read as they were given, in each pass.

    Raises:
        InvalidOptionError: an argument is out of range, or a source has fewer shards than there are lanes.

    Thread-safety: not safe.
    """

    def __init__(
        self,
        sources: Mapping[str, StreamSource],
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int = 0,
        num_passes: int | None = None,
        shuffle: bool = True,
    ) -> None:
        self._rank, self._world_size = place_of(rank, world_size)
        self._num_workers = whole("num_workers", num_workers, least=0)
        _check_sources(sources)
        self._sources = list(sources.values())
        self._order = StreamOrder(
            seed=whole("seed", seed, least=0, most=MAX_SEED),
            shuffle=flag("shuffle", shuffle),
            num_passes=None if num_passes is None else whole("num_passes", num_passes, least=1),
            names=list(sources),
            shard_hashes=[hash_texts(source.shards) for source in self._sources],
            num_shards=[len(source.shards) for source in self._sources],
            weights=[source.weight for source in self._sources],
        )
        self._num_own = max(self._num_workers, 1)
        for name, source in sources.items():
            if len(source.shards) < self._world_size * self._num_own:
                raise InvalidOptionError(
                    f"source {name!r} has fewer shards than there are ranks and workers to read them",
                    expected=f"at least {self._world_size} x {self._num_own} shards",
                    found=str(len(source.shards)),
                    remedy="cut it into more shards, or read with fewer workers",
                )
        self._lane = self._rank * self._num_own
        self._iteration = 0  # number of the one that goes on: readers of an earlier one are where the cursors no longer are
        self._deal([Dealt() for _ in self._sources], samples_before=0, largest_before=0)

    def _deal(self, dealt: list[Dealt], *, samples_before: int, largest_before: int) -> None:
        first = self._rank * self._num_own
        num_lanes = self._world_size * self._num_own
        lanes = [
            [start_cursor(one, self._order.of_source(i), lane, num_lanes) for i, one in enumerate(dealt)]
            for lane in range(first, first + self._num_own)
        ]
        self._saved = SavedStream(
            world_size=self._world_size,
            rank=self._rank,
            num_workers=self._num_workers,
            turn=0,
            samples_before=samples_before,
            repeat_window=0,
            largest_repeat_window=0,
            largest_before=largest_before,
            dealt=dealt,
            lanes=lanes,
        )

    @property
    def samples_consumed(self) -> int:
        """Samples that this rank handed out since the shards were last dealt out: since the start, or since a merged state was loaded."""
        return self._saved.samples_consumed

    @property
    def repeat_window(self) -> int:
        """How many samples of this rank come again in a run that resumes from here."""
        cursors = (cursor for lane in self._saved.lanes for cursor in zip(lane, self._sources, strict=True))
        return sum(cursor.num_since for cursor, source in cursors if not source.repeatable)

    @property
    def largest_repeat_window(self) -> int:
        """The most that :attr:`repeat_window` was: on this rank since shards were last dealt out, on all ranks together before that."""
        return max(self._saved.largest_before, self._saved.largest_repeat_window, self.repeat_window)

    def __iter__(self) -> Iterator[Any]:
        """Samples of this process's lane.

        Raises:
            UsageError: the loader has another number of workers than the stream; or, while iterating, another iteration was begun or a
                state was loaded.
            DataOrderError: a shard does not hold what it held, or the lane's shards of a whole pass hold nothing.
        """
        worker = get_worker_info()
        if (worker.num_workers if worker is not None else 0) != self._num_workers:
            raise UsageError(
                "the loader has another number of workers than the stream was made for",
                expected=f"num_workers={self._num_workers}",
                found=f"num_workers={worker.num_workers if worker is not None else 0}",
            )
        # After a resume the first batch is that of the worker whose turn it is.
        own = (worker.id + self._saved.turn) % self._num_own if worker is not None else 0
        self._lane = self._rank * self._num_own + own
        self._iteration += 1
        return self._samples(own, self._iteration)

    def _note_window(self) -> None:
        self._saved.largest_repeat_window = max(self._saved.largest_repeat_window, self.repeat_window)

    def _samples(self, own: int, iteration: int) -> Iterator[Any]:
        cursors = self._saved.lanes[own]
        readers = [self._read_source(i, cursors[i], self._lane) for i in range(len(self._sources))]
        alive = [True] * len(readers)
        while any(alive):
            if iteration != self._iteration:
                raise UsageError(
                    "the stream was iterated anew, or a state was loaded, while it was iterated",
                    remedy="load states before iterating, and run one iteration at a time",
                )
            i = choose_source(self._order.weights, [cursor.num_mixed for cursor in cursors], alive)
            try:
                sample, offset = next(readers[i])
            except StopIteration:
                alive[i] = False
                continue
            cursor = cursors[i]
            cursor.offset, cursor.num_since = (offset, 0) if offset != cursor.offset else (offset, cursor.num_since + 1)
            cursor.num_drawn, cursor.num_mixed = cursor.num_drawn + 1, cursor.num_mixed + 1
            self._note_window()
            yield sample

    def _read_source(self, i: int, cursor: Cursor, lane: int) -> Iterator[tuple[Any, int]]:
        """Samples of one source, with offsets, from the cursor on; moves it from shard to shard and pass to pass."""
        order, dealt, source = self._order.of_source(i), self._saved.dealt[i], self._sources[i]
        num_lanes = self._world_size * self._num_own
        drawn_before = -1  # a first pass may have been read before
        while self._order.num_passes is None or cursor.num_pass < self._order.num_passes:
            own = dealt.shards(order, cursor.num_pass)[lane::num_lanes]
            while cursor.index < len(own):
                yield from self._read_shard(source, source.shards[own[cursor.index]], cursor)
                advance_shard(cursor, dealt, own)
            if self._order.num_passes is None and drawn_before == cursor.num_drawn:  # it would be looked for without end
                raise DataOrderError(
                    f"the shards of source {self._order.names[i]!r} that lane {lane} reads hold no samples", rank=self._rank
                )
            drawn_before = cursor.num_drawn
            cursor.num_pass, cursor.index = cursor.num_pass + 1, -1
            advance_shard(cursor, dealt, dealt.shards(order, cursor.num_pass)[lane::num_lanes])

    def _read_shard(self, source: StreamSource, shard: str, cursor: Cursor) -> Iterator[tuple[Any, int]]:
        samples = iter(source.read(shard, cursor.offset))
        for number in range(cursor.num_since):
            if next(samples, None) is None:
                raise DataOrderError(
                    "a shard does not hold the samples that it held at the save",
                    file=shard,
                    rank=self._rank,
                    expected=f"at least {cursor.num_since} samples from offset {cursor.offset}",
                    found=str(number),
                    remedy="restore the shard, or say repeatable=False of its source",
                )
        for sample, offset in samples:
            if type(offset) is not int or offset < 0:
                raise UsageError("read gave an offset that is none", file=shard, expected="an int of at least 0", found=repr(offset))
            yield sample, offset

    def collate(self, collate_fn: Callable[[list[Any]], Any] = default_collate) -> Callable[[list[Any]], StampedBatch]:
        """The ``collate_fn`` of a ``DataLoader`` over this stream: each batch also says how far its lane had read.

        Args:
            collate_fn: makes a batch of samples. With workers that are spawned it must be picklable.

        Raises:
            InvalidOptionError: it is not callable.
        """
        if not callable(collate_fn):
            raise InvalidOptionError("collate_fn is not callable", expected="collate_fn(samples)", found=repr(collate_fn)[:300])
        return _Stamp(self, collate_fn)

    def stamp(self, batch: Any) -> StampedBatch:
        """Adds to a batch how far this process's lane has read."""
        cursors = self._saved.lanes[self._lane - self._rank * self._num_own]
        return StampedBatch(batch, self._lane, tuple(astuple(cursor) for cursor in cursors))

    def consumed(self, stamped: StampedBatch) -> None:
        """Counts a batch as handed to training. ``ResumableLoader`` calls it.

        Raises:
            InvalidOptionError: it is no batch of ``collate()``.
        """
        if not isinstance(stamped, StampedBatch):
            raise InvalidOptionError(
                "this is no batch of the stream", expected="what collate_fn=stream.collate() makes", found=f"a {type(stamped).__qualname__}"
            )
        own = stamped.lane - self._rank * self._num_own
        if self._num_workers:  # otherwise the lane is this process's, and has moved already
            self._saved.lanes[own] = [Cursor(*numbers) for numbers in stamped.cursors]
            self._saved.turn = (own + 1) % self._num_own
        self._note_window()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the mixture from here on, on all ranks alike, and before the stream is iterated again: workers hold copies.

        Raises:
            InvalidOptionError: a source lacks a weight, a name is of no source, or a weight is not a finite number above 0.
        """
        if not isinstance(weights, Mapping) or set(weights) != set(self._order.names):
            found = str(list(weights)) if isinstance(weights, Mapping) else repr(weights)[:300]
            raise InvalidOptionError(
                "weights are not those of the sources", expected=f"a weight for each of {self._order.names}", found=found
            )
        self._order = replace(self._order, weights=[_weight(weights[name]) for name in self._order.names])
        for lane in self._saved.lanes:
            for cursor in lane:
                cursor.num_mixed = 0

    def worker_seed(self) -> tuple[int, ...]:
        """Numbers that the seeds of a loader's workers may depend on: the run's seed, the samples so far and the rank."""
        return self._order.seed, self._saved.samples_before, self.samples_consumed, self._rank

    def state_dict(self) -> dict[str, Any]:
        """Progress of this rank, as plain values. Another one on each rank."""
        self._saved.repeat_window = self.repeat_window
        return {**{field.name: getattr(self._order, field.name) for field in fields(self._order)}, **self._saved.as_dict()}

    merge = staticmethod(merge_states)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint: with this rank's own state, or with what ``merge`` made of those of all ranks.

        Raises:
            DataOrderError: the sources, shards, weights or seed are others, or it is one rank's state of another number of ranks or
                workers. Nothing is changed then.
        """
        saved = read_stream(state_dict, self._order)
        if saved.world_size == 1 and (self._world_size, self._num_workers) != (1, saved.num_workers):
            saved = read_stream(merge_states([state_dict]), self._order)
        if saved.world_size == 0:
            for source, dealt in zip(self._sources, saved.dealt, strict=True):
                for left in dealt.passes.values():
                    left.begun = {s: (offset, since if source.repeatable else 0) for s, (offset, since) in left.begun.items()}
            self._iteration += 1
            self._deal(saved.dealt, samples_before=saved.samples_before, largest_before=saved.largest_before)
            return
        ours, theirs = (self._world_size, self._rank, self._num_workers), (saved.world_size, saved.rank, saved.num_workers)
        if ours != theirs:
            raise DataOrderError(
                "this is the state of one rank among others",
                expected="rank {1} of {0} with {2} workers".format(*theirs),
                found="rank {1} of {0} with {2} workers".format(*ours),
                remedy="load ResumableStream.merge(states) of the states of all ranks",
            )
        saved.lanes = [
            [without_repeats(cursor, repeatable=source.repeatable) for cursor, source in zip(lane, self._sources, strict=True)]
            for lane in saved.lanes
        ]
        self._iteration += 1
        self._saved = saved


class _Stamp:
    """A picklable collate function; in a worker, its stream is the one that the worker reads."""

    def __init__(self, stream: ResumableStream, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._stream, self._collate_fn = stream, collate_fn

    def __call__(self, samples: list[Any]) -> StampedBatch:
        return self._stream.stamp(self._collate_fn(samples))


def read_lines(path: str, offset: int) -> Iterator[tuple[bytes, int]]:
    """Lines of a file from a byte offset on, without their ends, each with the offset of the next: a reader for :class:`StreamSource`."""
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            yield line.rstrip(b"\r\n"), offset


def _check_sources(sources: object) -> None:
    are_sources = isinstance(sources, Mapping) and all(
        isinstance(name, str) and isinstance(source, StreamSource) for name, source in sources.items()
    )
    if not sources or not are_sources:
        raise InvalidOptionError(
            "there are no valid sources", expected="a dict of StreamSource by name, at least one", found=repr(sources)[:300]
        )


def _weight(weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise InvalidOptionError("a weight is out of range", expected="a finite number above 0", found=repr(weight))
    return float(weight)
