"""Save after save with one saver: nothing that it holds grows."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.ranks import RankPool

from dcp_engine import ShardWriter, verify_checkpoint
from dcp_engine.background import BackgroundSaver

NUM_SAVES = 30
NUM_LAST = 20
MOST_MIB = 6.0
"""Of resident memory, in twenty saves of 24 MiB each: one buffer, or one file's bytes, that is kept would be four times that. The heap of a
process that has run other tests before moves by up to 4 MiB."""
_PR_SET_THP_DISABLE = 41


def held() -> tuple[int, int, int, int]:
    """Resident bytes, descriptors and threads of this process and its children; objects of this one."""
    gc.collect()
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    resident = sum(int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in processes) * os.sysconf("SC_PAGE_SIZE")
    descriptors, threads = (sum(len(os.listdir(f"/proc/{process}/{what}")) for process in processes) for what in ("fd", "task"))
    return resident, descriptors, threads, len(gc.get_objects())


def save_often(root: str, executor: str) -> list[tuple[int, int, int, int]]:
    # The kernel would fill up runs of 2 MiB of the heap at times of its own.
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    state = {str(number): torch.zeros(2**20 if number < 5 else 2**8) for number in range(200)}
    found = []
    with BackgroundSaver(executor=executor) as saver:
        for number in range(NUM_SAVES):
            for tensor in state.values():
                tensor += 1
            path = f"{root}/{number}"
            saver.submit(state, writer=ShardWriter(path, codec="raw", threads=2), step=number).result(60)
            if number == 0:
                assert verify_checkpoint(path).faults == ()  # on a disk, large tensors went there past the page cache
            shutil.rmtree(path)
            found.append(held())
    return found


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_thirty_saves_hold_no_more_than_ten(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    (found,) = ranks.run(1, save_often, str(tmp_path), executor)
    last = found[-NUM_LAST:]
    resident = [one[0] / 2**20 for one in last]
    assert max(resident[NUM_LAST // 2 :]) - min(resident[: NUM_LAST // 2]) < MOST_MIB, resident
    assert len({one[1:3] for one in last}) == 1, "descriptors and threads"
    assert last[-1][3] - last[0][3] < 50, "objects: fewer than one for a tensor"
