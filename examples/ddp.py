"""DistributedDataParallel: kill a rank, or all of them, start the same command again, and the run goes on.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py --root runs/ddp --steps 100

Every rank's random numbers (dropout draws others on each) are in the checkpoint, and the data has one position for all ranks: on as many
ranks the losses are those of a run that was never killed, to the last bit. It also goes on with another ``--nproc-per-node``.
"""

from __future__ import annotations

import argparse
import os
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dcp_engine import Checkpointer, ResumableLoader, ResumableSampler, TrainState

CONTEXT = 16  # characters that the next one is told from
GLOBAL_BATCH = 32  # windows of one step, on all ranks together


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


def start() -> torch.device:
    """Join the other ranks; what this one computes on."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of this run's checkpoints, the same one for all ranks")
    parser.add_argument("--steps", type=int, required=True, help="length of the whole run")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    device = start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights everywhere
    model = DistributedDataParallel(make_model().to(device))
    torch.manual_seed(1 + rank)  # and other dropout on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)
    dataset = read_text()
    loader = ResumableLoader(DataLoader(dataset, batch_sampler=ResumableSampler(dataset, batch_size=GLOBAL_BATCH // world_size, seed=1)))
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch; an epoch that was left in its middle goes on there
    state = TrainState(model, optimizer, schedulers=scheduler, data=loader)

    with Checkpointer(args.root, save_every=args.save_every) as checkpointer:
        report = checkpointer.restore(state, missing_ok=True)
        if rank == 0:
            print(report or "no checkpoint yet: a new run", flush=True)
        while state.counters.step < args.steps:
            context, target = (part.to(device) for part in next(batches))
            loss = functional.cross_entropy(model(context), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state.counters.update()
            step = state.counters.step
            checkpointer.maybe_save(step, state, force=step == args.steps)  # all ranks call it; each writes its part while training goes on
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world_size:.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
