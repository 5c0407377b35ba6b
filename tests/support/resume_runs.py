"""A small training run that has everything a resume can lose, as a function for ``assert_resume_equal``."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from dcp_engine import BackgroundSaver, ResumableLoader, ResumableSampler, ShardReader, ShardWriter, TrainState, committed_steps
from dcp_engine.testing import RunContext
from dcp_engine.train_state.rng import Generators, capture_rng, restore_rng

__all__ = ["train"]


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Sample i is the number i, and four features that depend on it."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample: int) -> tuple[int, torch.Tensor]:
        return sample, torch.tensor([sample % 5, sample % 7, sample % 11, 5.0]) / 10


class Training:
    """Model, optimizer, scheduler, scaler and data of one rank, and the state that holds them all."""

    def __init__(self, run: RunContext, *, batch: int, num_samples: int, shared_rng: bool) -> None:
        seed = torch.initial_seed()
        torch.manual_seed(7)
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if run.world_size > 1:
            model = fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
        torch.manual_seed(seed if shared_rng else seed + run.rank)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        # It grows every third step, so that the steps since it grew matter as much as the scale.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.sampler = ResumableSampler(num_samples, batch_size=batch // run.world_size, seed=3)
        self.loader = ResumableLoader(DataLoader(Numbers(num_samples), batch_sampler=self.sampler))
        # Where all ranks draw the same numbers, one value is right on any number of ranks.
        rng: dict[str, Any] = {"rng": False, "extras": {"generators": Generators()}} if shared_rng else {}
        self.state = TrainState(model, self.optimizer, schedulers=self.scheduler, scaler=self.scaler, data=self.loader, **rng)

    def batches(self) -> Iterator[Any]:
        """Epoch after epoch."""
        while True:
            yield from self.loader

    def resume(self, run: RunContext, drop: str) -> None:
        """Loads the newest complete step; what is dropped is as if the checkpoint had lacked it: a fresh run's."""
        steps = committed_steps(run.root)
        if not steps:
            return
        restore = self._fresh(drop)
        self.state.load(ShardReader(os.path.join(run.root, f"step-{steps[-1]:08d}")))
        restore()

    def _fresh(self, drop: str) -> Callable[[], object]:
        """How to make one component that of a fresh run again."""
        parts: dict[str, Any] = {"model": self.model, "scheduler": self.scheduler, "scaler": self.scaler, "data": self.sampler}
        if drop in parts:
            fresh = copy.deepcopy(parts[drop].state_dict())
            return lambda: parts[drop].load_state_dict(fresh)
        if drop == "rng":
            generators = capture_rng()
            return lambda: restore_rng(generators)
        if drop == "cursor":
            return self.sampler.consumed  # one batch that nobody has trained on
        return self.optimizer.state.clear if drop == "optimizer" else lambda: None

    def step(self, run: RunContext, number: int, ids: torch.Tensor, features: torch.Tensor, *, noise: float, digests: bool) -> None:
        """One update."""
        # The scheduler decides, so that the optimizer's own copy hides no scheduler that was lost.
        lr = self.optimizer.param_groups[0]["lr"] = self.scheduler.get_last_lr()[0]
        draw = torch.randn(1)
        error = self.model(features) - features.sum(1, keepdim=True) - noise * draw
        loss = error.square().mean()
        self.scaler.scale(loss).backward()
        run.point("after_backward")
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        run.point("after_optimizer_step")
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state.counters.update()
        run.record(
            number,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            scaler=self.scaler,
            batch=ids,
            draws=draw,
            counters=self.state.counters,
            state=self.state if digests else None,
        )


def agreed(notice: torch.Tensor) -> bool:
    """Whether any rank has got the signal."""
    seen = notice.clone()
    if dist.is_initialized():
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen.item())


def train(
    run: RunContext,
    *,
    last: int = 30,
    save_every: int = 5,
    saves: str = "sync",
    saves_at_stop: bool = False,
    heeds_sigterm: bool = False,
    drop: str = "",
    batch: int = 8,
    num_samples: int = 200,
    noise: float = 0.1,
    shared_rng: bool = False,
    digests: str = "last",
) -> None:
    """Trains to step ``last``.

    Args:
        run: what it takes part in.
        last: number of the last step.
        save_every: steps between saves.
        saves: ``"sync"`` or ``"async"``.
        saves_at_stop: also when it is told to leave.
        heeds_sigterm: all ranks leave after the same step when one of them gets the signal.
        drop: component that a resume loses; ``"cursor"``: the position in the data is one batch too far.
        batch: samples of all ranks in a step.
        num_samples: of an epoch.
        noise: how much the random draws weigh in the loss.
        shared_rng: all ranks draw the same numbers.
        digests: ``"last"``, ``"all"`` or ``"none"``: steps whose whole state is recorded.
    """
    torch.set_num_threads(1)
    notice = torch.zeros(())
    if heeds_sigterm:
        signal.signal(signal.SIGTERM, lambda number, frame: notice.fill_(1.0))
    training = Training(run, batch=batch, num_samples=num_samples, shared_rng=shared_rng)
    if run.resume:
        training.resume(run, drop)
    batches = training.batches()
    saver = BackgroundSaver() if saves == "async" else None
    for number in run.steps(after=training.state.counters.step, last=last):
        ids, features = next(batches)
        training.step(run, number, ids, features, noise=noise, digests=digests == "all" or (digests == "last" and number == last))
        leaves = run.stopping or (heeds_sigterm and agreed(notice))
        if number % save_every == 0 or (saves_at_stop and leaves):
            writer = ShardWriter(os.path.join(run.root, f"step-{number:08d}"))
            if saver is None:
                save({"state": training.state}, storage_writer=writer)
            else:
                saver.wait()  # the one before
                saver.submit({"state": training.state}, writer=writer, step=number)
        if leaves:
            break
    if saver is not None:
        saver.close()
    if dist.is_initialized():
        dist.barrier()
