"""Gradient accumulation with mixed precision: a save that falls into an accumulation cycle is moved to the cycle's end.

    python examples/accumulation_amp.py --root runs/accumulation --steps 60

Saves are wanted every so many samples, which need not be where a cycle ends. In the middle of one, ``.grad`` is part of the state, and a
checkpoint without it would lose micro-batches. The ``GradScaler`` belongs to the state, too: it skips updates whose gradients are infinite,
so that updates attempted (``counters.step``) and applied (``counters.updates_applied``) are two numbers.
"""

from __future__ import annotations

import argparse
from itertools import chain, repeat

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dcp_engine import Checkpointer, ResumableLoader, ResumableSampler, TrainState

CONTEXT = 16  # characters that the next one is told from
MICRO_BATCH = 8
CYCLE = 4  # micro-batches of one update


def read_text() -> TensorDataset:
    """A small text in windows: some characters, and the one that comes next."""
    text = torch.tensor(list(" ".join(map(str, range(2000))).encode("ascii")))
    windows = text.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def make_model() -> nn.Module:
    """From the codes of ``CONTEXT`` characters to the logits of the next one."""
    return nn.Sequential(
        nn.Embedding(128, 16),
        nn.Flatten(),
        nn.Linear(CONTEXT * 16, 128),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(128, 128),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of this run's checkpoints")
    parser.add_argument("--steps", type=int, required=True, help="length of the whole run")
    parser.add_argument("--save-every", type=int, default=500, help="samples from one checkpoint to the next")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=25)  # so high that it has to come down
    dataset = read_text()
    loader = ResumableLoader(DataLoader(dataset, batch_sampler=ResumableSampler(dataset, batch_size=MICRO_BATCH, seed=1, drop_last=True)))
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch; an epoch that was left in its middle goes on there
    state = TrainState(model, optimizer, schedulers=scheduler, scaler=scaler, data=loader, grads="defer", scheduler_counts="applied")
    counters = state.counters

    with Checkpointer(args.root) as checkpointer:
        report = checkpointer.restore(state, missing_ok=True)
        print(report or "no checkpoint yet: a new run", flush=True)
        save_wanted, loss_of_step = False, torch.zeros((), device=device)
        while counters.step < args.steps:
            context, target = (part.to(device) for part in next(batches))
            with torch.autocast(device.type, dtype=torch.float16):
                loss = functional.cross_entropy(model(context), target) / CYCLE
            scaler.scale(loss).backward()
            loss_of_step += loss.detach()
            counters.micro_batch(samples=MICRO_BATCH)
            if counters.samples % args.save_every < MICRO_BATCH:
                save_wanted = True
                print(f"save wanted after {counters.samples} samples, micro-batch {counters.micro_step} of {CYCLE}", flush=True)
            if counters.micro_step == CYCLE:
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                applied = scaler.get_scale() >= scale  # it falls when the update was skipped
                if applied:
                    scheduler.step()
                counters.update(applied=applied)
                print(f"step {counters.step} loss {loss_of_step.item():.9g}{'' if applied else ', update skipped'}", flush=True)
                loss_of_step.zero_()
            if (save_wanted or counters.step == args.steps) and state.may_save():  # not in the middle of a cycle
                checkpointer.save(counters.step, state)  # copies the state and returns; the files are written while training goes on
                save_wanted = False


if __name__ == "__main__":
    main()
