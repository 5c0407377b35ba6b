"""Saving beside training over several ranks: failures of one reach all, dead processes are replaced, nothing half-done is published."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.odd_planners import FailingPlanner, SlowPlanner
from support.ranks import RankPool
from support.values import full
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.background import BackgroundSaver
from dcp_engine.errors import BackgroundSaveError, StagingMemoryError, UnsupportedTensorError
from dcp_engine.staging import BufferState, DoubleBufferStager


def state_of(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {
            "sharded": distribute_tensor(full(f"sharded {step}", (7, 3)), mesh, [Shard(0)]),
            "replicated": full(f"replicated {step}", (5, 2)),
        },
        "optimizer": {"step": torch.tensor(float(step))},
        "progress": {"step": step},
    }


def check_saved(path: str, step: int) -> None:
    target = state_of(0)
    dcp.load(target, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    assert torch.equal(target["model"]["sharded"].full_tensor(), full(f"sharded {step}", (7, 3)))
    assert torch.equal(target["model"]["replicated"], full(f"replicated {step}", (5, 2)))
    assert target["optimizer"]["step"].item() == step
    assert target["progress"]["step"] == step


def spoil(state: dict[str, Any]) -> None:
    """What training does next."""
    for tensor in (state["model"]["sharded"].to_local(), state["model"]["replicated"], state["optimizer"]["step"]):
        tensor.add_(1)
    state["progress"]["step"] += 1


# -- saves that go well -----------------------------------------------------------------------------------------------------


def save_three(root: str, executor: str) -> None:
    with BackgroundSaver(executor=executor) as saver:
        handles = []
        for step in (1, 2, 3):
            state = state_of(step)
            handles.append(saver.submit(state, writer=ShardWriter(f"{root}/step-{step:08d}"), step=step))
            spoil(state)
            dist.barrier()  # the training's own collectives, meanwhile
        for handle in handles:
            handle.result(60)
            assert handle.staged.done()
            assert handle.timings is not None
            assert handle.timings.write_secs > 0
        assert [buffer.state for buffer in saver.stager.buffers] == [BufferState.FREE, BufferState.FREE]
    for step in (1, 2, 3):
        check_saved(f"{root}/step-{step:08d}", step)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_what_was_staged_is_saved_whatever_training_does_meanwhile(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    ranks.run(2, save_three, str(tmp_path), executor)


# -- failures of one rank ---------------------------------------------------------------------------------------------------


def fail_on_rank_1(root: str, executor: str) -> str:
    with BackgroundSaver(executor=executor) as saver:
        state = state_of(1)
        if dist.get_rank() == 1:
            state["bad"] = threading.Lock()
        error = saver.submit(state, writer=ShardWriter(f"{root}/step-00000001"), step=1).exception(60)
        state = state_of(2)
        saver.submit(state, writer=ShardWriter(f"{root}/step-00000002"), step=2).result(60)
    check_saved(f"{root}/step-00000002", 2)
    return f"{type(error).__name__} of rank {error.rank}: {error}"  # type: ignore[union-attr]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_staging_that_fails_on_one_rank_is_its_error_on_all_at_once(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    answers = ranks.run(2, fail_on_rank_1, str(tmp_path), executor, group_timeout_secs=20, timeout_secs=90)
    assert answers[0] == answers[1]
    assert answers[0].startswith("StagingError of rank 1: a value of the state cannot be copied")
    assert "tensor 'bad'" in answers[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]


def fail_while_writing(root: str, executor: str) -> None:
    with BackgroundSaver(executor=executor) as saver:
        handle = saver.submit(state_of(1), writer=ShardWriter(f"{root}/step-00000001"), planner=FailingPlanner(), step=1)
        error = handle.exception(60)
        assert isinstance(error, BackgroundSaveError)
        assert error.rank == 1
        assert "a hook of the user's failed" in str(error)
        assert [buffer.state for buffer in saver.stager.buffers] == [BufferState.FREE, BufferState.FREE]
        saver.submit(state_of(2), writer=ShardWriter(f"{root}/step-00000002"), step=2).result(60)
    check_saved(f"{root}/step-00000002", 2)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_an_error_while_writing_reaches_all_ranks_and_frees_the_buffers(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    ranks.run(2, fail_while_writing, str(tmp_path), executor, timeout_secs=90)
    assert not (tmp_path / "step-00000001").exists()


def leave_a_failure_unread(root: str) -> list[str]:
    saver = BackgroundSaver()
    state = state_of(1)
    if dist.get_rank() == 1:
        state["model"]["bad"] = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    saver.submit(state, writer=ShardWriter(f"{root}/step-00000001"), step=1).wait_done(60)
    raised = []
    try:
        saver.submit(state_of(2), writer=ShardWriter(f"{root}/step-00000002"), step=2)
    except UnsupportedTensorError as error:
        raised.append(f"{error.rank} {error.tensor}")
    saver.submit(state_of(3), writer=ShardWriter(f"{root}/step-00000003"), step=3).result(60)
    saver.close()
    saver.close()
    return raised


def test_a_failure_that_nobody_read_is_raised_once_by_the_next_save(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, leave_a_failure_unread, str(tmp_path)) == [["1 model.bad"], ["1 model.bad"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003"]


class LocalPlanner(BalancedSavePlanner):
    """No other process can import it from here."""


def send_what_cannot_arrive(root: str) -> str:
    with BackgroundSaver(executor="process") as saver:
        planner = LocalPlanner() if dist.get_rank() == 1 else BalancedSavePlanner()
        error = saver.submit(state_of(1), writer=ShardWriter(f"{root}/step-00000001"), planner=planner, step=1).exception(60)
        saver.submit(state_of(2), writer=ShardWriter(f"{root}/step-00000002"), step=2).result(60)
    return f"{type(error).__name__} {error.rank} {error}"  # type: ignore[union-attr]


def test_a_class_that_the_saving_process_cannot_import_is_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, send_what_cannot_arrive, str(tmp_path), timeout_secs=120)
    assert answers[0] == answers[1]
    assert answers[0].startswith("BackgroundSaveError 1 what is to be saved cannot be read by the process that saves")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


# -- plain dcp.async_save ---------------------------------------------------------------------------------------------------


def async_save_fails_on_rank_1(root: str) -> str:
    stager = DoubleBufferStager(budget_bytes=64 if dist.get_rank() == 1 else None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    started = time.monotonic()
    future = dcp.async_save(
        state_of(1), storage_writer=ShardWriter(f"{root}/a"), planner=BalancedSavePlanner(), process_group=group, async_stager=stager
    )
    with pytest.raises(CheckpointException) as caught:
        future.result(60)  # type: ignore[union-attr]
    assert time.monotonic() - started < 20, "it was the group's timeout that ended it"
    (failure,) = [wrapped[0] for wrapped in caught.value.failures.values()]
    assert isinstance(failure, StagingMemoryError)
    assert failure.needed_bytes > failure.available_bytes == 64
    stager.close()
    return f"{list(caught.value.failures)} {failure.rank}"


def test_a_stager_that_fails_on_one_rank_fails_the_async_save_of_all(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, async_save_fails_on_rank_1, str(tmp_path)) == ["[1] 1", "[1] 1"]
    assert list(tmp_path.iterdir()) == []


def save_in_dcps_process(root: str) -> None:
    stager = DoubleBufferStager(memory="shared")
    planner = BalancedSavePlanner()
    for step in (1, 2, 3):
        state = state_of(step)
        future = stager.track(
            dcp.async_save(
                state,
                storage_writer=ShardWriter(f"{root}/step-{step:08d}"),
                planner=planner,
                async_stager=stager,
                async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
            )
        )
        spoil(state)
        future.result(90)  # type: ignore[union-attr]
        assert all(buffer.state is BufferState.FREE for buffer in stager.buffers)
        check_saved(f"{root}/step-{step:08d}", step)
    stager.close()


def test_dcps_own_process_saves_what_is_staged_in_shared_memory(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_in_dcps_process, str(tmp_path), timeout_secs=180)


# -- processes that die -----------------------------------------------------------------------------------------------------


def kill_the_saving_process_of_rank_1(root: str, how: int) -> str:
    with BackgroundSaver(executor="process", timeout_secs=30) as saver:
        saver.submit(state_of(1), writer=ShardWriter(f"{root}/step-00000001"), step=1).result(90)
        child = saver._executor._child._process.pid  # type: ignore[attr-defined]
        handle = saver.submit(state_of(2), writer=ShardWriter(f"{root}/step-00000002"), planner=SlowPlanner(), step=2)
        if dist.get_rank() == 1:
            time.sleep(1.0)
            os.kill(child, how)
        started = time.monotonic()
        error = handle.exception(60)
        assert time.monotonic() - started < 25
        saver.submit(state_of(3), writer=ShardWriter(f"{root}/step-00000003"), step=3).result(90)
    check_saved(f"{root}/step-00000003", 3)
    return type(error).__name__


def test_a_saving_process_that_dies_fails_its_save_everywhere_and_is_replaced(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, kill_the_saving_process_of_rank_1, str(tmp_path), signal.SIGKILL, timeout_secs=180)
    assert answers == ["SaverDiedError"] * 2
    verify_checkpoint(str(tmp_path / "step-00000001"))
    assert not (tmp_path / "step-00000002").exists()
