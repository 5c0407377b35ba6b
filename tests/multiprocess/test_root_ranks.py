"""A root that several processes share: ranks that decide together, runs that come back, two who prune at once."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RankFailure, RankPool
from support.roots import RootPlace, loaded, save_step
from support.values import full
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, RunRoot, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import CorruptCheckpointError, FencedError, RankDisagreementError
from dcp_engine.storage.epochs import EpochClaim
from dcp_engine.storage.publish import open_publisher


def decide(paths: list[str]) -> Any:
    return RunRoot(paths[dist.get_rank()]).decide(dist.group.WORLD)


def test_all_ranks_take_what_one_of_them_sees(ranks: RankPool, tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path))
    assert ranks.run(3, decide, [place.path] * 3) == [None] * 3
    for step in (4, 5):
        place.save(step)
    decisions = ranks.run(3, decide, [place.path] * 3)
    assert decisions == [place.root().decide()] * 3
    assert decisions[0].step == 5


@pytest.mark.parametrize("sees", ["nothing", "another attempt"])
def test_a_rank_that_sees_something_else_is_named_on_all(ranks: RankPool, tmp_path: Path, sees: str) -> None:
    place, other = RootPlace(str(tmp_path / "run")), RootPlace(str(tmp_path / "other"))
    place.save(5)
    if sees == "another attempt":
        other.save(5)
    with pytest.raises(RankFailure) as caught:
        ranks.run(3, decide_impatiently, [place.path, place.path, other.path])
    assert sorted(caught.value.failures) == [0, 1, 2]
    for error in caught.value.failures.values():
        assert isinstance(error, RankDisagreementError)
        assert (error.rank, error.step) == (2, 5)
        assert "there is no checkpoint" in str(error.found) if sees == "nothing" else "Decision(step=5" in str(error.found)


def test_where_the_first_rank_sees_no_step_and_another_does_nobody_begins_afresh(ranks: RankPool, tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path / "run"))
    place.save(5)
    with pytest.raises(RankFailure) as caught:
        ranks.run(3, decide, [str(tmp_path / "elsewhere"), place.path, place.path])
    assert sorted(caught.value.failures) == [0, 1, 2]
    for error in caught.value.failures.values():
        assert isinstance(error, RankDisagreementError)
        assert (error.rank, error.found) == (1, "1 of them, the newest step 5")


def decide_impatiently(paths: list[str]) -> Any:
    from dcp_engine.storage import root_decision

    root_decision._VISIBILITY_SECS = 0.0
    try:
        return decide(paths)
    finally:
        root_decision._VISIBILITY_SECS = 15.0


def test_an_error_of_the_rank_that_looks_is_one_of_all(ranks: RankPool, tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path))
    place.save(1)
    (tmp_path / "step-00000001" / "MANIFEST").write_bytes(b"")
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, decide, [place.path] * 2)
    assert [type(error) for error in caught.value.failures.values()] == [CorruptCheckpointError] * 2


# -- the same step again, on another number of ranks -----------------------------------------------------------------------


def sharded(step: int) -> DTensor:
    return distribute_tensor(full("w", (12, 2), torch.float32) + step, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def save_sharded(path: str, step: int, claim: EpochClaim, die_at_the_end: bool) -> None:
    root = RunRoot(path)
    writer = ShardWriter(root.path_of(step), fence=claim)
    if die_at_the_end:
        writer.finish = lambda metadata, results: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    dcp.save({"w": sharded(step)}, storage_writer=writer, planner=BalancedSavePlanner())


def load_sharded(path: str) -> bool:
    decision = RunRoot(path).decide(dist.group.WORLD)
    assert decision is not None
    state = {"w": torch.zeros_like(sharded(0))}
    reader = ShardReader(RunRoot(path).path_of(decision.step), process_group=dist.group.WORLD)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    return torch.equal(state["w"].full_tensor(), full("w", (12, 2), torch.float32) + decision.step)


def test_the_same_step_again_on_other_ranks_after_a_crash(ranks: RankPool, tmp_path: Path) -> None:
    root = RunRoot(tmp_path / "run")
    claim = root.claim("first")
    ranks.run(2, save_sharded, root.path, 10, claim, False)
    with pytest.raises(RankFailure):
        ranks.run(2, save_sharded, root.path, 20, claim, True)
    assert root.steps() == [10]
    left = [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".tmp-step-00000020-")]
    assert [len(list(path.glob("*.shard"))) for path in left] == [2]

    again = root.claim("second")
    assert not left[0].exists()
    assert ranks.run(3, load_sharded, root.path) == [True] * 3
    ranks.run(3, save_sharded, root.path, 20, again, False)
    assert root.steps() == [10, 20]
    assert sorted(path.name for path in (tmp_path / "run" / "step-00000020").glob("*.shard")) == [f"model-0000{i}.shard" for i in range(3)]
    assert verify_checkpoint(root.path_of(20)).faults == ()
    assert ranks.run(2, load_sharded, root.path) == [True, True]
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, save_sharded, root.path, 30, claim, False)
    error = next(iter(caught.value.failures.values()))
    assert isinstance(getattr(error, "failures", {0: [error]})[0][0], FencedError)


# -- retention ----------------------------------------------------------------------------------------------------------


def run_once(path: str, steps: list[int]) -> tuple[int | None, list[int]]:
    """One process of a run: claim, go on, save with keep=1."""
    root = RunRoot(path)
    claim = root.claim()
    decision = root.decide()
    for step in steps:
        save_step(root, step, claim)
        root.set_latest(step, claim)
        root.prune(1, claim)
    return decision and decision.step, root.steps()


def test_keep_one_across_a_resume_in_a_new_process(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    assert ranks.run(1, run_once, path, [1, 2]) == [(None, [2])]
    assert ranks.run(1, run_once, path, [3]) == [(2, [3])]
    assert ranks.run(1, run_once, path, []) == [(3, [3])]
    assert loaded(RunRoot(path), 3) == [3, 0]
    assert sorted(os.listdir(path)) == [".epochs", "LATEST", "step-00000003"]


def test_keep_one_while_the_newest_save_fails(tmp_path: Path) -> None:
    root = RunRoot(tmp_path / "run")
    claim = root.claim()
    save_step(root, 1, claim)
    publisher = open_publisher(root.path_of(2), fence=claim)
    publisher.begin()  # and then the process is gone
    assert root.prune(1, claim).kept == (1,)
    assert loaded(root, 1) == [1, 0]


def prune_all(path: str, claim: EpochClaim) -> list[int]:
    root = RunRoot(path)
    dist.barrier()
    return [step for _ in range(3) for step in root.prune(1, claim).retired]


def test_two_processes_that_prune_at_once_do_no_harm(ranks: RankPool, tmp_path: Path) -> None:
    place = RootPlace(str(tmp_path / "run"))
    claim = place.root().claim()
    place.save(1, claim)
    for step in range(2, 42):
        shutil.copytree(place.root().path_of(1), place.root().path_of(step))
    gone = ranks.run(2, prune_all, place.path, claim)
    assert sorted(gone[0] + gone[1]) == list(range(1, 41))
    assert sorted(os.listdir(place.path)) == [".epochs", "step-00000041"]
    assert place.loaded(41) == [1, 0]
