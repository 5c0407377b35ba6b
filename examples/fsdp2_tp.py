"""FSDP2 and tensor parallelism on four ranks; the same run goes on with two.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp.py --root runs/fsdp2_tp --steps 30

Kill it and start it again, with four ranks or with ``--nproc-per-node 2``: each rank reads the parts that it holds now of what others have
written. On as many ranks the losses are those of a run that was never killed to the last bit, elsewhere but for the order of sums.
"""

from __future__ import annotations

import argparse
import os
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dcp_engine import Checkpointer, ResumableLoader, ResumableSampler, TrainState

CONTEXT = 16  # characters that the next one is told from
GLOBAL_BATCH = 32  # windows of one step, on all ranks together: the same steps on any number of them


def read_text() -> TensorDataset:
    """A small text in windows: some characters, and the one that comes next."""
    text = torch.tensor(list(" ".join(map(str, range(2000))).encode("ascii")))
    windows = text.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


class Network(nn.Module):
    """From the codes of ``CONTEXT`` characters, and of the next one, to the loss."""

    plan = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.up = nn.Linear(CONTEXT * 16, 256)
        self.down = nn.Linear(256, 64)
        self.head = nn.Linear(64, 128)

    def forward(self, context: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.embedding(context).flatten(1)))
        return functional.cross_entropy(self.head(self.down(hidden)), target)


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
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    dp_rank, dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    torch.manual_seed(0)
    model = parallelize_module(Network().to(device), mesh["tp"], Network.plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)
    dataset = read_text()
    # Ranks of one tensor-parallel group take the same samples: the sampler is told the data-parallel rank.
    sampler = ResumableSampler(dataset, batch_size=GLOBAL_BATCH // dp_size, seed=1, rank=dp_rank, world_size=dp_size)
    loader = ResumableLoader(DataLoader(dataset, batch_sampler=sampler))
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch; an epoch that was left in its middle goes on there
    state = TrainState(model, optimizer, schedulers=scheduler, data=loader)

    with Checkpointer(args.root, save_every=args.save_every) as checkpointer:
        report = checkpointer.restore(state, missing_ok=True)
        if dist.get_rank() == 0:
            print(report or "no checkpoint yet: a new run", flush=True)
        while state.counters.step < args.steps:
            context, target = (part.to(device) for part in next(batches))
            loss = model(context, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state.counters.update()
            step = state.counters.step
            checkpointer.maybe_save(step, state, force=step == args.steps)  # all ranks call it; each writes its part while training goes on
            mean = loss.detach()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            if dist.get_rank() == 0:
                print(f"step {step} loss {mean.item() / dp_size:.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
