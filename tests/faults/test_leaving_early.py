"""A training process that leaves while a save is under way: the checkpoint is complete or not there, and the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dcp_engine import committed_steps, verify_checkpoint

SCRIPT = """
import os, sys, tempfile
import torch, torch.distributed as dist
from dcp_engine import ShardWriter
from dcp_engine.background import BackgroundSaver

def main(root, executor, how):
    store = dist.FileStore(os.path.join(root, "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    saver = BackgroundSaver(executor=executor)
    saver.submit({{"w": torch.arange(2_000_000)}}, writer=ShardWriter(os.path.join(root, "steps", "step-00000001")), step=1)
    if how == "raise":
        raise ValueError("training failed")
    if how == "sys.exit":
        sys.exit(3)
    if how == "destroy":
        dist.destroy_process_group()
    if how == "os._exit":
        os._exit(4)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

EXIT_STATUS = {"return": 0, "raise": 1, "sys.exit": 3, "destroy": 0, "os._exit": 4}
# Each takes a start of Python or two. How the interpreter ends is one thing for a thread, how its child learns of it another.
CASES = [("thread", "return"), ("thread", "raise"), ("thread", "sys.exit"), ("thread", "destroy"), ("process", "return")]
CASES += [("process", "destroy"), ("process", "os._exit")]


@pytest.mark.parametrize(("executor", "how"), CASES)
def test_leaving_right_after_a_save_began_ends_whole_or_absent(tmp_path: Path, how: str, executor: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{{", "{").replace("}}", "}"), encoding="utf-8")
    (tmp_path / "steps").mkdir()
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path), executor, how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == EXIT_STATUS[how], run.stderr
    steps = committed_steps(str(tmp_path / "steps"))
    assert steps in ([], [1])
    if how in ("return", "raise", "sys.exit"):
        assert steps == [1], run.stderr  # there was time, and nothing in the way
    for step in steps:
        verify_checkpoint(str(tmp_path / "steps" / f"step-{step:08d}"))
