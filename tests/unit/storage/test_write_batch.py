"""How batches of blocks find their places in a file."""

from __future__ import annotations

import itertools

import pytest

from dcp_engine.storage.write_batch import Batch, Places


def test_places_are_known_once_all_lengths_before_are() -> None:
    places = Places(4096)
    batches = [Batch(index, []) for index in range(4)]

    assert places.announce(batches[2], 64) == []
    assert places.announce(batches[1], 128) == []
    assert batches[1].position is None
    assert places.announce(batches[0], 192) == batches[:3]
    assert places.announce(batches[3], 64) == [batches[3]]
    assert [batch.position for batch in batches] == [4096, 4288, 4416, 4480]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_places_do_not_depend_on_the_order_and_each_batch_is_placed_once(order: tuple[int, ...]) -> None:
    places = Places(0)
    batches = [Batch(index, []) for index in range(4)]
    placed = [found.index for index in order for found in places.announce(batches[index], 64 * (index + 1))]

    assert sorted(placed) == [0, 1, 2, 3]
    assert [batch.position for batch in batches] == [0, 64, 192, 384]


def test_a_batch_is_placed_beforehand_only_behind_others_that_are() -> None:
    places = Places(4096)
    batches = [Batch(index, []) for index in range(4)]

    places.place_next(batches[0], 64)
    places.place_next(batches[2], 64)
    assert [batch.position for batch in batches] == [4096, None, None, None]
    assert places.announce(batches[2], 128) == []
    assert places.announce(batches[1], 192) == batches[1:3]
    places.place_next(batches[3], 64)
    assert [batch.position for batch in batches] == [4096, 4160, 4352, 4480]
