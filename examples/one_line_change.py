"""A script with plain ``dcp.save`` and ``dcp.load``: each of these two lines gets an argument, and the rest stays as it is.

    python examples/one_line_change.py --root runs/one_line --steps 100

Before, a job that was killed while it saved left a directory that cannot be loaded, and this script did not start again until somebody
removed it. Now a step's directory appears when it is whole, and a damaged byte in it is an error that names the tensor.

What this script knows to save, model, optimizer and step, is enough only because nothing in it draws random numbers and the step tells
which samples come next. Where more makes the next step, see single_process.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional

from dcp_engine import ShardReader, ShardWriter

CONTEXT = 16  # characters that the next one is told from
BATCH = 32


def save(state: dict[str, Any], path: Path) -> None:
    # Before: dcp.save(state, checkpoint_id=path)
    dcp.save(state, checkpoint_id=path, storage_writer=ShardWriter())


def load(state: dict[str, Any], path: Path) -> None:
    # Before: dcp.load(state, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path, storage_reader=ShardReader())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="directory of this run's checkpoints")
    parser.add_argument("--steps", type=int, required=True, help="length of the whole run")
    parser.add_argument("--save-every", type=int, default=20, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    windows = torch.tensor(list(" ".join(map(str, range(2000))).encode("ascii"))).unfold(0, CONTEXT + 1, 1).to(device)
    model = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 128), nn.GELU(), nn.Linear(128, 128)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def state_at(step: int) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": step}

    step = 0
    saved = sorted(args.root.glob("step-*"))
    if saved:
        state = state_at(step)
        load(state, saved[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
        print(f"goes on after step {step}", flush=True)
    while step < args.steps:
        batch = windows[torch.arange(step * BATCH, (step + 1) * BATCH) % len(windows)]
        loss = functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % args.save_every == 0 or step == args.steps:
            save(state_at(step), args.root / f"step-{step:08d}")
        print(f"step {step} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
