"""Everything that training depends on, as one state dict that any number of ranks can take up again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from dcp_engine.demo.model import Decoder
from dcp_engine.train_state import TrainState

__all__ = ["Cursor", "TorchGenerator", "Training", "lr_factor"]

_PEAK_LR = 1e-3
_FINAL_LR_FACTOR = 0.1


class Cursor:
    """The position in the corpus.

    Attributes:
        documents: consumed so far.
    """

    def __init__(self) -> None:
        self.documents = 0

    def state_dict(self) -> dict[str, Any]:
        """The position as a plain value."""
        return {"documents": self.documents}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a position."""
        self.documents = state_dict["documents"]


class TorchGenerator:
    """Torch's global generator on the CPU: every rank draws the same numbers from it, so that one state is right on any number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        return {"state": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state."""
        torch.set_rng_state(state_dict["state"])


class Training:
    """The live objects of a training run, and the state that keeps them. Not thread-safe.

    Args:
        model: laid out over the mesh already.
        num_steps: length of the whole run.
        num_warmup_steps: see :func:`lr_factor`.
        drop: part to leave out of the state: ``rng``, ``optimizer``, ``scheduler``, ``data``, or nothing.

    Attributes:
        model: as it was given.
        optimizer: of the model's parameters.
        scheduler: of the optimizer.
        cursor: in the corpus.
        state: what checkpoints hold.
    """

    def __init__(self, model: Decoder, *, num_steps: int, num_warmup_steps: int, drop: str = "") -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=_PEAK_LR, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, foreach=True)
        self.scheduler = LambdaLR(self.optimizer, lambda done: lr_factor(done, num_steps=num_steps, num_warmup_steps=num_warmup_steps))
        self.cursor = Cursor()
        self.state = TrainState(
            model,
            None if drop == "optimizer" else self.optimizer,
            schedulers=None if drop == "scheduler" else self.scheduler,
            data=None if drop == "data" else self.cursor,
            # By default a state keeps generators for each rank, and more ranks than saved them find none.
            rng=False,
            extras=None if drop == "rng" else {"generator": TorchGenerator()},
        )

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.state.counters.step

    def load(self, reader: StorageReader) -> None:
        """Takes up a checkpoint; a part that is not in it stays as a fresh run has it. All ranks call it."""
        self.state.load(reader)
        # The scheduler decides the learning rate; the optimizer's own copy must not hide a scheduler that was lost.
        for group, lr in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr


def lr_factor(num_steps_done: int, *, num_steps: int, num_warmup_steps: int) -> float:
    """Linear warm-up to 1, then half a cosine down to a tenth at the last step.

    Args:
        num_steps_done: steps before the one asked about.
        num_steps: length of the whole run.
        num_warmup_steps: the first step has ``1 / num_warmup_steps``, step ``num_warmup_steps`` has 1.
    """
    if num_steps_done < num_warmup_steps:
        return (num_steps_done + 1) / num_warmup_steps
    progress = (num_steps_done - num_warmup_steps) / max(1, num_steps - 1 - num_warmup_steps)
    return _FINAL_LR_FACTOR + (1 - _FINAL_LR_FACTOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
