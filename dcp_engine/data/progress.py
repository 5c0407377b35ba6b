"""Where the lanes of a stream are in its shards, and how what is left is dealt out again to another number of lanes. Pure.

A *lane* is what reads: one rank, or one worker of a rank's loader. In each *pass* over a source its shards have an order of their own;
those that were not done when shards were last dealt out are dealt to the lanes in turn. So no lane ever reads what another one reads, and
what all of them have done, together, can be dealt out anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dcp_engine.data.order import Order

__all__ = ["Cursor", "Dealt", "PassLeft", "SourceOrder", "advance_shard", "choose_source", "merge", "start_cursor"]


@dataclass(frozen=True, slots=True)
class SourceOrder:
    """The order of one source's shards, pass by pass.

    Attributes:
        num_shards: how many there are.
        seed: of this source.
        shuffle: ``False``: each pass takes them as they were given.
    """

    num_shards: int
    seed: int
    shuffle: bool

    def shards(self, num_pass: int) -> list[int]:
        """All shards, in the order of this pass."""
        order = Order(self.num_shards, seed=self.seed, epoch=num_pass, shuffle=self.shuffle)
        shards: list[int] = order.between(0, self.num_shards).tolist()
        return shards


@dataclass(slots=True)
class PassLeft:
    """What is done of one pass.

    Attributes:
        done: shards that are read to their end.
        begun: shard -> (offset, samples handed out since that offset).
    """

    done: set[int] = field(default_factory=set)
    begun: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Dealt:
    """One source as it was dealt out: all passes before ``first_pass`` are done.

    Attributes:
        first_pass: number of the first pass of which something is left.
        passes: number of the pass -> what is done of it; nothing of those that are not there.
    """

    first_pass: int = 0
    passes: dict[int, PassLeft] = field(default_factory=dict)

    def left(self, num_pass: int) -> PassLeft:
        """What is done of a pass."""
        return self.passes.get(num_pass) or PassLeft()

    def shards(self, order: SourceOrder, num_pass: int) -> list[int]:
        """The shards of a pass that are dealt out, in order: of n lanes, the first gets ``[0::n]`` of them."""
        done = self.left(num_pass).done
        return [shard for shard in order.shards(num_pass) if shard not in done]


@dataclass(slots=True)
class Cursor:
    """Where one lane is in one source.

    Attributes:
        num_pass: number of the pass.
        index: which of the lane's own shards of that pass; their number: none is left of it.
        offset: where to read on in that shard, as its reader told.
        num_since: samples that were handed out since that offset: they come again where a reader starts there.
        num_drawn: samples of this source that this lane handed out since it was dealt out.
        num_mixed: the same, since the weights were set.
    """

    num_pass: int
    index: int = 0
    offset: int = 0
    num_since: int = 0
    num_drawn: int = 0
    num_mixed: int = 0


def start_cursor(dealt: Dealt, order: SourceOrder, lane: int, num_lanes: int) -> Cursor:
    """The cursor of a lane to which nothing has happened since it was dealt out."""
    cursor = Cursor(dealt.first_pass)
    _enter(cursor, dealt, dealt.shards(order, cursor.num_pass)[lane::num_lanes])
    return cursor


def advance_shard(cursor: Cursor, dealt: Dealt, own: list[int]) -> None:
    """Goes to the next of the lane's ``own`` shards of the pass."""
    cursor.index += 1
    _enter(cursor, dealt, own)


def _enter(cursor: Cursor, dealt: Dealt, own: list[int]) -> None:
    begun = dealt.left(cursor.num_pass).begun
    cursor.offset, cursor.num_since = begun.get(own[cursor.index], (0, 0)) if cursor.index < len(own) else (0, 0)


def choose_source(weights: list[float], num_mixed: list[int], alive: list[bool]) -> int:
    """The source of a lane's next sample: of those that are alive (at least one), the one that is furthest behind its share.

    Source: the method of Webster and Sainte-Lague, by the smallest ``(2 * num_mixed + 1) / weight``, of several the first. So the mixture
    holds its ratios in every stretch of samples, without random numbers, and the same again after a resume.
    """
    return min((i for i, here in enumerate(alive) if here), key=lambda i: (2 * num_mixed[i] + 1) / weights[i])


def merge(dealt: Dealt, order: SourceOrder, cursors: list[Cursor]) -> Dealt:
    """What all lanes together have done of one source, to be dealt out to any number of lanes.

    Args:
        dealt: as the lanes were dealt out.
        order: of the source.
        cursors: of all lanes, in order.
    """
    merged = Dealt(dealt.first_pass)
    # A lane may be a pass ahead of the others, now or when they were dealt out.
    last_pass = max(*dealt.passes, *(cursor.num_pass for cursor in cursors), dealt.first_pass)
    for num_pass in range(dealt.first_pass, last_pass + 1):
        before = dealt.left(num_pass)
        left = PassLeft(set(before.done), dict(before.begun))
        shards = dealt.shards(order, num_pass)
        for lane, cursor in enumerate(cursors):
            own = shards[lane :: len(cursors)]
            index = len(own) if cursor.num_pass > num_pass else cursor.index if cursor.num_pass == num_pass else 0
            left.done.update(own[:index])
            if cursor.num_pass == num_pass and index < len(own) and (cursor.offset or cursor.num_since):
                left.begun[own[index]] = (cursor.offset, cursor.num_since)
        left.begun = {shard: place for shard, place in left.begun.items() if shard not in left.done}
        if merged.first_pass == num_pass and len(left.done) == order.num_shards:
            merged.first_pass = num_pass + 1
        elif left.done or left.begun:
            merged.passes[num_pass] = left
    return merged
