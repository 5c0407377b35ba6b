"""Random numbers that belong to a sample: the same whichever worker, rank or process draws them, and whenever."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch

from dcp_engine.data.options import whole
from dcp_engine.data.order import MAX_SEED
from dcp_engine.errors import InvalidOptionError

__all__ = ["SampleGenerator", "sample_generator"]


class SampleGenerator:
    """Generators of one sample in one epoch, each made when first used; see :func:`sample_generator`. Use it in one thread."""

    def __init__(self, seed: int, epoch: int, sample_id: int | str) -> None:
        # A text of its own kind, so that the sample 1 and the sample "1" differ.
        self._text = f"dcp-engine sample 1 {seed} {epoch} {type(sample_id).__name__} {sample_id}"

    def _seed(self, purpose: str) -> int:
        # surrogatepass: names of files may hold lone surrogates
        data = f"{purpose} {self._text}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")

    @cached_property
    def torch(self) -> torch.Generator:
        """For torch's functions that take ``generator=``; on the CPU."""
        return torch.Generator().manual_seed(_signed(self._seed("torch")))

    @cached_property
    def numpy(self) -> np.random.Generator:
        """numpy's, over Philox."""
        return np.random.Generator(np.random.Philox(self._seed("numpy")))

    @cached_property
    def python(self) -> random.Random:
        """The standard library's."""
        return random.Random(self._seed("python"))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Seeds the global CPU generators of torch, numpy and Python within the block, and sets them back after it.

        For augmentations that take no generator, torchvision's for instance. Not for threads: the globals are the process's.
        """
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            torch.default_generator.manual_seed(_signed(self._seed("global torch")))
            np.random.seed(self._seed("global numpy") % 2**32)
            random.seed(self._seed("global python"))
            yield
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])


def sample_generator(seed: int, epoch: int, sample_id: int | str) -> SampleGenerator:
    """Generators for the augmentation of one sample, which depend on these three values alone.

    Augmentations that draw from a worker's global generators are others after a resume, and on another number of workers or ranks. Drawn
    from these they are the same.

    Args:
        seed: of the run, from 0 to 2**64 - 1.
        epoch: number of the epoch, so that each one augments otherwise. Workers have a copy of the data set, and persistent ones keep it:
            a tensor in shared memory (``share_memory_()``) tells them.
        sample_id: index, or a name.

    Returns:
        An object with ``torch``, ``numpy`` and ``python`` generators, independent of each other.

    Raises:
        InvalidOptionError: an argument is out of range.

    Thread-safety: safe; what is returned is for one thread.
    """
    seed, epoch = whole("seed", seed, least=0, most=MAX_SEED), whole("epoch", epoch, least=0, most=MAX_SEED)
    if not isinstance(sample_id, str):
        if not hasattr(sample_id, "__index__") or isinstance(sample_id, bool):
            raise InvalidOptionError("sample_id is no id", expected="an index of at least 0, or a str", found=repr(sample_id))
        sample_id = whole("sample_id", sample_id, least=0)
    return SampleGenerator(seed, epoch, sample_id)


def _signed(seed: int) -> int:
    """A seed as torch takes it on all its versions: below 2**63."""
    return seed >> 1
