"""``split_on_device`` over several ranks: what a rank holds alone comes apart, what others may hold too is compared and stays whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.host_as_device import host_as_device
from support.ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_engine import ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.background import BackgroundSaver
from dcp_engine.staging import DoubleBufferStager

# Of two ranks each: rows that no block of 4 MiB ends with, and a rank that holds less than the others.
ROWS, COLUMNS = 2999, 1001


def weights(seed: int) -> torch.Tensor:
    return 0.02 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def state_of() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = init_device_mesh("cpu", (dist.get_world_size(), 1))
    return {
        "replicated over one": distribute_tensor(weights(6)[:2000], wide, [Shard(0), Replicate()]),
        "replicated over all": distribute_tensor(weights(7), wide, [Replicate(), Shard(0)]),
        "rows": distribute_tensor(weights(1), mesh, [Shard(0)]),
        "columns": distribute_tensor(weights(2), mesh, [Shard(1)]),
        "bfloat16": distribute_tensor(weights(3).bfloat16(), mesh, [Shard(0)]),
        "replicated": distribute_tensor(weights(4), mesh, [Replicate()]),
        "plain": weights(5),
    }


def save_and_load(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lengths = host_as_device(patch)
        stager = DoubleBufferStager(split_on_device=True, memory="plain")
        state = state_of()
        with BackgroundSaver(stager=stager) as saver:
            saver.submit(state, writer=ShardWriter(path, codec="planes", threads=1)).result(120)
        stager.close()
        local = {key: value.to_local().nbytes for key, value in state.items() if isinstance(value, DTensor)}
        assert lengths == [{local["rows"], local["columns"], local["bfloat16"], local["replicated over one"]}]
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(target, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    for key, value in state.items():
        found = target[key]
        if isinstance(found, DTensor):
            found, value = found.to_local(), value.to_local()
        assert torch.equal(found, value), key


def test_only_what_a_rank_holds_alone_comes_apart_and_all_is_loaded_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_and_load, str(tmp_path / "a"))
