"""Policies on real ranks: all of them save the same steps, whatever their clocks say, and a state is as bad as its worst rank."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool

from dcp_engine import Checkpointer, RunRoot, verify_checkpoint
from dcp_engine.checkpointer.retention import facts_of_step
from dcp_engine.policies import Health, Keep, Phase, When


def _state(step: int) -> dict[str, Any]:
    return {f"w.{dist.get_rank()}": torch.full((100,), float(step))}


def save_by(root: str, when: When, num_saves: int, step_secs: float) -> list[int]:
    """What this rank saved; its steps take as long as its own clock says."""
    saved: list[int] = []
    with Checkpointer(root, when=when, keep=Keep(last=2)) as checkpointer:
        for step in itertools.count(1):
            time.sleep(step_secs * (1 + dist.get_rank()))
            if checkpointer.maybe_save(step, _state(step), wait=True) is not None:
                saved.append(step)
            if len(saved) == num_saves:
                break
    return saved


def test_by_time_the_ranks_save_the_same_steps(ranks: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    first, *others = ranks.run(3, save_by, root, When(secs=0.05), 4, 0.005)
    assert others == [first, first]
    assert RunRoot(root).steps() == first[-2:]


def test_by_a_budget_the_ranks_save_the_same_steps(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(3, save_by, str(tmp_path / "run"), When(budget=0.5), 3, 0.01)
    assert first[0] == 1
    assert others == [first, first]


def test_by_phases_no_rank_has_to_be_asked(ranks: RankPool, tmp_path: Path) -> None:
    when = When(phases=(Phase(every=2, until=6), Phase(every=5)))
    assert ranks.run(2, save_by, str(tmp_path / "run"), when, 5, 0.0) == [[2, 4, 6, 10, 15]] * 2


def diverge(root: str, losses: list[list[float | None]]) -> list[int]:
    """A save for each entry: this rank's loss, or none where it does not know."""
    with Checkpointer(root, keep=Keep(), health=Health()) as checkpointer:
        for step, by_rank in enumerate(losses, start=1):
            loss = by_rank[dist.get_rank()]
            checkpointer.save(step, _state(step), wait=True, metadata={} if loss is None else {"loss": loss})
        return checkpointer.steps()


def test_a_state_is_as_bad_as_its_worst_rank(ranks: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    ranks.run(2, diverge, root, [[1.0, 1.0], [None, 1.0], [1.0, math.nan], [None, math.inf]])
    # Only the last rank of a pipeline knows its loss: step 2 is healthy. Steps 3 and 4 are not, though the first rank does not see it.
    assert RunRoot(root).steps() == [2, 4]
    facts = {step: facts_of_step(RunRoot(root).look(step)) for step in (2, 4)}
    assert (facts[2].is_healthy, facts[4].is_healthy) == (True, False)


def save_on_nodes(root: str, failing: int) -> list[list[int]]:
    """Two ranks that are a node each, with a root of its own. Node 1 has no room for one of the steps."""
    os.environ["GROUP_RANK"] = str(dist.get_rank())
    root = f"{root}-{dist.get_rank()}"
    there = []
    state = {"w": torch.zeros(100)}
    with Checkpointer(root, node_local=True, keep=Keep(last=1)) as checkpointer:
        for step in range(1, 6):
            state["w"].fill_(step)
            if step == failing and dist.get_rank() == 1:
                Path(root, f"step-{step:08d}").mkdir()
                Path(root, f"step-{step:08d}", "in the way").touch()
            handle = checkpointer.save(step, state)
            handle.exception()
            dist.barrier()
            there.append(checkpointer.steps())
    return there


def test_nodes_keep_the_newest_step_that_all_of_them_hold(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, save_on_nodes, str(tmp_path / "run"), 3)
    # When a save begins, the one before it is everywhere: only then may what is older go.
    assert first == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5]]
    assert second == [[1], [1, 2], [1, 2], [2, 4], [4, 5]]


LEAVE = """
import sys
import torch
import torch.distributed as dist
from dcp_engine import Checkpointer
from dcp_engine.policies import Keep, When

root, ending = sys.argv[1:]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpointer = Checkpointer(root, keep=Keep(last=1), when=When(steps=1))


def main():
    for step in (1, 2, 3):
        checkpointer.maybe_save(step, {"w": torch.full((1000,), float(step))})
    if ending == "raise":
        raise ValueError("the training failed")
    if ending == "exit":
        sys.exit(3)
    if ending == "destroy":
        dist.destroy_process_group()


main()
"""


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("raise", 1), ("exit", 3), ("destroy", 0)])
def test_whoever_leaves_right_after_a_save_leaves_whole_steps(tmp_path: Path, ending: str, code: int) -> None:
    root = tmp_path / "run"
    left = subprocess.run([sys.executable, "-P", "-c", LEAVE, str(root), ending], capture_output=True, text=True, timeout=200, check=False)
    assert left.returncode == code, left.stderr
    assert ending == "destroy" or "failed" not in left.stderr.replace("the training failed", "")
    steps = RunRoot(root).steps()
    assert all(not verify_checkpoint(root / f"step-{step:08d}").faults for step in steps)
    assert ending == "destroy" or steps[-1] == 3
    with Checkpointer(root, keep=Keep(last=1)) as checkpointer:
        checkpointer.restore({"w": torch.zeros(1000)}, missing_ok=True)
        checkpointer.save(4, {"w": torch.ones(1000)}, wait=True)
        assert checkpointer.steps() == [4]
