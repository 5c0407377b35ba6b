"""Which optimizers a save protects, and how often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from dcp_engine import TrainState
from dcp_engine.checkpointer.protection import Protection
from dcp_engine.staging import DoubleBufferStager


class _Stager:
    """Notes what it is to protect."""

    def __init__(self) -> None:
        self.protected: list[Any] = []

    def protect(self, optimizer: Any) -> object:
        self.protected.append(optimizer)
        return object()


class _Optimizer:
    """With parameters that say where they lie."""

    def __init__(self, *are_cuda: bool) -> None:
        self.param_groups = [{"params": [SimpleNamespace(is_cuda=is_cuda)]} for is_cuda in are_cuda]


class _State:
    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = dict(enumerate(optimizers))

    def parts(self, component: str) -> dict[int, Any]:
        assert component == "optimizer"
        return self.optimizers


def test_each_optimizer_on_a_gpu_is_protected_once() -> None:
    stager = _Stager()
    protection = Protection(cast(DoubleBufferStager, stager))
    gpu, partly, cpu, later = _Optimizer(True), _Optimizer(False, True), _Optimizer(False), _Optimizer(True)
    for _ in range(2):
        protection.protect(cast(TrainState, _State(gpu, partly, cpu)))
    assert stager.protected == [gpu, partly]
    protection.protect(cast(TrainState, _State(gpu, later)))
    assert stager.protected == [gpu, partly, later]


def test_in_host_memory_no_hook_is_added() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    Protection(DoubleBufferStager()).protect(TrainState(model, optimizer))
    assert not optimizer._optimizer_step_pre_hooks
