"""Bytes of a real state: a small transformer trained on the standard library's sources, its weights and both moments of Adam.

Trained once for each configuration and kept in the temporary folder: seeds are fixed, but the last bits depend on the machine's kernels.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from dcp_engine.demo.corpus import draw_batch, read_standard_library
from dcp_engine.demo.model import VOCABULARY, Decoder, ModelConfig

__all__ = ["FULL", "KINDS", "QUICK", "TrainingConfig", "trained_values"]

KINDS = ("params", "exp_avg", "exp_avg_sq")

_VERSION = 1
_CORPUS_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How the state is made.

    Attributes:
        width: features of the model.
        layers: its blocks.
        window_bytes: tokens of one window.
        batch: windows of one step.
        seeds: runs, each from other initial weights.
        warm_steps: steps before the first checkpoint of a run.
        checkpoints: taken of each run.
        steps_between: steps between two of them.
    """

    width: int
    layers: int
    window_bytes: int
    batch: int
    seeds: int
    warm_steps: int
    checkpoints: int
    steps_between: int


FULL = TrainingConfig(width=256, layers=4, window_bytes=128, batch=4, seeds=2, warm_steps=100, checkpoints=15, steps_between=2)
QUICK = TrainingConfig(width=128, layers=2, window_bytes=64, batch=4, seeds=1, warm_steps=100, checkpoints=2, steps_between=5)


def trained_values(config: TrainingConfig) -> dict[str, NDArray[np.float32]]:
    """For each of :data:`KINDS`, the values of all checkpoints of all runs, one tensor after the other; float32, one dimension.

    The arrays are mapped from their files, to be copied from: only what is taken is read. Weights are row-major as the model holds them.
    """
    key = hashlib.sha256(repr((_VERSION, astuple(config))).encode()).hexdigest()[:16]
    folder = os.path.join(tempfile.gettempdir(), f"dcp-engine-trained-{key}")
    if not os.path.isdir(folder):
        _train_into(folder, config)
    return {kind: np.load(os.path.join(folder, f"{kind}.npy"), mmap_mode="r") for kind in KINDS}


def _train_into(folder: str, config: TrainingConfig) -> None:
    """Publishes by rename: two processes that train at the same time do no harm."""
    parts: dict[str, list[NDArray[np.float32]]] = {kind: [] for kind in KINDS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order whatever the machine, and no threads that spin where its cores are busy
    try:
        for seed in range(config.seeds):
            for checkpoint in _run(config, seed):
                for kind in KINDS:
                    parts[kind].append(checkpoint[kind])
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as attempt:
        inner = os.path.join(attempt, "values")
        os.mkdir(inner)
        for kind in KINDS:
            np.save(os.path.join(inner, f"{kind}.npy"), np.concatenate(parts[kind]))
        try:
            os.rename(inner, folder)
        except OSError:
            if not os.path.isdir(folder):
                raise


def _run(config: TrainingConfig, seed: int) -> Iterator[dict[str, NDArray[np.float32]]]:
    """The checkpoints of one training run."""
    torch.manual_seed(1000 + seed)
    model = Decoder(ModelConfig(width=config.width, num_layers=config.layers, window_bytes=config.window_bytes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    corpus = read_standard_library(limit_bytes=_CORPUS_BYTES, min_document_bytes=config.window_bytes + 1)
    last = config.warm_steps + (config.checkpoints - 1) * config.steps_between
    for step in range(1, last + 1):
        tokens = draw_batch(corpus, step * config.batch, num_windows=config.batch, window_bytes=config.window_bytes).tokens
        loss = functional.cross_entropy(model(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= config.warm_steps and (step - config.warm_steps) % config.steps_between == 0:
            parameters = list(model.parameters())
            yield {
                "params": _flat(parameters),
                "exp_avg": _flat([optimizer.state[parameter]["exp_avg"] for parameter in parameters]),
                "exp_avg_sq": _flat([optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters]),
            }


def _flat(tensors: Sequence[torch.Tensor]) -> NDArray[np.float32]:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()
