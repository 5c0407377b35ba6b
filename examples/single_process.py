"""One process: a training loop that can be killed at any time, and goes on as the same run when the same command is started again.

    python examples/single_process.py --root runs/single --steps 100

Dropout, the learning rate and the order of the data are part of that: with them in the ``TrainState``, the losses of a run that was killed
are those of one that was not, to the last bit.
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
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)
    dataset = read_text()
    loader = ResumableLoader(DataLoader(dataset, batch_sampler=ResumableSampler(dataset, batch_size=32, seed=1)))
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch; an epoch that was left in its middle goes on there
    state = TrainState(model, optimizer, schedulers=scheduler, data=loader)

    with Checkpointer(args.root, save_every=args.save_every) as checkpointer:
        report = checkpointer.restore(state, missing_ok=True)
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
            checkpointer.maybe_save(step, state, force=step == args.steps)  # copies the state; it is written while training goes on
            print(f"step {step} loss {loss.item():.9g}", flush=True)  # nine digits tell every float32 from the next


if __name__ == "__main__":
    main()
