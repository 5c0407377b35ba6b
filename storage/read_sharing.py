"""Decides which rank reads which block when ranks share the reading, and in which round it passes it on. Pure: numpy on columns."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Message", "Sharing", "pack_blocks", "share_blocks"]

_Blocks = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Blocks that one rank reads and the same other ranks want, so that all of them travel together.

    Attributes:
        tag: tells it from the other messages of its round between the same two ranks; the same number on both sides.
        reader: rank that reads the blocks and sends them.
        receivers: ranks to which this rank sends them, ascending; none where it is not the reader.
        blocks: indices among the blocks of all files, ascending.
        begin: where the message begins in this rank's buffer of the round, in bytes; blocks follow one another, padding included.
        end: byte after its last one.
    """

    tag: int
    reader: int
    receivers: tuple[int, ...]
    blocks: _Blocks
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """One rank's part of a shared read.

    Attributes:
        alone: blocks that no other rank wants, ascending.
        rounds: for each round, the messages that this rank sends or gets. All ranks have the same number of rounds.
        num_read_bytes: extents of all blocks that this rank reads.
    """

    alone: _Blocks
    rounds: list[list[Message]]
    num_read_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Most that this rank holds of one round, in bytes."""
        return max((messages[-1].end for messages in self.rounds if messages), default=0)


def pack_blocks(blocks: _Blocks, num_blocks: int) -> bytes:
    """A set of blocks as compressed bits: at most an eighth of a byte for each of the ``num_blocks`` that there are."""
    wanted = np.zeros(num_blocks, dtype=np.bool_)
    wanted[blocks] = True
    return zlib.compress(np.packbits(wanted).tobytes(), 1)


def share_blocks(wanted: Sequence[bytes], extents: _Blocks, *, rank: int, round_bytes: int) -> Sharing:
    """Divide the reading of all wanted blocks among the ranks that want them.

    Every rank calls this with the same arguments but for ``rank``, and so knows what the others do. A block is read by exactly one of the
    ranks that want it. Blocks that the same ranks want are divided among these in runs, by bytes, such that who has less to read so far
    gets more. Replicas, columns of one block and wishes that overlap in part are all the same case.

    Near linear in the number of blocks times the number of different wishes: equal ones are looked at once. Integer arithmetic only, so
    that all machines find the same.

    Args:
        wanted: for each rank, the blocks that it wants, packed by :func:`pack_blocks`.
        extents: bytes of each block in its file, padding included.
        rank: whose part is asked for.
        round_bytes: no rank holds more than this of one round, whether it read it or was sent it; a single block is always allowed.
    """
    wishes, wish_of_rank = _distinct(wanted, len(extents))
    groups, wishes_of_group = _group_blocks(wishes, len(extents))
    ranks_of_wish: list[list[int]] = [[] for _ in wishes]
    for number, wish in enumerate(wish_of_rank):
        ranks_of_wish[wish].append(number)
    ranks = [sorted(itertools.chain.from_iterable(ranks_of_wish[wish] for wish in members)) for members in wishes_of_group]
    readers, num_read_bytes = _choose_readers(groups, ranks, extents, len(wanted))
    is_shared = np.array([len(members) > 1 for members in ranks])[groups]
    order = _order_of_passing(np.flatnonzero(is_shared), readers, extents)
    place = np.full(len(extents), -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    mine = wishes[wish_of_rank[rank]]
    begins = _cut_rounds([place[blocks[is_shared[blocks]]] for blocks in wishes], extents[order], round_bytes)
    rounds = _messages(mine[is_shared[mine]], place, begins, readers, groups, ranks, extents, rank)
    return Sharing(mine[~is_shared[mine]], rounds, int(num_read_bytes[rank]))


def _distinct(wanted: Sequence[bytes], num_blocks: int) -> tuple[list[_Blocks], list[int]]:
    """The different sets of blocks, and which of them each rank wants."""
    numbers: dict[bytes, int] = {}
    # Packed sets of equal bits may differ where ranks run other releases of zlib.
    of_rank = [numbers.setdefault(zlib.decompress(packed), len(numbers)) for packed in wanted]
    bits = (np.frombuffer(text, dtype=np.uint8) for text in numbers)
    return [np.flatnonzero(np.unpackbits(column, count=num_blocks)) for column in bits], of_rank


def _group_blocks(wishes: Sequence[_Blocks], num_blocks: int) -> tuple[_Blocks, list[tuple[int, ...]]]:
    """Number blocks such that those with the same number are in the same wishes.

    Wishes are added one by one, and each splits the groups that it cuts through.

    Returns:
        The group of each block; and for each group its wishes, none for group 0. Some groups have no block left.
    """
    groups = np.zeros(num_blocks, dtype=np.int64)
    members: list[tuple[int, ...]] = [()]
    for wish, blocks in enumerate(wishes):
        before, row = np.unique(groups[blocks], return_inverse=True)
        groups[blocks] = len(members) + row.reshape(-1)
        members.extend((*members[group], wish) for group in before.tolist())
    return groups, members


def _choose_readers(groups: _Blocks, ranks: Sequence[Sequence[int]], extents: _Blocks, num_ranks: int) -> tuple[_Blocks, _Blocks]:
    """Choose the rank that reads each block, -1 where nobody wants it, and count what each rank reads, in bytes.

    Groups of few ranks come first: they have the least choice, and the others make up for it.
    """
    readers = np.full(len(groups), -1, dtype=np.int64)
    loads = np.zeros(num_ranks, dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    borders = np.flatnonzero(np.diff(groups[order], prepend=-1, append=-1))
    parts = [order[begin:end] for begin, end in itertools.pairwise(borders.tolist())]
    for blocks in sorted(parts, key=lambda part: (len(ranks[groups[part[0]]]), part[0])):
        members = np.array(ranks[groups[blocks[0]]], dtype=np.int64)
        if not len(members):
            continue
        sizes = extents[blocks]
        stops = np.cumsum(sizes)
        quotas = _quotas(loads[members], int(stops[-1]))
        # A block belongs to the quota in which its middle lies. Quotas may add up to more than there is, never to less.
        chosen = members[np.searchsorted(np.cumsum(quotas), stops - (sizes + 1) // 2, side="right")]
        readers[blocks] = chosen
        np.add.at(loads, chosen, sizes)
    return readers, loads


def _quotas(loads: _Blocks, num_bytes: int) -> _Blocks:
    """Divide ``num_bytes`` such that the loads become as equal as they can without taking any away. At most a byte a rank too much."""
    ascending = np.sort(loads)
    counts = np.arange(1, len(loads) + 1)
    levels = (num_bytes + np.cumsum(ascending) + counts - 1) // counts  # if just so many of the least loaded take all
    fits = np.append(levels[:-1] <= ascending[1:], True)
    return np.maximum(int(levels[int(np.argmax(fits))]) - loads, 0)


def _order_of_passing(shared: _Blocks, readers: _Blocks, extents: _Blocks) -> _Blocks:
    """Shared blocks in the order in which they are passed on: all readers go through their own in file order, abreast by bytes."""
    by_reader = shared[np.argsort(readers[shared], kind="stable")]
    stops = np.cumsum(extents[by_reader])
    starts = stops - extents[by_reader]
    is_first = np.diff(readers[by_reader], prepend=-1) != 0
    first_of = np.maximum.accumulate(np.where(is_first, np.arange(len(by_reader)), 0))
    progress = starts - starts[first_of]
    return by_reader[np.lexsort((readers[by_reader], progress))]


def _cut_rounds(places: Sequence[_Blocks], extents: _Blocks, round_bytes: int) -> _Blocks:
    """Cut the order of passing into rounds, each as long as the bound allows.

    Args:
        places: for each wish, where in the order its shared blocks are. Whoever has a wish holds all of it, whoever reads it.
        extents: bytes of each block, in the order.
        round_bytes: the bound.

    Returns:
        Where each round begins.
    """
    runs = []
    for wish in places:
        ascending = np.sort(wish)
        runs.append((ascending, np.concatenate(([0], np.cumsum(extents[ascending])))))
    begins = []
    begin = 0
    while begin < len(extents):
        begins.append(begin)
        end = len(extents)
        for ascending, sums in runs:
            first = int(np.searchsorted(ascending, begin))
            last = int(np.searchsorted(sums, sums[first] + round_bytes, side="right")) - 1
            if last < len(ascending):
                end = min(end, int(ascending[last]))
        begin = max(end, begin + 1)
    return np.array(begins, dtype=np.int64)


def _messages(
    blocks: _Blocks,
    place: _Blocks,
    begins: _Blocks,
    readers: _Blocks,
    groups: _Blocks,
    ranks: Sequence[Sequence[int]],
    extents: _Blocks,
    rank: int,
) -> list[list[Message]]:
    """The messages of the shared ``blocks`` of ``rank``, round by round, in an order that its partners see, too."""
    rounds = np.searchsorted(begins, place[blocks], side="right") - 1
    order = np.lexsort((blocks, groups[blocks], readers[blocks], rounds))
    blocks, rounds = blocks[order], rounds[order]
    keys = np.stack((rounds, readers[blocks], groups[blocks]))
    borders = np.flatnonzero(np.append(np.any(np.diff(keys, prepend=-1) != 0, axis=0), True))
    messages: list[list[Message]] = [[] for _ in begins]
    for first, last in itertools.pairwise(borders.tolist()):
        of_round = messages[rounds[first]]
        reader, group = int(readers[blocks[first]]), int(groups[blocks[first]])
        begin = of_round[-1].end if of_round else 0
        end = begin + int(extents[blocks[first:last]].sum())
        receivers = tuple(other for other in ranks[group] if other != rank) if reader == rank else ()
        of_round.append(Message(group, reader, receivers, blocks[first:last], begin, end))
    return messages
