"""Random numbers of training, after something else has drawn: they are those that would have come."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcp_engine import TrainState
from dcp_engine.checkpointer.rng_guard import eval_rng, generators_of
from dcp_engine.errors import InvalidOptionError
from dcp_engine.train_state.rng import Generators


class Training:
    """Draws from everything that can be drawn from."""

    def __init__(self) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.torch_generator = torch.Generator().manual_seed(4)
        self.numpy_generator = np.random.default_rng(5)
        self.generators = Generators({"augment": self.torch_generator}, {"mix": self.numpy_generator})

    def draw(self) -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),  # keeps a second number for the next call
            float(np.random.rand()),
            float(np.random.randn()),  # likewise
            float(torch.rand(1)),
            float(torch.rand(1, generator=self.torch_generator)),
            float(self.numpy_generator.random()),
        ]


def undisturbed() -> list[list[float]]:
    training = Training()
    return [training.draw(), training.draw()]


def test_training_draws_on_as_if_nothing_had_been_drawn() -> None:
    training = Training()
    first = training.draw()
    with eval_rng(training.generators):
        assert training.draw() != first
    assert [first, training.draw()] == undisturbed()


def test_block_that_raises_changes_nothing() -> None:
    training = Training()
    first = training.draw()
    with pytest.raises(KeyError), eval_rng(training.generators):
        training.draw()
        raise KeyError
    assert [first, training.draw()] == undisturbed()


def test_blocks_nest() -> None:
    training = Training()
    first = training.draw()
    with eval_rng(training.generators):
        with eval_rng(training.generators, seed=9):
            inner = training.draw()
        assert training.draw() == undisturbed()[1]
        with eval_rng(training.generators, seed=9):
            assert training.draw()[:5] == inner[:5]
    assert [first, training.draw()] == undisturbed()


def test_block_with_a_seed_draws_the_same_wherever_training_is() -> None:
    training = Training()
    drawn = []
    for _ in range(2):
        training.draw()
        with eval_rng(seed=11):
            drawn.append(training.draw()[:5])
    assert drawn[0] == drawn[1]


def test_seed_of_the_block_is_not_that_of_training() -> None:
    Training()
    with eval_rng(seed=11):
        assert torch.initial_seed() == 11
    assert torch.initial_seed() == 3


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "x", True])
def test_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidOptionError, match="seed"), eval_rng(seed=seed):
        pass


def test_generators_of_a_state_are_found() -> None:
    training = Training()
    first = training.draw()
    state = TrainState(
        nn.Linear(1, 1), generators={"augment": training.torch_generator}, numpy_generators={"mix": training.numpy_generator}
    )
    training.generators.load_state_dict(training.generators.state_dict())
    before = training.generators.state_dict()
    with eval_rng(generators_of(state)):
        training.draw()
    after = training.generators.state_dict()
    assert before["generators"]["augment"].equal(after["generators"]["augment"])
    assert before["numpy_generators"] == after["numpy_generators"]
    assert first == undisturbed()[0]
    assert generators_of(TrainState(nn.Linear(1, 1), rng=False)) is None
