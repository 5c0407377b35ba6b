"""Positions go through a checkpoint, into the state of a sampler or stream that is at its beginning, with the engine's parts and DCP's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ResumableSampler, ResumableStream, ShardReader, ShardWriter, StreamSource


def read(shard: str, offset: int) -> Any:
    for i in range(offset, 20):
        yield f"{shard} {i}", i + 1


def parts(place: int) -> tuple[ResumableSampler, ResumableStream]:
    sampler = ResumableSampler(5000, batch_size=8, seed=4, rank=0, world_size=1)
    sources = {"a": StreamSource(shards=["a0", "a1"], read=read), "b.c": StreamSource(shards=["b0", "b1", "b2"], read=read, weight=2)}
    stream = ResumableStream(sources, rank=0, world_size=1)
    sampler.consumed(place)
    for _ in range(place and 1):
        iterator = iter(stream)
        for _ in range(place):
            next(iterator)
    return sampler, stream


@pytest.mark.parametrize(
    ("writer", "reader", "save_planner", "load_planner"),
    [
        (ShardWriter, ShardReader, BalancedSavePlanner, ReshardLoadPlanner),
        (dcp.FileSystemWriter, dcp.FileSystemReader, dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner),
    ],
    ids=["ours", "stock"],
)
@pytest.mark.parametrize("merged", [False, True])
def test_position_comes_back_into_a_fresh_state(
    tmp_path: Path, writer: Any, reader: Any, save_planner: type[SavePlanner], load_planner: type[LoadPlanner], merged: bool
) -> None:
    sampler, stream = parts(61)
    progress = stream.state_dict()
    if merged:
        progress = ResumableStream.merge([progress])
    state = {"data": {"sampler": sampler.state_dict(), "stream": progress}}
    dcp.save(state, storage_writer=writer(str(tmp_path / "step-00000001")), planner=save_planner())
    fresh_sampler, fresh_stream = parts(0)
    loaded = {"data": {"sampler": fresh_sampler.state_dict(), "stream": fresh_stream.state_dict()}}
    dcp.load(loaded, storage_reader=reader(str(tmp_path / "step-00000001")), planner=load_planner())
    assert loaded == state
    fresh_sampler.load_state_dict(loaded["data"]["sampler"])
    fresh_stream.load_state_dict(loaded["data"]["stream"])
    assert next(iter(fresh_sampler)) == next(iter(sampler))
    assert sorted(fresh_stream.state_dict()) == sorted(stream.state_dict())
    assert fresh_stream.repeat_window == 0
