"""Ranks that are lost while they save: dead is told from slow, all others get one error in bounded time, and the next save works."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.odd_planners import FailingPlanner, HangingPlanner
from support.ranks import RankPool
from support.values import full

from dcp_engine import ShardWriter, committed_steps, compat, verify_checkpoint
from dcp_engine.background import BackgroundSaver
from dcp_engine.errors import DcpEngineError, RankLostError


def state_of(step: int) -> dict[str, Any]:
    return {"model": {f"w{dist.get_rank()}": full(f"w {dist.get_rank()} {step}", (50, 30))}}


def submit(saver: BackgroundSaver, root: str, step: int, **options: Any) -> Any:
    return saver.submit(state_of(step), writer=ShardWriter(f"{root}/step-{step:08d}"), step=step, **options)


def told(error: BaseException | None) -> tuple[str, int | None, str | None, str]:
    assert isinstance(error, DcpEngineError), repr(error)
    return type(error).__name__, error.rank, error.phase, str(error.found)


# -- hung, and slow ---------------------------------------------------------------------------------------------------------


def hang(root: str, executor: str) -> Any:
    with BackgroundSaver(executor=executor, failure_secs=5, timeout_secs=60) as saver:
        submit(saver, root, 1).result(90)
        began = time.monotonic()
        error = submit(saver, root, 2, planner=HangingPlanner()).exception(90)
        secs = time.monotonic() - began
        free = [buffer.state.value for buffer in saver.stager.buffers]
        submit(saver, root, 3).result(90)
    return told(error), secs < 40, free


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_write_that_hangs_is_one_error_on_all_ranks_and_costs_no_buffer(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    answers = ranks.run(2, hang, str(tmp_path), executor, timeout_secs=200)
    assert answers[0] == answers[1]
    (kind, rank, phase, found), in_time, free = answers[0]
    assert (kind, rank, phase) == ("RankLostError", 1, "writing")
    assert "no progress" in found
    assert in_time
    assert free == ["free", "free"]
    assert committed_steps(str(tmp_path)) == [1, 3]


def write_slowly(root: str) -> None:
    state = {f"w{dist.get_rank()}": torch.arange(200_000 if dist.get_rank() == 1 else 10)}
    with BackgroundSaver(failure_secs=3, timeout_secs=60) as saver:
        writer = ShardWriter(f"{root}/step-00000001", codec="raw", max_bytes_per_sec=200_000)
        began = time.monotonic()
        saver.submit(state, writer=writer).result(60)
        assert time.monotonic() - began > 5, "it was not slow"


def test_a_slow_rank_is_not_taken_for_dead(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, write_slowly, str(tmp_path))
    verify_checkpoint(tmp_path / "step-00000001")


def come_late(root: str) -> None:
    with BackgroundSaver(failure_secs=2, timeout_secs=60) as saver:
        if dist.get_rank() == 1:
            time.sleep(5)
        submit(saver, root, 1).result(60)


def test_a_rank_that_comes_late_is_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, come_late, str(tmp_path))
    assert committed_steps(str(tmp_path)) == [1]


# -- what was raised --------------------------------------------------------------------------------------------------------


def raise_outside_of_every_step(root: str) -> Any:
    """What a step cannot tell: the thread itself fails."""
    from dcp_engine.background.thread import ThreadExecutor

    run = ThreadExecutor.run

    def fail(executor: Any, job: Any, save: Any, exchange: Any) -> Any:
        if dist.get_rank() == 1 and save.number == 2:
            raise ZeroDivisionError("the thread failed")
        return run(executor, job, save, exchange)

    ThreadExecutor.run = fail  # type: ignore[method-assign]
    try:
        with BackgroundSaver(failure_secs=20) as saver:
            submit(saver, root, 1).result(60)
            error = submit(saver, root, 2).exception(60)
            submit(saver, root, 3).result(60)
    finally:
        ThreadExecutor.run = run  # type: ignore[method-assign]
    return told(error)


def test_a_failure_outside_of_every_step_is_told_to_all(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, raise_outside_of_every_step, str(tmp_path))
    assert answers[0] == answers[1]
    assert answers[0][:2] == ("BackgroundSaveError", 1)
    assert answers[0][3] == "ZeroDivisionError: the thread failed"
    assert committed_steps(str(tmp_path)) == [1, 3]


def fail_with_a_phase(root: str) -> Any:
    with BackgroundSaver() as saver:
        return [told(submit(saver, root, 1, planner=FailingPlanner(how)).exception(60)) for how in ("raise", "unpicklable", "sys.exit")]


def test_an_error_says_rank_phase_and_text(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, fail_with_a_phase, str(tmp_path))
    assert answers[0] == answers[1]
    assert [answer[1:3] for answer in answers[0]] == [(1, "writing")] * 3
    assert answers[0][0][3] == "ValueError: a hook of the user's failed"
    assert answers[0][1][3] == "UnpicklableError: a hook of the user's failed"
    assert answers[0][2][3] == "SystemExit: 17"


# -- the store --------------------------------------------------------------------------------------------------------------


def stop_the_store(root: str) -> Any:
    """Rank 0 holds the store, as it does where no launcher does."""
    shared = dist.PrefixStore("store", compat.default_store().clone())
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared.set("place", f"{store.port} {os.getpid()}")
    port, process = map(int, shared.get("place").split())
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    saver = BackgroundSaver(failure_secs=3, timeout_secs=5)
    submit(saver, root, 1).result(60)
    shared.add("ready", 1)
    if rank == 0:
        while shared.add("ready", 0) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)
        error = submit(saver, root, 2).exception(60)
    else:
        error = submit(saver, root, 2).exception(60)
        os.kill(process, signal.SIGCONT)
    shared.add("told", 1)
    while shared.add("told", 0) < 2:
        time.sleep(0.01)
    with contextlib.suppress(DcpEngineError):
        saver.close()
    return type(error).__name__, str(error)


def test_a_store_whose_host_is_stopped_is_an_error_in_bounded_time(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, stop_the_store, str(tmp_path), timeout_secs=100)
    assert answers[1][0] == RankLostError.__name__
    assert "the store of the process group does not answer" in answers[1][1]
    assert answers[0][0] != "NoneType"
    assert committed_steps(str(tmp_path)) == [1]
