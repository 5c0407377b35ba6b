"""The optimizers of what is saved from a GPU: their next step waits until the copy is through."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from dcp_engine.staging import DoubleBufferStager
from dcp_engine.train_state import TrainState

__all__ = ["Protection"]


class Protection:
    """Has a stager protect each optimizer once.

    Args:
        stager: that copies the states.

    Thread-safety: none.
    """

    def __init__(self, stager: DoubleBufferStager) -> None:
        self._stager = stager
        self._hooks: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()

    def protect(self, state: TrainState) -> None:
        """Those of a training state that have parameters on a GPU. What lies in host memory is copied when ``save`` returns."""
        for optimizer in state.parts("optimizer").values():
            if optimizer not in self._hooks and _is_on_gpu(optimizer):
                self._hooks[optimizer] = self._stager.protect(optimizer)


def _is_on_gpu(optimizer: Optimizer) -> bool:
    return any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
