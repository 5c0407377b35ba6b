"""What goes wrong beside training on one rank: every rank learns of it in bounded time, and the next save works."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.odd_planners import FailingPlanner, SlowPlanner
from support.ranks import RankPool
from support.values import full
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter, committed_steps, verify_checkpoint
from dcp_engine.background import BackgroundSaver, UnchangedStateWarning, process
from dcp_engine.errors import BackgroundSaveError, EarlierSaveFailedError, SaverDiedError, StagingError, StorageError


def state_of(step: int) -> dict[str, Any]:
    return {"model": {f"w{dist.get_rank()}": full(f"w {dist.get_rank()} {step}", (5, 3))}, "optimizer": {"step": torch.tensor(float(step))}}


def check_saved(path: str, step: int) -> None:
    target = state_of(0)
    dcp.load(target, storage_reader=ShardReader(path), planner=ReshardLoadPlanner(strict=False))
    for key, value in target["model"].items():
        assert torch.equal(value, full(f"{key[0]} {key[1:]} {step}", (5, 3)))
    assert target["optimizer"]["step"].item() == step


def submit(saver: BackgroundSaver, root: str, step: int, **options: Any) -> Any:
    return saver.submit(state_of(step), writer=ShardWriter(f"{root}/step-{step:08d}"), step=step, **options)


# -- failures that some ranks have read and others not ----------------------------------------------------------------------


def read_on_rank_1_only(root: str) -> str:
    with BackgroundSaver(timeout_secs=30) as saver:
        handle = submit(saver, root, 1, planner=FailingPlanner())
        handle.wait_done(30)
        seen = ""
        if dist.get_rank() == 1:
            handle.exception()
            seen = type(submit(saver, root, 2).exception(30)).__name__
        else:
            try:
                submit(saver, root, 2)
            except BackgroundSaveError as error:
                seen = type(error).__name__
        for step in (3, 4):
            submit(saver, root, step).result(30)
    check_saved(f"{root}/step-00000004", 4)
    return seen


def test_a_failure_that_one_rank_has_read_costs_one_save_and_no_more(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, read_on_rank_1_only, str(tmp_path)) == [BackgroundSaveError.__name__, EarlierSaveFailedError.__name__]
    assert committed_steps(str(tmp_path)) == [3, 4]


# -- what a rank cannot even hand over --------------------------------------------------------------------------------------


class Sulking:
    """A ``Stateful`` that fails on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise OSError("the data loader is gone")
        return {"position": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never asked."""


def sulk(root: str) -> str:
    with BackgroundSaver(timeout_secs=30) as saver:
        error = saver.submit({**state_of(1), "data": Sulking()}, writer=ShardWriter(f"{root}/step-00000001"), step=1).exception(20)
        submit(saver, root, 2).result(30)
    assert isinstance(error, StagingError)
    return f"{error.rank} {error.tensor} {error.found}"


def test_an_object_that_does_not_tell_its_state_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, sulk, str(tmp_path)) == ["1 data OSError: the data loader is gone"] * 2
    assert committed_steps(str(tmp_path)) == [2]


def warn_on_rank_1(root: str) -> None:
    with BackgroundSaver(timeout_secs=30) as saver, warnings.catch_warnings():
        warnings.simplefilter("error", UnchangedStateWarning)
        state: dict[str, Any] = {"model": {f"w{dist.get_rank()}": torch.ones(3)}}
        for step in (1, 2):
            if dist.get_rank() == 0:
                state["model"]["w0"].add_(1)
            try:
                saver.submit(state, writer=ShardWriter(f"{root}/step-{step:08d}"), step=step)
            except UnchangedStateWarning:
                assert (dist.get_rank(), step) == (1, 2)
        saver.wait(30)


def test_an_alarm_that_is_an_error_on_one_rank_leaves_no_rank_waiting(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, warn_on_rank_1, str(tmp_path))
    assert committed_steps(str(tmp_path)) == [1, 2]


# -- workers that die -------------------------------------------------------------------------------------------------------


def fail_in_a_worker(root: str, executor: str, how: list[str]) -> list[str]:
    texts = []
    with BackgroundSaver(executor=executor, timeout_secs=30) as saver:
        submit(saver, root, 1).result(90)
        for one in how:
            error = submit(saver, root, 2, planner=FailingPlanner(one)).exception(60)
            texts.append(f"{type(error).__name__} {error.rank} {error.found}")
        submit(saver, root, 3).result(90)
    check_saved(f"{root}/step-00000003", 3)
    return texts


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_whatever_ends_a_worker_its_text_reaches_all_and_the_next_save_works(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    answers = ranks.run(2, fail_in_a_worker, str(tmp_path), executor, ["raise", "unpicklable", "sys.exit"], timeout_secs=180)
    for texts in answers:
        assert texts[0] == "BackgroundSaveError 1 ValueError: a hook of the user's failed"
        assert texts[1] == "RankFailedError 1 UnpicklableError: a hook of the user's failed"
        assert texts[2].startswith("BackgroundSaveError 1 ")
        assert "17" in texts[2]
    assert committed_steps(str(tmp_path)) == [1, 3]


def kill_saving_processes(root: str) -> list[str]:
    seen = []
    with BackgroundSaver(executor="process", timeout_secs=30, failure_secs=8) as saver:
        submit(saver, root, 1).result(90)
        child = saver._executor._child  # type: ignore[attr-defined]
        if dist.get_rank() == 1:  # idle: replaced, and nobody notices
            os.kill(child._process.pid, signal.SIGKILL)
            child._process.join()
        submit(saver, root, 2).result(90)
        error = submit(saver, root, 3, planner=FailingPlanner("die")).exception(60)
        seen.append(f"{type(error).__name__} {error.rank} {error.found}")
        child = saver._executor._child  # type: ignore[attr-defined]
        handle = submit(saver, root, 4, planner=SlowPlanner())
        if dist.get_rank() == 1:
            dead = child
            while (child := saver._executor._child) is dead or child is None or not child._sent:  # type: ignore[attr-defined]
                time.sleep(0.1)  # new processes start first
            os.kill(child._process.pid, signal.SIGSTOP)
        error = handle.exception(60)
        seen.append(f"{type(error).__name__} {error.rank}")
        submit(saver, root, 5).result(90)
    check_saved(f"{root}/step-00000005", 5)
    return seen


def test_saving_processes_that_die_or_stop_fail_their_save_alone(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, kill_saving_processes, str(tmp_path), timeout_secs=240)
    assert answers == [["SaverDiedError 1 exit code 17", "SaverDiedError 1"]] * 2
    assert committed_steps(str(tmp_path)) == [1, 2, 5]


def fail_to_start_on_rank_1(root: str) -> str:
    with BackgroundSaver(executor="process", timeout_secs=30) as saver:
        if dist.get_rank() == 1:
            started = process._Child.__init__

            def die(child: Any, *args: Any) -> None:
                process._Child.__init__ = started  # type: ignore[method-assign]
                raise SaverDiedError("the process that saves for this rank died while starting", rank=1)

            process._Child.__init__ = die  # type: ignore[method-assign]
        begun = time.monotonic()
        error = submit(saver, root, 1).exception(100)
        assert time.monotonic() - begun < 60, "the other rank's process was waited for"
        submit(saver, root, 2).result(90)
    return f"{type(error).__name__} {error.rank}"


def test_a_saving_process_that_does_not_start_is_an_error_on_all_ranks_at_once(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, fail_to_start_on_rank_1, str(tmp_path), timeout_secs=200) == ["SaverDiedError 1"] * 2
    assert committed_steps(str(tmp_path)) == [2]


# -- states of all kinds through a process ----------------------------------------------------------------------------------


def with_fields(local: torch.Tensor, rank: int) -> torch.Tensor:
    """A part of a larger tensor in the terms of torch 2.14."""
    local.global_shape = (4, 3)  # type: ignore[attr-defined]
    local.global_offsets = ((2 * rank, 0),)  # type: ignore[attr-defined]
    local.local_offsets = ((0, 0),)  # type: ignore[attr-defined]
    local.local_sizes = ((2, 3),)  # type: ignore[attr-defined]
    return local


def save_all_kinds(root: str, executor: str) -> None:
    rank = dist.get_rank()
    whole, part = full("whole", (4, 3)), full("part", (4, 3))
    mesh = init_device_mesh("cpu", (2,))
    alone = DeviceMesh("cpu", [1])
    state = {
        "dtensor": DTensor.from_local(whole[2 * rank : 2 * rank + 2].clone(), mesh, [Shard(0)]),
        "sub": DTensor.from_local(full("sub", (4,))[: 4 if rank == 1 else 0].clone(), alone, [Shard(0)], shape=(4,), stride=(1,)),
        "part": with_fields(part[2 * rank : 2 * rank + 2].clone(), rank),
        "empty": torch.empty(0, 3),
        "base": whole,
        "column": whole[:, 1],
    }
    with BackgroundSaver(executor=executor) as saver:
        for step in (1, 2):
            saver.submit(state, writer=ShardWriter(f"{root}/step-{step:08d}")).result(90)
    target = {key: torch.zeros(shape) for key, shape in (("dtensor", (4, 3)), ("sub", (4,)), ("part", (4, 3)), ("column", (4,)))}
    target["empty"], target["base"] = torch.zeros(0, 3), torch.zeros(4, 3)
    dcp.load(target, storage_reader=ShardReader(f"{root}/step-00000002"), planner=ReshardLoadPlanner())
    assert torch.equal(target["dtensor"], whole)
    assert torch.equal(target["sub"], full("sub", (4,)))
    assert torch.equal(target["part"], part)
    assert torch.equal(target["base"], whole)
    assert torch.equal(target["column"], whole[:, 1])


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_shards_of_every_kind_arrive_whole(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    ranks.run(2, save_all_kinds, str(tmp_path), executor, timeout_secs=180)


# -- overlap ------------------------------------------------------------------------------------------------------------------


def overlap(root: str) -> list[str]:
    with BackgroundSaver(timeout_secs=60) as saver:
        submit(saver, root, 1).result(60)
        handles = [submit(saver, root, step, planner=SlowPlanner() if step == 2 else None) for step in (2, 3)]
        handles.append(submit(saver, root, 3))  # the same place again
        dist.barrier()
        check_saved(f"{root}/step-00000001", 1)  # a load while a save runs
        return [type(handle.exception(60)).__name__ for handle in handles]


def test_saves_may_overlap_with_each_other_with_collectives_and_with_a_load(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, overlap, str(tmp_path)) == [["NoneType", "NoneType", "CheckpointExistsError"]] * 2
    assert committed_steps(str(tmp_path)) == [1, 2, 3]


# -- disks, and steps that are saved again ------------------------------------------------------------------------------------


def write_to_a_full_disk(root: str) -> str:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with BackgroundSaver(timeout_secs=60) as saver:
        submit(saver, root, 1).result(60)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            error = submit(saver, root, 2).exception(60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        submit(saver, root, 3).result(60)
    assert isinstance(error, StorageError)
    return f"{error.rank} {error.errno}"


def test_a_file_that_cannot_be_written_on_one_rank_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, write_to_a_full_disk, str(tmp_path)) == [f"1 {errno.EFBIG}"] * 2
    assert committed_steps(str(tmp_path)) == [1, 3]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001", "step-00000003"], "what rank 0 had written of step 2 fills the disk no longer"


def save_step_1(root: str, how: str | None) -> None:
    with BackgroundSaver(timeout_secs=60) as saver:
        error = submit(saver, root, 1, planner=FailingPlanner(how) if how else None).exception(60)
    assert (error is None) == (how is None)


def test_a_step_that_failed_is_saved_again_by_other_ranks_and_holds_theirs_alone(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, save_step_1, str(tmp_path), "raise")
    assert committed_steps(str(tmp_path)) == []
    ranks.run(2, save_step_1, str(tmp_path), None)
    report = verify_checkpoint(tmp_path / "step-00000001")
    assert report.faults == ()
    shards = sorted(path.name for path in (tmp_path / "step-00000001").glob("*.shard"))
    assert [name[-7] for name in shards if name.startswith("model-")] == ["0", "1"]
