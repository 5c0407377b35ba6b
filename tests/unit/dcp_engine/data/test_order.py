"""The order of samples is the documented algorithm, a permutation, and the same for ever."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.data.order import MAX_SAMPLES, MAX_SEED, Order, hash_ids, hash_texts

WORD = 2**64 - 1


def reference(position: int, num_samples: int, seed: int, epoch: int) -> int:
    """The algorithm of the module's docstring, one number at a time with Python's own integers."""
    bits = (num_samples - 1).bit_length()
    num_low = (bits + 1) // 2
    keys = struct.unpack("<24Q", hashlib.shake_256(b"dcp-engine order 1" + struct.pack("<QQ", seed, epoch)).digest(192))
    found = position
    while True:
        low, high = found % 2**num_low, found >> num_low
        for number, key in enumerate(keys):
            if number % 2 == 0:
                low ^= mix(high ^ key) % 2**num_low
            else:
                high ^= mix(low ^ key) % 2 ** (bits - num_low)
        found = high << num_low | low
        if found < num_samples:
            return found


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


@given(st.integers(1, 300), st.integers(0, MAX_SEED), st.integers(0, MAX_SEED))
def test_every_epoch_is_a_permutation_with_an_inverse(num_samples: int, seed: int, epoch: int) -> None:
    order = Order(num_samples, seed=seed, epoch=epoch)
    ids = order.between(0, num_samples)
    assert ids.dtype == np.int64
    assert sorted(ids.tolist()) == list(range(num_samples))
    assert order.positions(ids).tolist() == list(range(num_samples))


@given(st.integers(2, MAX_SAMPLES), st.integers(0, MAX_SEED), st.integers(0, MAX_SEED), st.data())
def test_order_is_the_documented_algorithm_for_any_number_of_samples(num_samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=4))
    order = Order(num_samples, seed=seed, epoch=epoch)
    ids = order.ids(positions)
    assert ids.tolist() == [reference(position, num_samples, seed, epoch) for position in positions]
    assert order.positions(ids).tolist() == positions


def test_order_is_pinned() -> None:
    """Checkpoints hold positions in these orders: a change here breaks them."""
    assert Order(10, seed=0, epoch=0).between(0, 10).tolist() == [4, 6, 2, 1, 9, 7, 0, 5, 8, 3]
    assert Order(10**12, seed=7, epoch=3).between(0, 4).tolist() == [902708836326, 780581332056, 17679512148, 694130210143]


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    assert Order(1000, seed=3, epoch=2, shuffle=False).between(5, 9).tolist() == [5, 6, 7, 8]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(Order(50, seed=seed, epoch=epoch).between(0, 50).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize(("num_samples", "limit"), [(2, 10.8), (3, 20.5), (4, 49.7)])
def test_all_permutations_of_few_samples_are_equally_likely(num_samples: int, limit: float) -> None:
    """Chi-square over all permutations stays below the value that chance exceeds once in a thousand."""
    counts = Counter(tuple(Order(num_samples, seed=seed, epoch=0).between(0, num_samples).tolist()) for seed in range(2400))
    permutations = list(itertools.permutations(range(num_samples)))
    expected = 2400 / len(permutations)
    assert sum((counts[one] - expected) ** 2 / expected for one in permutations) < limit


def test_hash_depends_on_ids_and_their_order_alone() -> None:
    digest = hashlib.sha256(struct.pack("<3q", 3, 1, 2)).hexdigest()[:32]
    assert hash_ids([3, 1, 2]) == digest
    assert hash_ids(np.array([3, 1, 2], dtype=np.int32)) == digest
    assert hash_ids([1, 3, 2]) != digest
    assert hash_ids([]) == hashlib.sha256().hexdigest()[:32]


def test_hash_of_texts_keeps_them_apart() -> None:
    assert len({hash_texts(["ab", "c"]), hash_texts(["a", "bc"]), hash_texts(["abc"]), hash_texts(["c", "ab"])}) == 4
    assert len(hash_texts(["\udcff"])) == 32
