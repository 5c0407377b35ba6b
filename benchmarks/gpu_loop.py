"""A model that really trains on a CUDA device, with AdamW: all of its state changes in place with every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import MismatchError
from benchmarks.state import State

__all__ = ["GpuLoop", "layers_that_fit"]

WIDTH = 2048
MAX_LAYERS = 168
"""Of 50 MB each with both moments: 8.46 GB in 1,344 tensors, of which 1,008 are no step counters."""
LEAST_STEP_SECS = 0.12
_ROWS = 4096
_STATE_BYTES = 12 * WIDTH * (WIDTH + 1)
_DEVICE_BYTES = 180 << 20
"""A layer on the device: weights, gradients, moments, a copy of the state to compare with, activations of a batch."""
_HOST_STATES = 7
"""States in the host's memory: two buffers of ours, one of DCP's for each way to stage, one to load into, and files in the page cache."""
_MOST_SAVE_SECS = 10.0


def layers_that_fit(*, device_bytes: int, host_bytes: int, disk_bytes: int, write_bytes_a_sec: float) -> int:
    """Layers of the model: what memory and disk have room for, and so few that a plain write of the state takes at most ten seconds.

    Args:
        device_bytes, host_bytes, disk_bytes: that are free.
        write_bytes_a_sec: what the disk takes.
    """
    most = (
        device_bytes // _DEVICE_BYTES,
        host_bytes // (_HOST_STATES * _STATE_BYTES),
        disk_bytes // (2 * _STATE_BYTES),
        int(_MOST_SAVE_SECS * write_bytes_a_sec) // _STATE_BYTES,
        MAX_LAYERS,
    )
    return max(1, min(most))


class _Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * functional.relu(layer(x))
        return x


class GpuLoop:
    """See :class:`benchmarks.beside.Loop`. A step takes :data:`LEAST_STEP_SECS` or more: as many batches as that takes.

    Args:
        layers: of the model.
        device: that it trains on; the CPU shows that the loop works, and no more.
        width: of a layer.
        rows: of a batch.

    Attributes:
        optimizer: of the model.
        held: what the state was at the last :meth:`hold`, on the device.
        state_dict_secs: what it took to ask model and optimizer for it.
    """

    def __init__(self, layers: int, *, device: str = "cuda", width: int = WIDTH, rows: int = _ROWS) -> None:
        torch.manual_seed(7)
        self._device = device
        with torch.device(device):
            self._model = _Stack(layers, width)
            self._input = torch.randn(rows, width)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self.held: dict[str, torch.Tensor] = {}
        self.state_dict_secs = 0.0
        self._is_begun = False
        self._num_batches = 1
        for _ in range(3):
            begin = time.perf_counter()
            self.step(lambda: None)
            secs = time.perf_counter() - begin
        self._num_batches = math.ceil(LEAST_STEP_SECS / secs)

    def state(self) -> State:
        """The live tensors, by the names of the parameters."""
        begin = time.perf_counter()
        weights = self._model.state_dict()
        moments = self.optimizer.state_dict()["state"]
        self.state_dict_secs = time.perf_counter() - begin
        names = [name for name, _ in self._model.named_parameters()]
        nested: dict[str, Any] = {"model": weights, "optimizer": {name: moments[number] for number, name in enumerate(names)}}
        flat = {f"model.{name}": tensor for name, tensor in weights.items()}
        flat |= {f"optimizer.{name}.{kind}": tensor for name in names for kind, tensor in nested["optimizer"][name].items()}
        return State(nested, flat)

    def target(self) -> State:
        """Tensors of the same shapes on the host, to load into."""
        live = self.state()
        flat = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in live.flat.items()}
        nested = {
            "model": {name: flat[f"model.{name}"] for name in live.nested["model"]},
            "optimizer": {
                name: {kind: flat[f"optimizer.{name}.{kind}"] for kind in kinds} for name, kinds in live.nested["optimizer"].items()
            },
        }
        return State(nested, flat)

    def step(self, before_update: Callable[[], None]) -> None:
        """Forward and backward of all batches, then the update; through on the device, too, when this returns."""
        self.begin()
        self._is_begun = False
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self._synchronize()

    def begin(self) -> None:
        """Forward and backward, queued on the device."""
        if self._is_begun:
            return
        self._is_begun = True
        for _ in range(self._num_batches):
            with torch.autocast(self._device, dtype=torch.bfloat16):
                loss = self._model(self._input).float().square().mean()
            torch.autograd.backward(loss)

    def hold(self) -> None:
        """See :class:`benchmarks.beside.Loop`."""
        self.held.clear()
        self.held.update({name: tensor.clone() for name, tensor in self.state().flat.items()})
        self._synchronize()

    def check(self, found: State) -> None:
        """Compare with what was held, bit for bit.

        Raises:
            MismatchError: naming the first tensor that differs.
        """
        for name, tensor in self.held.items():
            on_device = found.flat[name].to(self._device)
            if not torch.equal(on_device.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)):
                raise MismatchError(f"{name} is not what was saved")

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
