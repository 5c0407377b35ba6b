"""The boxes that ranks claim, held against what torch's own collectives say the whole tensor is."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_engine.errors import UnsupportedTensorError
from dcp_engine.planners.geometry import check_tiling
from dcp_engine.planners.local_shards import describe

SHAPES = [(6,), (7, 3), (1, 8), (5, 3), (3, 2), (0, 5), (9,), (2, 3, 5)]


def boxes_of(value: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...], list[object]]]:
    described = describe("w", value)
    assert described is not None
    assert described.global_shape == tuple(value.shape)
    return [(shard.offsets, shard.sizes, shard.tensor.tolist()) for shard in described.shards]


def claims_match(values: list[tuple[DTensor, torch.Tensor]]) -> None:
    """Every rank's boxes hold the values of the whole there, and those of all ranks tile it (replicas counted once)."""
    claims = []
    for value, whole in values:
        claims.append(boxes_of(value))
        for offsets, sizes, content in claims[-1]:
            region = whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
            assert content == region.tolist(), (value.placements, tuple(whole.shape), offsets)
    gathered: list[list[list[tuple[tuple[int, ...], tuple[int, ...], object]]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, claims)
    for number, (value, whole) in enumerate(values):
        boxes = sorted({box[:2] for claim in gathered for box in claim[number]})
        fault = check_tiling(tuple(whole.shape), [box[0] for box in boxes], [box[1] for box in boxes])
        assert fault is None, (value.placements, tuple(whole.shape), fault)


def split_locally(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> tuple[DTensor, torch.Tensor]:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None), whole


def on_one_dimension() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = []
    for shape in SHAPES:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        values += [split_locally(whole, mesh, [placement]) for placement in [Replicate(), *(Shard(dim) for dim in range(len(shape)))]]
    claims_match(values)


def on_two_dimensions(rows: int, columns: int) -> None:
    mesh = init_device_mesh("cpu", (rows, columns))
    values = []
    for shape in SHAPES:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        strided = [(Shard(0), _StridedShard(0, split_factor=rows)), (_StridedShard(0, split_factor=columns), Shard(0))]
        values += [split_locally(whole, mesh, list(pair)) for pair in [*itertools.product(choices, choices), *strided]]
    claims_match(values)


def fsdp_over_tensor_parallel(dp: int, tp: int, hidden: int) -> None:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, hidden, bias=True), nn.Linear(hidden, 4, bias=False))
    whole = {name: torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[name])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    claims_match([(parameter, whole[name]) for name, parameter in model.state_dict().items()])


def refused_partial() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(UnsupportedTensorError) as caught:
        describe("grad", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    assert caught.value.tensor == "grad"
    return str(caught.value)


def on_a_sub_mesh() -> tuple[bool, bool | None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ranks = torch.tensor([0, 1])
    sub = DeviceMesh("cpu", ranks)
    described = describe("w", distribute_tensor(torch.arange(5), sub, [Shard(0)]))
    whole = describe("w", distribute_tensor(torch.arange(5), mesh, [Shard(0)]))
    assert whole is not None
    assert not whole.may_be_replicated
    return described is None, None if described is None else described.may_be_replicated


def wrong_local_shape() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size((4,)), stride=(1,))
    with pytest.raises(UnsupportedTensorError) as caught:
        describe("w", value)
    return str(caught.value)


def collective_in_flight() -> tuple[str, list[float]]:
    value = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    described = describe("w", value)
    assert described is not None
    return type(value).__name__, described.shards[0].tensor.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sharded_and_replicated_tensors(ranks: RankPool, world_size: int) -> None:
    ranks.run(world_size, on_one_dimension)


@pytest.mark.parametrize("mesh", [(2, 2), (1, 3)])
def test_every_pair_of_placements(ranks: RankPool, mesh: tuple[int, int]) -> None:
    ranks.run(mesh[0] * mesh[1], on_two_dimensions, *mesh)


@pytest.mark.parametrize("hidden", [8, 7, 5, 3])
def test_fsdp_over_tensor_parallel_that_does_and_does_not_divide(ranks: RankPool, hidden: int) -> None:
    ranks.run(4, fsdp_over_tensor_parallel, 2, 2, hidden)


def test_partial_placement_is_refused_by_name(ranks: RankPool) -> None:
    for text in ranks.run(2, refused_partial):
        assert "Partial" in text
        assert "redistribute" in text


def test_ranks_outside_the_mesh_hold_nothing(ranks: RankPool) -> None:
    assert ranks.run(3, on_a_sub_mesh) == [(False, True), (False, True), (True, None)]


def test_local_tensor_of_another_shape_is_refused(ranks: RankPool) -> None:
    assert all("placements" in text for text in ranks.run(2, wrong_local_shape))


def test_collectives_in_flight_are_waited_for(ranks: RankPool) -> None:
    assert ranks.run(2, collective_in_flight) == [("AsyncCollectiveTensor", [2, 2, 2])] * 2
