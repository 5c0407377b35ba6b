"""Scale: growth is near linear in tensors, shards and ranks, by CPU time of this process; a tensor larger than 4 GiB round-trips."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import load, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, verify_checkpoint
from dcp_engine.types import EngineStorageMeta

# The hang timeout is of wall time, of which a busy machine may need many times the CPU time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = 2


class Shard(torch.Tensor):
    """One rank's rows of a tensor that is sharded over many, by DCP's duck protocol: no process group is needed to plan it."""

    @staticmethod
    def __new__(cls, rank: int, num_ranks: int) -> Shard:
        made: Shard = torch.Tensor._make_wrapper_subclass(cls, (ROWS * num_ranks, 1), dtype=torch.float32)
        made.begin, made.local = ROWS * rank, torch.zeros(ROWS, 1)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        data = TensorWriteData(self.__create_chunk_list__()[0], TensorProperties(torch.float32), self.size())
        return [WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.begin, 0]), torch.Size([ROWS, 1]))]  # type: ignore[attr-defined]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        local: torch.Tensor = self.local  # type: ignore[attr-defined]
        return local


def cpu_secs(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time of this process, without the garbage of whatever ran before."""
    gc.collect()
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def planned(num_tensors: int, num_ranks: int) -> tuple[float, Any]:
    """Plan a save on ``num_ranks`` simulated ranks. The coordinator's CPU seconds, and the metadata of the whole.

    The first rank plans its own part, those of the others are the same but for where their rows are.
    """
    planner = BalancedSavePlanner(cache_plans=False)
    planner.set_up_planner({f"t{i}": Shard(0, num_ranks) for i in range(num_tensors)}, EngineStorageMeta(), True)
    plan = planner.create_local_plan()
    gc.disable()  # else it walks the million items again and again while they are made
    try:
        plans = [replace(plan, items=[item_of(item, rank) for item in plan.items]) for rank in range(num_ranks)]
    finally:
        gc.enable()
    seconds, (final, metadata) = cpu_secs(lambda: planner.create_global_plan(plans))
    assert [len(plan.items) for plan in final] == [num_tensors] * num_ranks
    return seconds, metadata


def item_of(item: WriteItem, rank: int) -> WriteItem:
    data = item.tensor_data
    assert data is not None
    offsets = torch.Size([ROWS * rank, 0])
    chunk = ChunkStorageMetadata(offsets, data.chunk.sizes)
    return WriteItem(MetadataIndex(item.index.fqn, offsets), item.type, tensor_data=TensorWriteData(chunk, data.properties, data.size))


def test_a_thousand_tensors_of_a_thousand_shards_are_planned_in_near_linear_time() -> None:
    """A million chunks: the report was of minutes in validation alone."""
    small, _ = planned(256, 256)
    large, metadata = planned(1024, 1024)
    assert large < 3 * 16 * max(small, 0.05)
    entry = metadata.state_dict_metadata["t1023"]
    assert isinstance(entry, TensorStorageMetadata)
    assert tuple(entry.size) == (2048, 1)
    assert len(entry.chunks) == 1024

    planner = ReshardLoadPlanner()
    planner.set_up_planner({f"t{i}": Shard(5, 1024) for i in range(1024)}, metadata, True)
    seconds, plan = cpu_secs(planner.create_local_plan)
    assert [tuple(item.storage_index.offset) for item in plan.items] == [(10, 0)] * 1024  # one box each, found among a thousand
    assert seconds < 3 * 16 * max(small, 0.05)


def test_a_whole_tensor_is_planned_from_a_thousand_shards_in_near_linear_time() -> None:
    def plan(num_ranks: int) -> tuple[float, int]:
        _, metadata = planned(64, num_ranks)

        def work() -> int:
            planner = ReshardLoadPlanner()
            planner.set_up_planner({f"t{i}": torch.zeros(ROWS * num_ranks, 1) for i in range(64)}, metadata, True)
            return len(planner.create_local_plan().items)

        return cpu_secs(work)

    small, num_small = plan(128)
    large, num_large = plan(1024)
    assert (num_small, num_large) == (64 * 128, 64 * 1024)
    assert large < 3 * 8 * max(small, 0.02)


def test_two_hundred_thousand_tiny_tensors_are_saved_and_loaded_in_near_linear_time(tmp_path: Path) -> None:
    def round_trip(num: int) -> tuple[float, float]:
        values = torch.arange(3 * num, dtype=torch.float32).reshape(num, 3)
        path = tmp_path / str(num)
        state = {"model": dict(zip((f"layer{i}.w" for i in range(num)), values.unbind(), strict=True))}
        saving, _ = cpu_secs(lambda: save(state, path))
        targets = torch.zeros(num, 3)
        template = {"model": dict(zip((f"layer{i}.w" for i in range(num)), targets.unbind(), strict=True))}
        loading, _ = cpu_secs(lambda: load(template, path))
        assert torch.equal(targets, values)
        assert sum(file.stat().st_size for file in path.iterdir()) < 12 * num + 64 * num
        return saving, loading

    small, large = round_trip(25_000), round_trip(200_000)
    assert large[0] < 3 * 8 * max(small[0], 0.1)
    assert large[1] < 3 * 8 * max(small[1], 0.1)
    assert verify_checkpoint(tmp_path / "200000").faults == ()


def test_a_tensor_of_five_gigabytes_round_trips(tmp_path: Path) -> None:
    """Beyond every 32-bit count of bytes and of elements. Source and target are mapped files, which need no memory of their own."""
    num_bytes = 5 << 30
    period = (64 << 20) + 4096  # no multiple of a block: a block in the wrong place shows
    pattern = torch.arange(period // 8, dtype=torch.int64).mul_(-7046029254386353131).view(torch.uint8)
    place = tmp_path / "source"
    with open(place, "w+b") as file:
        written = 0
        while written < num_bytes:
            written += file.write(memoryview(pattern.numpy())[: min(period, num_bytes - written)])
        file.flush()
        source = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
        save({"model": {"w": source, "last": torch.tensor(7)}}, tmp_path / "a", codec="raw")
        del source
    place.unlink()
    assert (tmp_path / "a" / "model-00000.shard").stat().st_size > num_bytes
    with open(tmp_path / "target", "w+b") as file:
        file.truncate(num_bytes)
        target = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
        state = load({"model": {"w": target, "last": torch.tensor(0)}}, tmp_path / "a")
        assert int(state["model"]["last"]) == 7
        assert state["model"]["w"] is target
        for begin in range(0, num_bytes, period):
            assert torch.equal(target[begin : begin + period], pattern[: num_bytes - begin]), begin
        del target, state
    (tmp_path / "target").unlink()
    tail = load({"model": {"last": torch.tensor(0)}}, tmp_path / "a", keys=["model.last"])
    assert int(tail["model"]["last"]) == 7
    (location,) = [where for index, where in ShardReader(tmp_path / "a").read_metadata().storage_data.items() if index.fqn == "model.w"]
    assert (location.nbytes, location.num_blocks) == (num_bytes, 1280)
    (tmp_path / "a" / "model-00000.shard").unlink()
