"""A small training run with all parts of a training state, for tests that save, stop and come back."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from dcp_engine import Counters, ResumableLoader, ResumableSampler, TrainState

__all__ = ["NUM_SAMPLES", "Run"]

NUM_SAMPLES = 96
_GLOBAL_BATCH = 8
_FEATURES = 6


class Run:
    """Model, optimizer, scheduler, sampler and random numbers of one rank. Batches are equal parts of the same global batch on any number
    of ranks, and gradients the mean over it, so that a run on other ranks differs by rounding alone.

    Args:
        seed: of the weights and of the random numbers; a run that comes back has another one.
        sharded: by FSDP2, in place of DDP.
        noise: the input gets noise from every global generator, each rank its own: on another number of ranks it is another noise.
        options: of the ``TrainState``.
    """

    def __init__(self, *, seed: int = 0, noise: bool = True, sharded: bool = False, **options: Any) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(_FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net = model
        if sharded:
            self.model: nn.Module = fully_shard(model, mesh=init_device_mesh("cpu", (self.world_size,)))
        else:
            self.model = nn.parallel.DistributedDataParallel(model) if self.world_size > 1 else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        generator = torch.Generator().manual_seed(7)
        samples = torch.rand(NUM_SAMPLES, _FEATURES, generator=generator)
        dataset = TensorDataset(samples, samples.sum(1, keepdim=True), torch.arange(NUM_SAMPLES))
        self.sampler = ResumableSampler(
            dataset, batch_size=_GLOBAL_BATCH // self.world_size, seed=3, rank=self.rank, world_size=self.world_size
        )
        self.loader = ResumableLoader(DataLoader(dataset, batch_sampler=self.sampler))
        self.counters = Counters()
        self.state = TrainState(self.model, self.optimizer, schedulers=self.scheduler, data=self.loader, counters=self.counters, **options)
        self._noise = noise
        torch.manual_seed(seed * 100 + self.rank)
        random.seed(seed * 100 + self.rank)
        np.random.seed(seed * 100 + self.rank)
        self.losses: list[float] = []
        self.ids: list[list[int]] = []

    def train(self, num_steps: int) -> None:
        """As many steps more, over the ends of epochs."""
        for _ in range(num_steps):
            self.step()

    def step(self, *, update: bool = True) -> None:
        """One micro-batch, and with ``update`` the step that ends its cycle."""
        inputs, targets, ids = self._batch()
        if self._noise:
            inputs = inputs + 0.01 * (torch.rand_like(inputs) + random.random() + float(np.random.rand()))
        loss = (self.model(inputs) - targets).square().mean()
        loss.backward()
        self.counters.micro_batch(samples=_GLOBAL_BATCH)
        self.ids.append(ids.tolist())
        mean = loss.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(mean)
        self.losses.append(mean.item() / self.world_size)
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.counters.update(loss=self.losses[-1])

    def probe(self) -> torch.Tensor:
        """What the model gives for a fixed input."""
        output: torch.Tensor = self.net(torch.ones(1, _FEATURES))
        return output

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the model's, by name."""
        return copy.deepcopy(dict(self.net.state_dict()))

    def _batch(self) -> list[torch.Tensor]:
        for batch in self.loader:
            found: list[torch.Tensor] = batch
            return found
        self.counters.end_epoch()
        return self._batch()
