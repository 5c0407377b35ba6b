"""Everything that training depends on, as one state dict that any number of ranks can take up again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from dcp_engine.demo.model import Decoder

__all__ = ["TrainingState", "lr_factor", "make_state"]

_PEAK_LR = 1e-3
_FINAL_LR_FACTOR = 0.1


@dataclass(slots=True)
class TrainingState:
    """The live objects of a training run. Not thread-safe.

    Attributes:
        model: laid out over the mesh already.
        optimizer: of the model's parameters.
        scheduler: of the optimizer.
        step: steps that are done.
        cursor: documents of the corpus that are consumed.
    """

    model: Decoder
    optimizer: AdamW
    scheduler: LambdaLR
    step: int = 0
    cursor: int = 0

    def state_dict(self, drop: str | None) -> dict[str, Any]:
        """The state as of now. Tensors are the live ones: whoever keeps the result must copy them.

        Args:
            drop: the part to leave out: ``rng``, ``optimizer``, ``scheduler``, ``data``, or None.
        """
        state: dict[str, Any] = {"model": get_model_state_dict(self.model), "progress": {"step": self.step}}
        # Keyed by the names of the parameters: keyed by their order, the moments could not be resharded.
        if drop != "optimizer":
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        if drop != "scheduler":
            state["scheduler"] = self.scheduler.state_dict()
        if drop != "data":
            state["data"] = {"cursor": self.cursor}
        if drop != "rng":
            # Every rank draws the same numbers, so one value under one name is right; ranks that draw their own need names of their own.
            state["rng"] = {"torch": torch.get_rng_state()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a state that :meth:`state_dict` gave; a part that is not in it stays as a fresh run has it."""
        set_model_state_dict(self.model, state["model"])
        self.step = state["progress"]["step"]
        if "optimizer" in state:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        if "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        if "data" in state:
            self.cursor = state["data"]["cursor"]
        if "rng" in state:
            torch.set_rng_state(state["rng"]["torch"])
        # The scheduler decides the learning rate; the optimizer's own copy must not hide a scheduler that was lost.
        for group, lr in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr


def make_state(model: Decoder, *, num_steps: int, num_warmup_steps: int) -> TrainingState:
    """Optimizer and schedule around a model that is laid out already."""
    optimizer = AdamW(model.parameters(), lr=_PEAK_LR, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, foreach=True)
    scheduler = LambdaLR(optimizer, lambda done: lr_factor(done, num_steps=num_steps, num_warmup_steps=num_warmup_steps))
    return TrainingState(model, optimizer, scheduler)


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
