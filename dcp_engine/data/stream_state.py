"""What a checkpoint holds of a stream: plain values, from which the progress of a source comes back checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from dcp_engine.data.progress import Cursor, Dealt, PassLeft, SourceOrder, merge
from dcp_engine.errors import DataOrderError

__all__ = ["SavedStream", "StreamOrder", "merge_states", "read_stream", "without_repeats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """What decides the order of a stream's samples; progress means something in one such order alone.

    Attributes:
        seed: of the run.
        shuffle: whether shards are shuffled, pass by pass.
        num_passes: how often each source is read; ``None``: without end.
        names: of the sources, in order.
        shard_hashes: for each source, a hash of its shards' names in order.
        num_shards: for each source.
        weights: for each source.
    """

    seed: int
    shuffle: bool
    num_passes: int | None
    names: list[str]
    shard_hashes: list[str]
    num_shards: list[int]
    weights: list[float]

    def of_source(self, index: int) -> SourceOrder:
        """The order of one source's shards. Sources get seeds of their own, so that they are not shuffled alike."""
        return SourceOrder(self.num_shards[index], (self.seed + index) % 2**64, self.shuffle)


@dataclass(slots=True, kw_only=True)
class SavedStream:
    """Progress of one rank's lanes, or of all that were merged (``world_size`` 0 and no lanes).

    Attributes:
        world_size: ranks among which the shards were dealt out.
        rank: this one.
        num_workers: workers of each rank's loader.
        turn: which of the rank's workers hands out the next batch.
        samples_before: samples that all ranks handed out before the shards were last dealt out.
        repeat_window: samples that come again when a run resumes from here, on this rank.
        largest_repeat_window: the most that ``repeat_window`` was since the shards were last dealt out.
        largest_before: the most that it was before, on all ranks together.
        dealt: for each source, how it was dealt out.
        lanes: for each lane of this rank, its cursor in each source.
    """

    world_size: int
    rank: int
    num_workers: int
    turn: int
    samples_before: int
    repeat_window: int
    largest_repeat_window: int
    largest_before: int
    dealt: list[Dealt]
    lanes: list[list[Cursor]]

    @property
    def samples_consumed(self) -> int:
        """Samples that were handed out since the shards were dealt out, on this rank."""
        return sum(cursor.num_drawn for lane in self.lanes for cursor in lane)

    def as_dict(self) -> dict[str, Any]:
        """Scalars, and lists of lists of them, which no state dict takes apart."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["dealt"] = [_plain_dealt(dealt) for dealt in self.dealt]
        plain["lanes"] = [[list(astuple(cursor)) for cursor in lane] for lane in self.lanes]
        return plain


def _plain_dealt(dealt: Dealt) -> list[Any]:
    passes = [
        [number, sorted(left.done), [[shard, *place] for shard, place in sorted(left.begun.items())]]
        for number, left in sorted(dealt.passes.items())
    ]
    return [dealt.first_pass, passes]


def read_stream(state: Mapping[str, Any], order: StreamOrder) -> SavedStream:
    """Reads a state dict, and checks that it is progress in this order.

    Raises:
        DataOrderError: the sources, their shards, weights or seed are others; or it is no state of a stream.
    """
    if not isinstance(state, Mapping):
        raise DataOrderError("a stream's state is a dict", expected="what state_dict() returned", found=type(state).__qualname__)
    _check_keys(state)
    for field in fields(order):
        ours = getattr(order, field.name)
        if state[field.name] != ours:
            raise DataOrderError(
                f"the checkpoint's progress is in another stream: {field.name} differs",
                expected=f"{field.name} {state[field.name]!r}, as when it was saved",
                found=repr(ours),
                remedy="make the stream as it was (weights can be changed with set_weights() once the state is loaded), or start afresh",
            )
    try:
        return _parse(state, order)
    except (KeyError, TypeError, ValueError) as error:
        raise DataOrderError(f"this is no state of a stream: {error}", expected="what state_dict() returned") from error


def _check_keys(state: Mapping[str, Any]) -> None:
    missing = [field.name for kind in (StreamOrder, SavedStream) for field in fields(kind) if field.name not in state]
    if missing:
        raise DataOrderError(
            "this is no state of a stream",
            expected="what state_dict() of a ResumableStream returned",
            found=f"a dict without {', '.join(missing)}",
            remedy="load the state of the stream itself, not of what holds it",
        )


def _parse(state: Mapping[str, Any], order: StreamOrder) -> SavedStream:
    names = ("world_size", "rank", "num_workers", "turn", "samples_before", "repeat_window", "largest_repeat_window", "largest_before")
    numbers = {name: state[name] for name in names}
    dealt = []
    for first_pass, passes in state["dealt"]:
        lefts = {number: PassLeft(set(done), {shard: (offset, since) for shard, offset, since in begun}) for number, done, begun in passes}
        dealt.append(Dealt(first_pass, lefts))
    lanes = [[Cursor(*cursor) for cursor in lane] for lane in state["lanes"]]
    _check_numbers(state, order, numbers, dealt, lanes)
    return SavedStream(**numbers, dealt=dealt, lanes=lanes)


def _check_numbers(
    state: Mapping[str, Any], order: StreamOrder, numbers: dict[str, Any], dealt: list[Dealt], lanes: list[list[Cursor]]
) -> None:
    """Raises ``ValueError``, in words, for what no stream returns."""
    places = [number for one in dealt for left in one.passes.values() for place in left.begun.values() for number in place]
    flat = [*numbers.values(), *places, *(number for lane in lanes for cursor in lane for number in astuple(cursor))]
    flat += [number for one in dealt for number in (one.first_pass, *one.passes)]
    if not all(type(number) is int and number >= 0 for number in flat):
        raise ValueError("a number is negative or is none")
    sources = range(len(order.names))
    shards = [(source, shard) for source in sources for left in dealt[source].passes.values() for shard in (*left.done, *left.begun)]
    if len(dealt) != len(sources) or not all(type(shard) is int and 0 <= shard < order.num_shards[source] for source, shard in shards):
        raise ValueError("it names shards that there are not")
    merged = numbers["world_size"] == 0
    if len(lanes) != (0 if merged else max(numbers["num_workers"], 1)) or any(len(lane) != len(sources) for lane in lanes):
        raise ValueError(f"{len(lanes)} lanes for {state['num_workers']} workers")
    if not merged and numbers["rank"] >= numbers["world_size"]:
        raise ValueError(f"rank {numbers['rank']} of {numbers['world_size']}")


def without_repeats(cursor: Cursor, *, repeatable: bool) -> Cursor:
    """The cursor to resume at: of a source that is not read alike twice, what comes since the offset counts as new."""
    return cursor if repeatable else replace(cursor, num_since=0)


def _states_in(states: object) -> list[Mapping[str, Any]]:
    given = list(states) if isinstance(states, Sequence) else []
    if not given or not all(isinstance(state, Mapping) for state in given):
        raise DataOrderError(
            "there is no state of a stream to merge", expected="a list of what state_dict() returned on each rank", found=repr(states)[:300]
        )
    return given


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state out of those of all ranks, to be loaded on any number of ranks and workers.

    Args:
        states: what ``state_dict()`` returned on each rank, in any order.

    Raises:
        DataOrderError: a rank's is missing or there twice, or they are not of one stream and one dealing out.
    """
    given = _states_in(states)
    _check_keys(given[0])
    order = StreamOrder(**{field.name: given[0][field.name] for field in fields(StreamOrder)})
    saved = sorted((read_stream(state, order) for state in given), key=lambda one: one.rank)
    first = saved[0]
    if [one.rank for one in saved] != list(range(first.world_size)):
        raise DataOrderError(
            "the states are not those of all ranks", expected=f"ranks 0 to {first.world_size - 1}", found=str([one.rank for one in saved])
        )
    if any((one.world_size, one.num_workers, one.dealt) != (first.world_size, first.num_workers, first.dealt) for one in saved):
        raise DataOrderError("the states are not of one dealing out of the shards", expected="states of one step of one run")
    cursors = [lane for one in saved for lane in one.lanes]
    merged = SavedStream(
        world_size=0,
        rank=0,
        num_workers=0,
        turn=0,
        samples_before=first.samples_before + sum(one.samples_consumed for one in saved),
        repeat_window=sum(one.repeat_window for one in saved),
        largest_repeat_window=0,
        largest_before=max(first.largest_before, sum(one.largest_repeat_window for one in saved)),
        dealt=[merge(first.dealt[i], order.of_source(i), [lane[i] for lane in cursors]) for i in range(len(order.names))],
        lanes=[],
    )
    return {**{field.name: getattr(order, field.name) for field in fields(order)}, **merged.as_dict()}
