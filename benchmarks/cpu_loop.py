"""A model that really trains on the CPU, beside a state that changes with every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.state import State
from benchmarks.training import TrainingConfig
from dcp_engine.demo.corpus import draw_batch, read_standard_library
from dcp_engine.demo.model import VOCABULARY, Decoder, ModelConfig

__all__ = ["CpuLoop", "Marks"]

_CORPUS_BYTES = 1 << 20


class Marks:
    """The first and the last element of every tensor of a state, which stand for all: changed at each step, and put back afterwards.

    A save that takes some tensors from before a step and some from after it does not hold what was there when it was called.
    """

    def __init__(self, state: State) -> None:
        self._views = [tensor.view(-1)[:: max(1, tensor.numel() - 1)] for tensor in state.flat.values()]
        self._kept = [view.clone() for view in self._views]

    def keep(self) -> None:
        """What they are now is what :meth:`restore` brings back."""
        for kept, view in zip(self._kept, self._views, strict=True):
            kept.copy_(view)

    def change(self) -> None:
        """As a step does."""
        for view in self._views:
            view.add_(1)

    def fill(self, value: float) -> None:
        """All alike."""
        for view in self._views:
            view.fill_(value)

    def restore(self) -> None:
        """As they were when they were kept last."""
        for view, kept in zip(self._views, self._kept, strict=True):
            view.copy_(kept)


class CpuLoop:
    """See :class:`benchmarks.beside.Loop`.

    Args:
        config: of the model and its batches.
        marks: of the state beside it.
    """

    def __init__(self, config: TrainingConfig, marks: Marks) -> None:
        torch.manual_seed(7)
        self._config = config
        self._marks = marks
        self._model = Decoder(ModelConfig(width=config.width, num_layers=config.layers, window_bytes=config.window_bytes))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._corpus = read_standard_library(limit_bytes=_CORPUS_BYTES, min_document_bytes=config.window_bytes + 1)
        self._step = 0

    def step(self, before_update: Callable[[], None]) -> None:
        """Forward, backward, update; the state beside changes with the model."""
        config = self._config
        cursor = self._step * config.batch
        tokens = draw_batch(self._corpus, cursor, num_windows=config.batch, window_bytes=config.window_bytes).tokens
        self._step += 1
        loss = functional.cross_entropy(self._model(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        before_update()
        self._optimizer.step()
        self._marks.change()

    def hold(self) -> None:
        """See :class:`benchmarks.beside.Loop`."""
        self._marks.keep()

    def begin(self) -> None:
        """The CPU works in the caller's time: nothing is under way when it saves."""
