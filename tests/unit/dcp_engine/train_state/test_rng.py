"""Every sequence of random numbers goes on where it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dcp_engine.errors import StateError
from dcp_engine.objects import decode_object, encode_object
from dcp_engine.train_state.rng import capture_rng, restore_rng


def test_every_generator_goes_on_after_an_encoding() -> None:
    generators = {"a": torch.Generator().manual_seed(3)}
    numpy_generators = {"pcg": np.random.default_rng(3), "philox": np.random.Generator(np.random.Philox(4))}

    def draw() -> list[float]:
        # Both of numpy's and python's gauss functions keep half of a pair for the next call.
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            torch.rand(1).item(),
            torch.randn(1, generator=generators["a"]).item(),
            *(float(one.random()) for one in numpy_generators.values()),
        ]

    draw()
    state = decode_object(encode_object(capture_rng(generators, numpy_generators), key="rng"), key="rng")
    expected = [draw(), draw()]
    restore_rng(state, generators, numpy_generators)
    assert [draw(), draw()] == expected


def test_other_generators_are_refused_and_nothing_changes() -> None:
    state = capture_rng(numpy_generators={"mix": np.random.default_rng(1)})
    before = random.getstate()
    random.random()
    moved = random.getstate()
    with pytest.raises(StateError, match=r"numpy_generators\['mix'\] is of another kind.*expected PCG64; found Philox"):
        restore_rng(state, numpy_generators={"mix": np.random.Generator(np.random.Philox(1))})
    with pytest.raises(StateError, match="numpy_generators are not those of the checkpoint"):
        restore_rng(state)
    assert random.getstate() == moved != before
