"""Leaves the random numbers of training alone while something else runs: an evaluation, a probe."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from dcp_engine.data.options import whole
from dcp_engine.data.order import MAX_SEED
from dcp_engine.train_state import TrainState
from dcp_engine.train_state.rng import Generators

__all__ = ["eval_rng", "generators_of"]


@contextmanager
def eval_rng(generators: Generators | None = None, *, seed: int | None = None) -> Iterator[None]:
    """Sets every generator back, after the block, to where it was before: also when the block raises, and when blocks are nested.

    Python's and numpy's global generators, torch's on the CPU and on every CUDA device, DTensor's switch, and the registered ones.

    Args:
        generators: the registered ones, see :func:`generators_of`. None: only the global ones.
        seed: the global generators begin the block at this seed, from 0 to 2**63 - 1, so that each run of it draws the same numbers. None:
            it draws on from where training is.

    Raises:
        InvalidOptionError: the seed is out of range.

    Thread-safety: not for threads; the global generators are the process's.
    """
    if seed is not None:
        whole("seed", seed, least=0, most=MAX_SEED >> 1)
    kept = Generators() if generators is None else generators
    before = kept.state_dict()
    seed_before = torch.initial_seed()
    try:
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        yield
    finally:
        if not before["cuda"]:
            # CUDA had not been started. Its generators start, or were started in the block, at the last seed of torch.manual_seed().
            torch.cuda.manual_seed_all(seed_before)
        kept.load_state_dict(before)


def generators_of(state: TrainState) -> Generators | None:
    """The generators that a training state keeps; None where it keeps none."""
    parts: Mapping[str, object] = state.parts("rng")
    return next((value for part in parts.values() if isinstance(value := getattr(part, "value", None), Generators)), None)
