"""A sample's random numbers depend on seed, epoch and id alone, and leave the global generators as they were."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from dcp_engine.data import sample_generator
from dcp_engine.errors import InvalidOptionError


def draws(seed: int, epoch: int, sample_id: int | str) -> tuple[Any, ...]:
    generator = sample_generator(seed, epoch, sample_id)
    return (
        torch.randint(2**62, (2,), generator=generator.torch).tolist(),
        generator.numpy.integers(2**62, size=2).tolist(),
        generator.python.getrandbits(62),
    )


def test_same_place_same_draws_and_others_elsewhere() -> None:
    assert draws(1, 2, 3) == draws(1, 2, 3) == draws(1, 2, np.int64(3))  # type: ignore[arg-type]
    places = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, "3"), (12, 3, 3), (1, 23, 3)]
    for kind in range(3):
        assert len({str(draws(*place)[kind]) for place in places}) == len(places)
    assert len({str(draw) for draw in draws(1, 2, 3)}) == 3


def test_seeds_are_pinned() -> None:
    """Saved runs resume with these draws: a change here breaks them."""
    seed = int.from_bytes(hashlib.sha256(b"python dcp-engine sample 1 1 2 int 3").digest()[:8], "little")
    assert sample_generator(1, 2, 3).python.random() == random.Random(seed).random()


def test_installed_generators_are_the_samples_and_are_set_back() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[union-attr,index]

    def globally() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    with sample_generator(1, 2, "a").installed():
        one = globally()
    with sample_generator(1, 2, "a").installed():
        assert globally() == one
    with sample_generator(1, 2, "b").installed():
        assert not set(globally()) & set(one)
    with pytest.raises(ZeroDivisionError), sample_generator(1, 2, "a").installed():
        torch.rand(1 // 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[union-attr,index]
    assert random.getstate() == before[2]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ((-1, 0, 0), "seed is out of range; expected a whole number from 0 to 18446744073709551615; found -1"),
        ((0, -1, 0), "epoch is out of range"),
        ((0, 0.5, 0), "epoch is no whole number"),
        ((0, 0, -1), "sample_id is out of range"),
        ((0, 0, 1.5), "sample_id is no id; expected an index of at least 0, or a str; found 1.5"),
        ((0, 0, None), "sample_id is no id"),
    ],
)
def test_bad_places_are_refused(place: tuple[Any, Any, Any], says: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        sample_generator(*place)
    assert str(caught.value).startswith(says)
