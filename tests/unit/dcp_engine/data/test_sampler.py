"""A sampler's position is one number for all ranks: another number of ranks goes on with exactly what comes next."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.data import ResumableSampler, check_continuation
from dcp_engine.data.order import Order, hash_ids
from dcp_engine.errors import DataOrderError, InvalidOptionError, UsageError
from dcp_engine.objects import decode_object, encode_object


def ranks(
    num_samples: int, world_size: int, batch_size: int, state: dict[str, Any] | None = None, **options: Any
) -> list[ResumableSampler]:
    samplers = [
        ResumableSampler(num_samples, batch_size=batch_size, rank=rank, world_size=world_size, **{"seed": 5, **options})
        for rank in range(world_size)
    ]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


def train(samplers: list[ResumableSampler], num_batches: int) -> list[int]:
    """Trains for some batches, over ends of epochs; what all ranks took, in order."""
    taken: list[int] = []
    iterators = [iter(sampler) for sampler in samplers]
    while num_batches:
        parts = [next(iterator, None) for iterator in iterators]
        if parts[0] is None:
            for sampler in samplers:
                sampler.skip_rest()
            iterators = [iter(sampler) for sampler in samplers]
            continue
        for sampler, part in zip(samplers, parts, strict=True):
            taken += part or []
            sampler.consumed()
        num_batches -= 1
    assert len({(sampler.epoch, sampler.offset, sampler.samples_consumed) for sampler in samplers}) == 1
    return taken


def dense(num_samples: int, num_epochs: int, seed: int = 5) -> list[int]:
    return [int(i) for epoch in range(num_epochs) for i in Order(num_samples, seed=seed, epoch=epoch).between(0, num_samples)]


def test_4_to_2_to_4_ranks_repeat_nothing_and_leave_nothing_out() -> None:
    """The worked value: 1,000 ids on each side of each boundary have no id in common, and there is no gap between them."""
    before, taken, expected = None, [], dense(20_000, 1)
    for world_size, num_batches in ((4, 50), (2, 150), (4, 60)):
        samplers = ranks(20_000, world_size, 8, before)
        boundary = len(taken)
        if before is not None:
            assert before["last_ids"] == taken[-1000:]
            assert before["next_ids"] == expected[boundary : boundary + 1000]
            assert len(before["last_ids"]) == len(before["next_ids"]) == 1000
        now = train(samplers, num_batches)
        if before is not None:
            assert len(set(before["last_ids"]) & set(now[:1000])) == 0
            positions = Order(20_000, seed=5, epoch=0).positions(before["last_ids"] + now[:1000])
            assert np.diff(positions).tolist() == [1] * 1999, "gaps: 0"
            check_continuation(before, now)
        taken += now
        before = samplers[0].state_dict()
    assert taken == expected[: len(taken)]
    assert len(taken) == 50 * 32 + 150 * 16 + 60 * 32 == before["samples_consumed"] == before["offset"]


@settings(deadline=None, max_examples=30)
@given(
    num_samples=st.integers(13, 80),
    legs=st.lists(st.tuples(st.integers(1, 6), st.integers(2, 4), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_any_chain_of_world_sizes_takes_each_epoch_whole(num_samples: int, legs: list[tuple[int, int, int]]) -> None:
    """Also over uneven ends: with two or more samples a rank, an id comes twice only where fewer samples than ranks are left."""
    state, taken, position = None, [], 0
    for world_size, batch_size, num_batches in legs:
        samplers = ranks(num_samples, world_size, batch_size, state)
        now = []
        for _ in range(num_batches):
            if samplers[0].offset == num_samples:
                for sampler in samplers:
                    sampler.skip_rest()
            num_repeated, left = samplers[0].num_repeated, num_samples - samplers[0].offset
            batch = train(samplers, 1)
            assert num_repeated == len(batch) - len(set(batch)) == max(world_size - left, 0)
            now += dict.fromkeys(batch)
        taken += now
        position += len(now)
        state = samplers[0].state_dict()
        assert state["samples_consumed"] == position
    assert taken == dense(num_samples, 1 + len(taken) // num_samples)[: len(taken)]


def test_epochs_end_differently_by_option() -> None:
    epoch = dense(10, 1)
    drop = ranks(10, 2, 4, drop_last=True)
    assert [list(sampler) for sampler in drop] == [[epoch[:4]], [epoch[4:8]]]
    uneven = ranks(10, 2, 4)
    assert [list(sampler) for sampler in uneven] == [[epoch[:4], epoch[8:9]], [epoch[4:8], epoch[9:]]]
    assert [len(drop[0]), len(uneven[0])] == [1, 2]
    short = ranks(9, 2, 4, pad=False)
    nine = dense(9, 1)
    assert [list(sampler) for sampler in short] == [[nine[:4], nine[8:]], [nine[4:8]]]


def test_iterating_ahead_does_not_move_the_position() -> None:
    sampler = ranks(100, 1, 4)[0]
    before = sampler.state_dict()
    batches = list(sampler)
    assert sampler.state_dict() == before
    sampler.consumed(3)
    assert sampler.state_dict()["next_ids"][:4] == batches[3]
    assert next(iter(sampler)) == batches[3]


def test_saved_at_the_end_of_an_epoch_the_next_batch_is_the_first_of_the_next() -> None:
    sampler = ranks(12, 1, 4)[0]
    sampler.consumed(3)
    state = sampler.state_dict()
    assert (state["epoch"], state["offset"], state["samples_consumed"]) == (0, 12, 12)
    first, second = dense(12, 1), dense(12, 2)[12:]
    assert state["last_ids"] == first
    assert state["next_ids"] == second
    assert state["next_batch_hash"] == hash_ids(second[:4])
    (resumed,) = ranks(12, 1, 4, state)
    assert list(resumed) == []
    resumed.skip_rest()
    assert (resumed.epoch, resumed.offset) == (1, 0)
    assert next(iter(resumed)) == second[:4]
    assert resumed.state_dict()["last_ids"] == first


def test_state_is_the_same_on_all_ranks() -> None:
    samplers = ranks(300, 3, 8)
    train(samplers, 20)
    states = [sampler.state_dict() for sampler in samplers]
    assert states == [states[0]] * 3


def test_window_reaches_over_epochs_and_processes() -> None:
    state, taken = None, []
    for _ in range(6):
        samplers = ranks(300, 2, 25, state)
        taken += train(samplers, 7)
        state = samplers[0].state_dict()
    assert state["last_ids"] == taken[-1000:]
    assert state["samples_consumed"] == len(taken) == 2100


@pytest.mark.parametrize(
    ("shift", "says"),
    [
        (32, "1 batch (32 samples) ahead"),
        (-32, "1 batch (32 samples) behind"),
        (64, "2 batches (64 samples) ahead"),
        (1, "1 sample ahead"),
    ],
)
@pytest.mark.parametrize("num_batches", [2, 40, 156])
def test_position_off_by_a_batch_is_caught_and_named(shift: int, says: str, num_batches: int) -> None:
    samplers = ranks(5000, 4, 8)
    train(samplers, num_batches)
    state = samplers[0].state_dict()
    offset = state["offset"] + shift
    if offset > 5000:
        return
    with pytest.raises(DataOrderError, match=f"the position is {says.replace('(', '[(]').replace(')', '[)]')}") as caught:
        ranks(5000, 2, 8, {**state, "offset": offset})
    assert caught.value.expected == f"offset {state['offset']} of epoch 0"
    assert caught.value.found == f"offset {offset} of epoch 0"


def test_position_in_a_wrong_epoch_is_caught() -> None:
    samplers = ranks(5000, 4, 8)
    train(samplers, 200)
    state = samplers[0].state_dict()
    assert state["epoch"] == 1
    with pytest.raises(DataOrderError, match="in another epoch than the ids") as caught:
        ranks(5000, 4, 8, {**state, "epoch": 0})
    assert caught.value.expected == f"offset {state['offset']} of epoch 1"


@pytest.mark.parametrize(
    ("shift", "says"), [(32, "1 batch [(]32 samples[)] ahead"), (-64, "2 batches [(]64 samples[)] behind"), (5, "5 samples ahead")]
)
def test_training_that_continues_elsewhere_is_caught(shift: int, says: str) -> None:
    samplers = ranks(5000, 4, 8)
    train(samplers, 50)
    state = samplers[0].state_dict()
    epoch = dense(5000, 1)
    check_continuation(state, epoch[1600:3000])
    check_continuation(state, [])
    with pytest.raises(DataOrderError, match=says):
        check_continuation(state, epoch[1600 + shift : 3000])
    swapped = epoch[1600:1700]
    swapped[10], swapped[11] = swapped[11], swapped[10]
    with pytest.raises(DataOrderError, match=r"from the 11\. on"):
        check_continuation(state, swapped)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_batches", [0, 1, 2, 3])
def test_training_that_continues_past_all_recorded_ids_is_not_blamed(drop_last: bool, num_batches: int) -> None:
    samplers = ranks(23, 3, 2, drop_last=drop_last)
    train(samplers, num_batches)
    for world_size in (1, 2, 3):
        check_continuation(samplers[0].state_dict(), train(ranks(23, world_size, 2, samplers[0].state_dict(), drop_last=drop_last), 50))


def test_state_is_small_plain_and_comes_back() -> None:
    samplers = ranks(10**9, 4, 64, seed=2**64 - 1)
    train(samplers, 20)
    state = samplers[0].state_dict()
    encoded = encode_object(state, key="data")
    assert len(encoded) < 11_000
    (resumed,) = ranks(10**9, 1, 64, decode_object(encoded, key="data"), seed=2**64 - 1)
    assert {**resumed.state_dict(), "world_size": 4, "next_batch_hash": state["next_batch_hash"]} == state


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size is out of range; expected a whole number of at least 1; found 0"),
        ({"batch_size": -3}, "batch_size is out of range"),
        ({"batch_size": 2.0}, "batch_size is no whole number"),
        ({"batch_size": True}, "batch_size is out of range"),
        ({"world_size": 0}, "world_size is out of range; expected a whole number of at least 1; found 0"),
        ({"rank": 2}, "rank is out of range; expected a whole number from 0 to 1; found 2"),
        ({"rank": -1}, "rank is out of range"),
        ({"rank": None}, "rank and world_size go together"),
        ({"seed": -1}, "seed is out of range"),
        ({"seed": 2**64}, "seed is out of range"),
        ({"dataset": 0}, "the number of samples is out of range; expected a whole number from 1"),
        ({"dataset": []}, "the length of the data set is out of range"),
        ({"dataset": iter([])}, "the data set has no length"),
        ({"drop_last": 1}, "drop_last is no bool"),
        ({"drop_last": True, "dataset": 7}, "drop_last would leave out every sample"),
    ],
)
def test_bad_options_are_refused_and_say_what_is_valid(options: dict[str, Any], says: str) -> None:
    good = {"dataset": 100, "batch_size": 4, "rank": 0, "world_size": 2}
    with pytest.raises(InvalidOptionError) as caught:
        ResumableSampler(**{**good, **options})
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_samples": 99}, "num_samples differs; expected num_samples 99"),
        ({"seed": 6}, "seed differs; expected seed 6"),
        ({"shuffle": False}, "shuffle differs"),
        ({"order": "other"}, "order differs; expected order 'other'"),
        ({"offset": -4}, "offset is out of range; expected offset from 0 to 100; found -4"),
        ({"offset": 101}, "offset is out of range"),
        ({"offset": 4.0}, "no valid offset"),
        ({"epoch": -1}, "epoch is out of range"),
        ({"epoch": "0"}, "no valid epoch"),
        ({"batch_size": 0}, "batch_size is out of range"),
        ({"world_size": 0}, "world_size is out of range"),
        ({"last_ids": [100]}, "last_ids are no sample ids"),
        ({"next_ids": [1.5]}, "next_ids are no sample ids"),
        ({"next_batch_hash": "00"}, "the next batch is not the one that was recorded"),
        ({"next_ids": [1, 2, 3]}, "not those around the position"),
        ({"last_ids": []}, "not those around the position"),
    ],
)
def test_bad_states_are_refused_and_change_nothing(change: dict[str, Any], says: str) -> None:
    (saved,) = ranks(100, 1, 4)
    saved.consumed(3)
    (sampler,) = ranks(100, 1, 4)
    sampler.consumed(1)
    before = copy.deepcopy(sampler.state_dict())
    with pytest.raises(DataOrderError) as caught:
        sampler.load_state_dict({**saved.state_dict(), **change})
    assert says in str(caught.value)
    assert sampler.state_dict() == before


def test_state_that_lacks_a_key_is_refused_by_name() -> None:
    (sampler,) = ranks(100, 1, 4)
    state = sampler.state_dict()
    for key in state:
        with pytest.raises(DataOrderError, match=f"holds no valid {key}"):
            sampler.load_state_dict({name: value for name, value in state.items() if name != key})
    with pytest.raises(DataOrderError, match="is a dict"):
        sampler.load_state_dict([])  # type: ignore[arg-type]


def test_epochs_do_not_go_backwards_and_hold_no_more_than_they_have() -> None:
    (sampler,) = ranks(100, 1, 30)
    with pytest.raises(UsageError, match="more batches counted as consumed than epoch 0 has; expected at most 4"):
        sampler.consumed(5)
    assert sampler.offset == 0
    with pytest.raises(InvalidOptionError, match="num_batches"):
        sampler.consumed(-1)
    sampler.consumed(1)
    sampler.set_epoch(0)
    assert sampler.offset == 30
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.offset, sampler.samples_consumed) == (2, 0, 30)
    with pytest.raises(UsageError, match="the epoch lies behind the position; expected epoch 2 or later; found 1"):
        sampler.set_epoch(1)


def test_iterating_for_ever_without_counting_is_refused() -> None:
    (sampler,) = ranks(100, 1, 30)
    assert len(list(sampler)) == 4
    with pytest.raises(UsageError, match="no batch counts as consumed since"):
        iter(sampler)
    sampler.set_epoch(1)
    assert len(list(sampler)) == 4
