"""Faults that users of distributed checkpoints have reported, over several ranks. Values encode key and global index."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RankPool
from support.values import DTYPES, full, same
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import KeyMismatchError

Shapes = tuple[tuple[int, ...], ...]


def sharded(key: str, shape: tuple[int, ...], placement: Placement, dtype: torch.dtype = torch.float32) -> DTensor:
    return distribute_tensor(full(key, shape, dtype), init_device_mesh("cpu", (dist.get_world_size(),)), [placement])


def blank(like: torch.Tensor) -> torch.Tensor:
    """A target of the same layout whose values are wrong."""
    return torch.zeros_like(like)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(state: dict[str, Any], path: str, *, asynchronous: bool = False) -> None:
    if asynchronous:
        group = dist.new_group(backend="gloo")
        future = dcp.async_save(state, storage_writer=ShardWriter(path), planner=BalancedSavePlanner(), process_group=group)
        future.result()  # type: ignore[union-attr]
    else:
        dcp.save(state, storage_writer=ShardWriter(path), planner=BalancedSavePlanner())


def load(state: dict[str, Any], path: str) -> dict[str, Any]:
    dcp.load(state, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    return state


# -- empty tails ---------------------------------------------------------------------------------------------------------

TAILS: Shapes = ((6,), (1, 8), (5, 3), (3,), (3, 2), (9, 1))


def save_tails(path: str) -> None:
    save({f"t{i}": sharded(f"t{i}", shape, Shard(0)) for i, shape in enumerate(TAILS)}, path)


def load_tails(path: str) -> list[bool]:
    state = load({f"t{i}": blank(sharded(f"t{i}", shape, Shard(0))) for i, shape in enumerate(TAILS)}, path)
    return [same(whole(state[f"t{i}"]), full(f"t{i}", shape)) for i, shape in enumerate(TAILS)]


@pytest.mark.parametrize("saved_on", [2, 4])
def test_empty_tails_load_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, saved_on: int) -> None:
    path = str(tmp_path / "a")
    ranks.run(saved_on, save_tails, path)
    metadata = ShardReader(path).read_metadata()
    assert [tuple(metadata.state_dict_metadata[f"t{i}"].size) for i in range(len(TAILS))] == list(TAILS)
    for world_size in (1, 2, 3, 5):
        assert ranks.run(world_size, load_tails, path) == [[True] * len(TAILS)] * world_size


def save_shared_offset(path: str) -> None:
    """The empty chunk of rank 0 begins where the full one of rank 1 does."""
    mesh = init_device_mesh("cpu", (2,))
    local = full("x", (3, 2))[: 0 if dist.get_rank() == 0 else 3]
    tensor = Chunked("x", (3, 2), [((0, 0), local)])
    save({"x": tensor, "y": distribute_tensor(full("y", (1,)), mesh, [Shard(0)])}, path)


class Chunked(torch.Tensor):
    """A tensor that speaks DCP's duck protocol: chunks of a global tensor on this rank, several perhaps."""

    @staticmethod
    def __new__(cls, key: str, shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], torch.Tensor]]) -> Chunked:
        made: Chunked = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=chunks[0][1].dtype)
        made.key, made.chunks = key, chunks  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].key, tuple(args[0].shape), args[0].chunks)
        raise NotImplementedError(func)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(chunk.offsets, chunk.sizes),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), local.size()) for offsets, local in self.chunks]  # type: ignore[attr-defined]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return next(local for offsets, local in self.chunks if tuple(offsets) == tuple(index.offset) and local.numel())  # type: ignore[attr-defined]


def load_shared_offset(path: str) -> bool:
    return same(load({"x": torch.zeros(3, 2), "y": torch.zeros(1)}, path)["x"], full("x", (3, 2)))


def test_an_empty_chunk_may_share_its_offset_with_a_full_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_shared_offset, str(tmp_path / "a"))
    assert ranks.run(1, load_shared_offset, str(tmp_path / "a")) == [True]


def duck_round_trip(path: str) -> list[bool]:
    """Two chunks a rank, that are not neighbours."""
    rank = dist.get_rank()
    data = full("x", (8, 3))
    chunks = [((row, 0), data[row : row + 2].clone()) for row in (2 * rank, 4 + 2 * rank)]
    save({"x": Chunked("x", (8, 3), chunks)}, path)
    plain = load({"x": torch.zeros(8, 3)}, path)["x"]
    wanted = [((row, 0), torch.zeros(2, 3)) for row in (2 * (1 - rank), 4 + 2 * (1 - rank))]
    load({"x": Chunked("x", (8, 3), wanted)}, path)
    return [same(plain, data), *(same(local, data[row : row + 2]) for (row, _), local in wanted)]


def test_tensors_of_the_duck_protocol_with_several_chunks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, duck_round_trip, str(tmp_path / "a")) == [[True] * 3] * 2


def checkpointable(data: torch.Tensor, rank: int) -> torch.Tensor:
    """A plain tensor with the fields of torch 2.14's CheckpointableTensor: two chunks of two rows, with a row of padding between."""
    made: Any = torch.cat([data[2 * rank : 2 * rank + 2], torch.full((1, 3), -1.0), data[4 + 2 * rank : 6 + 2 * rank]])
    made.global_shape = (8, 3)
    made.global_offsets = ((2 * rank, 0), (4 + 2 * rank, 0))
    made.local_offsets = ((0, 0), (3, 0))
    made.local_sizes = ((2, 3), (2, 3))
    return made  # type: ignore[no-any-return]


def checkpointable_round_trip(path: str) -> list[bool]:
    rank, data = dist.get_rank(), full("x", (8, 3))
    save({"x": checkpointable(data, rank)}, path)
    plain = load({"x": torch.zeros(8, 3)}, path)["x"]
    other = load({"x": checkpointable(torch.zeros(8, 3), 1 - rank)}, path)["x"]
    return [same(plain, data), torch.equal(other, checkpointable(data, 1 - rank))]


def test_a_plain_tensor_that_names_its_global_place(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, checkpointable_round_trip, str(tmp_path / "a")) == [[True, True]] * 2


# -- nothing, and next to nothing ----------------------------------------------------------------------------------------

SMALL: Shapes = ((0,), (0, 5), (3, 0), (), (1,), (2, 1))


def tiny_state(fill: bool) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for (i, shape), dtype in itertools.product(enumerate(SMALL), DTYPES):
        key = f"{i}.{dtype}".replace("torch.", "")
        value = full(key, shape, dtype)
        state[f"plain.{key}"] = value if fill else torch.zeros_like(value)
        if shape and dtype.itemsize <= 8:  # distribute_tensor sends, which gloo cannot do with every dtype
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            placement: Placement = Shard(0) if i % 2 else Replicate()
            local = _local(value if fill else torch.zeros_like(value), placement)
            state[f"dtensor.{key}"] = DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=value.stride()
            )
    return state


def _local(value: torch.Tensor, placement: Placement) -> torch.Tensor:
    if isinstance(placement, Replicate):
        return value
    world, rank, rows = dist.get_world_size(), dist.get_rank(), value.shape[0]
    per_rank = -(-rows // world)
    # A copy: torch cannot copy a DTensor whose local part is an empty slice of something larger.
    return value[min(rows, rank * per_rank) : min(rows, (rank + 1) * per_rank)].clone()


def tiny_round_trip(path: str, asynchronous: bool) -> tuple[int, list[str]]:
    save(tiny_state(fill=True), path, asynchronous=asynchronous)
    found, expected = load(tiny_state(fill=False), path), tiny_state(fill=True)
    return len(expected), [
        key
        for key, value in expected.items()
        if not same(
            found[key].to_local() if isinstance(found[key], DTensor) else found[key],  # type: ignore[attr-defined]
            value.to_local() if isinstance(value, DTensor) else value,
        )
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_without_elements_and_scalars_in_every_dtype(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    num_dtensors = 5 * sum(dtype.itemsize <= 8 for dtype in DTYPES)
    expected = (len(SMALL) * len(DTYPES) + num_dtensors, [])
    assert ranks.run(3, tiny_round_trip, str(tmp_path / "a"), asynchronous) == [expected] * 3


# -- strided shards ------------------------------------------------------------------------------------------------------

STRIDED: Shapes = ((8, 3), (12,), (16, 2))


def strided(key: str, shape: tuple[int, ...], *, filled: bool) -> DTensor:
    """FSDP over TP, both on dim 0, on a 2 x 2 mesh: TP splits first, FSDP splits what TP left."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate() or (0, 0)
    value = full(key, shape) if filled else torch.zeros(shape)
    local = value.chunk(2)[tp].chunk(2)[dp]
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=value.stride())


def save_strided(path: str) -> None:
    save({f"s{i}": strided(f"s{i}", shape, filled=True) for i, shape in enumerate(STRIDED)}, path)


def load_strided(path: str) -> list[bool]:
    state = load({f"s{i}": strided(f"s{i}", shape, filled=False) for i, shape in enumerate(STRIDED)}, path)
    return [same(state[f"s{i}"].to_local(), strided(f"s{i}", shape, filled=True).to_local()) for i, shape in enumerate(STRIDED)]


def load_on_one_dimension(path: str) -> list[bool]:
    state = load({f"s{i}": blank(sharded(f"s{i}", shape, Shard(0))) for i, shape in enumerate(STRIDED)}, path)
    return [same(whole(state[f"s{i}"]), full(f"s{i}", shape)) for i, shape in enumerate(STRIDED)]


def test_strided_shards_load_on_other_meshes(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    ranks.run(4, save_strided, path)
    assert ranks.run(4, load_strided, path) == [[True] * 3] * 4
    for world_size in (1, 2, 3, 5):
        assert ranks.run(world_size, load_on_one_dimension, path) == [[True] * 3] * world_size


# -- sub-meshes ----------------------------------------------------------------------------------------------------------


def submesh_round_trip(path: str) -> list[bool]:
    mesh = DeviceMesh("cpu", [1, 2])
    inside = dist.get_rank() in (1, 2)
    data = full("x", (5, 2))
    local = data[:3] if dist.get_rank() == 1 else data[3:] if dist.get_rank() == 2 else data[:0]

    def tensor(values: torch.Tensor) -> DTensor:
        return DTensor.from_local(values, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 2)), stride=(2, 1))

    save({"x": tensor(local), "y": full("y", (3,))}, path)
    target = {"x": tensor(torch.zeros_like(local)), "y": torch.zeros(3)}
    load(target, path)
    plain = load({"x": torch.zeros(5, 2), "y": torch.zeros(3)}, path)
    return [not inside or same(target["x"].to_local(), local), same(target["y"], full("y", (3,))), same(plain["x"], data)]  # type: ignore[attr-defined]


def test_a_dtensor_on_a_submesh_and_ranks_outside_it(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, submesh_round_trip, str(tmp_path / "a")) == [[True] * 3] * 4


# -- keys of other ranks -------------------------------------------------------------------------------------------------


def load_wrong_keys(path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rank = dist.get_rank()
    try:
        load({f"only{rank}": torch.zeros(2), f"absent{rank}": torch.zeros(2)}, path)
    except CheckpointException as error:
        failure = error.failures[0][0]
        assert isinstance(failure, KeyMismatchError), failure
        return failure.missing, failure.unexpected
    return (), ()


def test_missing_and_unexpected_keys_are_judged_over_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    state = {key: torch.ones(2) for key in ("only0", "only1", "extra.a", "extra.b")}
    dcp.save(state, storage_writer=ShardWriter(tmp_path / "a"), planner=BalancedSavePlanner())
    expected = (("absent0", "absent1"), ("extra.a", "extra.b"))
    assert ranks.run(2, load_wrong_keys, str(tmp_path / "a")) == [expected] * 2


# -- overlap -------------------------------------------------------------------------------------------------------------


def overlapping_saves(path: str) -> list[str]:
    """Two saves at once on groups of their own, other ids and then the same id, with collectives of training and a load between."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    outcomes = []
    for ids in (("one", "two"), ("same", "same")):
        futures = [
            dcp.async_save(
                {"x": full("x", (1000,))},
                storage_writer=ShardWriter(f"{path}/{name}"),
                planner=BalancedSavePlanner(),
                process_group=group,
            )
            for name, group in zip(ids, groups, strict=True)
        ]
        dist.barrier()
        for future in futures:
            try:
                future.result()  # type: ignore[union-attr]
                outcomes.append("saved")
            except CheckpointException as error:
                outcomes.append(error.failures[0][0].kind)
        assert same(load({"x": torch.zeros(1000)}, f"{path}/{ids[0]}")["x"], full("x", (1000,)))
    return outcomes


def test_overlapping_saves_end_alike_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(3, overlapping_saves, str(tmp_path))
    assert len({tuple(outcomes) for outcomes in results}) == 1
    assert results[0][:2] == ["saved", "saved"]
    assert "saved" in results[0][2:]
    assert set(results[0][2:]) <= {"saved", "checkpoint_exists", "concurrent_commit"}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one", "same", "two"]
    for entry in tmp_path.iterdir():
        assert verify_checkpoint(entry).faults == ()
