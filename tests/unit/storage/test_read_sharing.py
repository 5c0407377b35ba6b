"""Who reads which block: every one is read once by a rank that wants it, evenly, and both sides of a message see the same message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.storage.read_sharing import Sharing, pack_blocks, share_blocks

UNBOUNDED = 1 << 60


def share(wanted: Sequence[Sequence[int]], extents: Sequence[int], round_bytes: int = UNBOUNDED) -> list[Sharing]:
    """The part of every rank."""
    packed = [pack_blocks(np.array(blocks, dtype=np.int64), len(extents)) for blocks in wanted]
    sizes = np.array(extents, dtype=np.int64)
    return [share_blocks(packed, sizes, rank=rank, round_bytes=round_bytes) for rank in range(len(wanted))]


def reads_of(sharing: Sharing, rank: int) -> list[int]:
    sent = [message.blocks for messages in sharing.rounds for message in messages if message.reader == rank]
    return sorted(np.concatenate([sharing.alone, *sent]).tolist())


def test_replicas_read_neighbouring_halves() -> None:
    first, second = share([range(6), range(6)], [100] * 6)
    assert (reads_of(first, 0), reads_of(second, 1)) == ([0, 1, 2], [3, 4, 5])
    (message, other) = first.rounds[0]
    assert (message.reader, message.receivers, message.blocks.tolist(), message.begin, message.end) == (0, (1,), [0, 1, 2], 0, 300)
    assert (other.reader, other.receivers, other.blocks.tolist(), other.begin, other.end) == (1, (), [3, 4, 5], 300, 600)
    assert (first.num_read_bytes, first.buffer_bytes) == (300, 600)


def test_what_nobody_else_wants_is_read_alone_and_counts() -> None:
    sharings = share([[0, 1, 2, 3], [3, 4, 5, 6], [3, 4]], [100, 100, 100, 100, 100, 100, 100])
    assert [sharing.alone.tolist() for sharing in sharings] == [[0, 1, 2], [5, 6], []]
    # Rank 2 has nothing else to read: both shared blocks do not outweigh what the others read alone.
    assert [reads_of(sharing, rank) for rank, sharing in enumerate(sharings)] == [[0, 1, 2], [5, 6], [3, 4]]
    assert [sharing.num_read_bytes for sharing in sharings] == [300, 200, 200]


def test_two_replicas_of_two_shards_exchange_within_their_pairs() -> None:
    sharings = share([[0, 1], [2, 3], [0, 1], [2, 3]], [64] * 4)
    assert [reads_of(sharing, rank) for rank, sharing in enumerate(sharings)] == [[0], [2], [1], [3]]
    assert [[(message.reader, message.receivers) for message in sharing.rounds[0]] for sharing in sharings] == [
        [(0, (2,)), (2, ())],
        [(1, (3,)), (3, ())],
        [(0, ()), (2, (0,))],
        [(1, ()), (3, (1,))],
    ]


def test_shares_are_even_by_bytes_not_by_blocks() -> None:
    sharings = share([range(5), range(5)], [400, 100, 100, 100, 100])
    assert [reads_of(sharing, rank) for rank, sharing in enumerate(sharings)] == [[0], [1, 2, 3, 4]]


def test_readers_go_abreast_through_the_rounds() -> None:
    sharings = share([range(8), range(8)], [100] * 8, round_bytes=400)
    rounds = [[(message.reader, message.blocks.tolist()) for message in messages] for messages in sharings[0].rounds]
    assert rounds == [[(0, [0, 1]), (1, [4, 5])], [(0, [2, 3]), (1, [6, 7])]]


@pytest.mark.parametrize("wanted", [[], [[]], [[], [], []]])
def test_where_nobody_wants_anything_there_are_no_rounds(wanted: list[list[int]]) -> None:
    for sharing in share(wanted, [100, 100]):
        assert (sharing.alone.tolist(), sharing.rounds, sharing.num_read_bytes, sharing.buffer_bytes) == ([], [], 0, 0)


def test_a_checkpoint_without_blocks_is_shared_by_doing_nothing() -> None:
    assert [(sharing.alone.tolist(), sharing.rounds) for sharing in share([[], []], [])] == [([], []), ([], [])]


def test_a_set_of_blocks_takes_at_most_a_bit_a_block() -> None:
    noise = np.flatnonzero(np.random.default_rng(0).integers(0, 2, 80_000))
    assert len(pack_blocks(noise, 80_000)) <= 10_100
    assert len(pack_blocks(np.arange(80_000), 80_000)) <= 100


@st.composite
def wishes(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    num_blocks = draw(st.integers(0, 24))
    num_ranks = draw(st.integers(1, 6))
    blocks = st.lists(st.integers(0, num_blocks - 1), unique=True).map(sorted) if num_blocks else st.just([])
    kinds = draw(st.lists(blocks, min_size=1, max_size=3))
    wanted = [draw(st.one_of(st.sampled_from(kinds), blocks)) for _ in range(num_ranks)]
    extents = draw(st.lists(st.integers(1, 40).map(lambda units: units * 64), min_size=num_blocks, max_size=num_blocks))
    return wanted, extents, draw(st.integers(1, 200).map(lambda units: units * 64))


@given(wishes())
def test_every_block_is_read_once_by_a_rank_that_wants_it_and_reaches_all_that_do(case: tuple[list[list[int]], list[int], int]) -> None:
    wanted, extents, round_bytes = case
    sharings = share(wanted, extents, round_bytes)
    read: list[int] = []
    for rank, sharing in enumerate(sharings):
        mine = reads_of(sharing, rank)
        read += mine
        assert sharing.num_read_bytes == sum(extents[block] for block in mine)
        held = [block for messages in sharing.rounds for message in messages for block in message.blocks.tolist()]
        assert sorted([*sharing.alone.tolist(), *held]) == wanted[rank]
    assert sorted(read) == sorted({block for blocks in wanted for block in blocks})


@given(wishes())
def test_both_sides_of_every_message_see_it_alike(case: tuple[list[list[int]], list[int], int]) -> None:
    sharings = share(*case)
    assert len({len(sharing.rounds) for sharing in sharings}) == 1
    for messages in zip(*(sharing.rounds for sharing in sharings), strict=True):
        sent = {
            (message.reader, receiver, message.tag): message.blocks.tolist()
            for rank, mine in enumerate(messages)
            for message in mine
            if message.reader == rank
            for receiver in message.receivers
        }
        got = {
            (message.reader, rank, message.tag): message.blocks.tolist()
            for rank, mine in enumerate(messages)
            for message in mine
            if message.reader != rank
        }
        assert sent == got != {}


@given(wishes())
def test_no_rank_holds_more_of_a_round_than_it_may(case: tuple[list[list[int]], list[int], int]) -> None:
    _, extents, round_bytes = case
    for sharing in share(*case):
        for messages in sharing.rounds:
            end = 0
            for message in messages:
                assert message.begin == end
                end += sum(extents[block] for block in message.blocks)
                assert message.end == end
            num_blocks = sum(len(message.blocks) for message in messages)
            assert end <= round_bytes or num_blocks == 1
            assert sharing.buffer_bytes >= end


@given(st.integers(1, 9), st.lists(st.integers(1, 65_536).map(lambda units: units * 64), max_size=60))
def test_equal_wishes_are_divided_evenly_to_a_block(num_ranks: int, extents: list[int]) -> None:
    sharings = share([range(len(extents))] * num_ranks, extents)
    even = sum(extents) / num_ranks
    assert max(sharing.num_read_bytes for sharing in sharings) <= even + max(extents, default=0)


def test_many_ranks_and_blocks_are_shared_evenly() -> None:
    """256 shards in 4 replicas, whose borders do not coincide with those of blocks."""
    num_ranks, num_blocks, block = 1024, 100_000, 4 << 20
    shards = [np.arange(num_blocks * s // 256, min(num_blocks * (s + 1) // 256 + 1, num_blocks)) for s in range(256)]
    packed = [pack_blocks(shards[rank % 256], num_blocks) for rank in range(num_ranks)]
    extents = np.full(num_blocks, block)
    sharing = share_blocks(packed, extents, rank=700, round_bytes=64 << 20)
    even = num_blocks / num_ranks
    assert even - 3 <= sharing.num_read_bytes / block <= even + 3
    assert sharing.buffer_bytes <= 64 << 20
    # 391 blocks, 16 of them in a round.
    assert 25 <= len(sharing.rounds) <= 52
