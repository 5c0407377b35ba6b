"""A disk that fills while a save runs beside training: an error on all ranks, nothing published, and the next save works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RankPool
from support.tmpfs import resize, small_disk, used_pages
from support.values import full

from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter, committed_steps, verify_checkpoint
from dcp_engine.background import BackgroundSaver
from dcp_engine.errors import DcpEngineError
from dcp_engine.staging import BufferState

NUM_PAGES = 4096
"""Of the whole disk; a save takes some 300."""


def state_of(step: int) -> dict[str, Any]:
    return {"model": {f"w{dist.get_rank()}": full(f"{dist.get_rank()} {step}", (300, 500))}}


def on_rank_0(call: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        call()
    dist.barrier()


def fill_beside_training(root: str, executor: str, spare: int) -> tuple[str, bool, list[str]]:
    """Save, fill the disk, save, make room, save. What the handle of the second said, and what the buffers are then."""
    place = Path(root)
    with BackgroundSaver(executor=executor, timeout_secs=60) as saver:

        def submit(step: int) -> Any:
            return saver.submit(state_of(step), writer=ShardWriter(f"{root}/step-{step:08d}", codec="raw"), step=step)

        submit(1).result(120)
        dist.barrier()
        on_rank_0(lambda: resize(place, used_pages(place) + spare))
        error = submit(2).exception(120)
        assert isinstance(error, DcpEngineError)
        assert committed_steps(root) == [1]
        assert [buffer.state for buffer in saver.stager.buffers] == [BufferState.FREE] * 2
        dist.barrier()
        on_rank_0(lambda: resize(place, NUM_PAGES))
        submit(3).result(120)
    dist.barrier()
    target = {"model": {key: torch.zeros_like(value) for key, value in state_of(3)["model"].items()}}
    dcp.load(target, storage_reader=ShardReader(f"{root}/step-00000003"), planner=ReshardLoadPlanner(strict=False))
    is_same = all(torch.equal(value, state_of(3)["model"][key]) for key, value in target["model"].items())
    return error.kind, is_same, [str(step) for step in committed_steps(root)]


@pytest.mark.parametrize(
    ("executor", "spare"),
    [("thread", 0), ("thread", 200), ("process", 200)],
    ids=["thread, at the first byte", "thread, within the data", "process, within the data"],
)
def test_a_disk_that_fills_is_an_error_on_all_ranks_and_the_next_save_works(
    ranks: RankPool, tmp_path: Path, executor: str, spare: int
) -> None:
    place = tmp_path / "disk"
    with small_disk(place) as mounted:
        if not mounted:
            return  # nobody may mount here; tests/faults/test_disks.py fills by other means
        found = ranks.run(2, fill_beside_training, str(place), executor, spare)
        assert found == [("storage_full", True, ["1", "3"])] * 2
        for step in (1, 3):
            assert verify_checkpoint(place / f"step-{step:08d}").faults == ()
