"""A small model with its AdamW under every layout that a training job may have, filled with values known from key and global index.

The values are set and read through torch's own state dict functions, never through the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

__all__ = ["LAYOUTS", "Layout", "build", "expected_state", "full_state", "reference", "state_of"]

WIDTH, HIDDEN, VOCABULARY, NUM_LAYERS, NUM_EXPERTS = 6, 10, 13, 2, 2
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, WIDTH))


class Net(nn.Module):
    """Sizes that neither 2 nor 3 nor 4 divides are on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(NUM_LAYERS)})
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(NUM_EXPERTS)})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.zeros(()))


def reference(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value that ``key`` has everywhere: distinct for each key and each global index, and exact in fp32."""
    start = sum((i + 1) * byte for i, byte in enumerate(key.encode())) % 4096 * 256
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + start).reshape(shape).to(dtype)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout and the number of ranks it takes."""

    name: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.name}-{self.world_size}"


def _plain(net: Net, world_size: int) -> nn.Module:
    return net


def _ddp(net: Net, world_size: int) -> nn.Module:
    return DistributedDataParallel(net)


def _fsdp(net: Net, world_size: int) -> nn.Module:
    return _sharded(net, init_device_mesh("cpu", (world_size,)))


def _hsdp(net: Net, world_size: int) -> nn.Module:
    return _sharded(net, init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))


def _tp(net: Net, world_size: int) -> nn.Module:
    return _tensor_parallel(net, init_device_mesh("cpu", (world_size,)))


def _fsdp_tp(net: Net, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    return _sharded(_tensor_parallel(net, mesh["tp"]), mesh["dp"])


def _pipeline(net: Net, world_size: int) -> nn.Module:
    """Stage r holds layer r; the first one also the embedding, the last one all the rest."""
    rank = dist.get_rank()
    for i in range(NUM_LAYERS):
        if min(i, world_size - 1) != rank:
            del net.layers[str(i)]
    if rank != 0:
        del net.embed
    if rank != world_size - 1:
        del net.head, net.experts, net.scale
    return net


def _experts(net: Net, world_size: int) -> nn.Module:
    """Expert e lives on a sub-mesh of its own, sharded there; everything else is replicated."""
    rank, half = dist.get_rank(), world_size // 2
    meshes = [DeviceMesh("cpu", list(range(e * half, (e + 1) * half))) for e in range(NUM_EXPERTS)]
    for e in range(NUM_EXPERTS):
        if rank // half != e:
            del net.experts[str(e)]
            continue
        weight = distribute_tensor(net.experts[str(e)].weight.detach(), meshes[e], [Shard(0)])
        net.experts[str(e)].weight = nn.Parameter(weight)
    return net


def _sharded(net: Net, mesh: DeviceMesh) -> Net:
    for block in net.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def _tensor_parallel(net: Net, mesh: DeviceMesh) -> Net:
    plan = {}
    for i in range(NUM_LAYERS):
        plan |= {f"layers.{i}.up": ColwiseParallel(), f"layers.{i}.down": RowwiseParallel()}
    parallelize_module(net, mesh, plan)
    return net


_BUILDERS: dict[str, Callable[[Net, int], nn.Module]] = {
    "plain": _plain,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "tp": _tp,
    "fsdp_tp": _fsdp_tp,
    "hsdp": _hsdp,
    "pipeline": _pipeline,
    "experts": _experts,
}

LAYOUTS = (
    Layout("plain", 1),
    Layout("ddp", 2),
    Layout("fsdp", 3),
    Layout("fsdp", 4),
    Layout("tp", 2),
    Layout("fsdp_tp", 4),
    Layout("hsdp", 4),
    Layout("pipeline", 2),
    Layout("experts", 4),
)


def build(layout: Layout, *, filled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its AdamW with every parameter, buffer and moment at its reference value, or at zero. On every rank of the layout.

    Values are set before torch shards them, and moments are taken from a second model whose parameters were given the moments' values: so
    each lies where torch put it.
    """
    model = _model(layout, (lambda name: f"model.{name}") if filled else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if not filled:
        return model, optimizer
    for moment in ("exp_avg", "exp_avg_sq"):
        values = _model(layout, lambda name, moment=moment: f"optimizer.state.{name}.{moment}")
        for parameter, value in zip(model.parameters(), values.parameters(), strict=True):
            optimizer.state[parameter][moment].copy_(value.detach())
    for name, parameter in model.named_parameters():
        optimizer.state[parameter]["step"].copy_(reference(f"optimizer.state.{name.removeprefix('module.')}.step", ()))
    return model, optimizer


def _model(layout: Layout, key_of: Callable[[str], str] | None) -> nn.Module:
    net = Net()
    for name, value in net.state_dict().items():
        value.copy_(reference(key_of(name), tuple(value.shape)) if key_of else torch.zeros_like(value))
    return _BUILDERS[layout.name](net, layout.world_size)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as a training script would save it."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT)}


def expected_state(state: dict[str, Any]) -> dict[str, Any]:
    """The same keys with full reference values; values that are not tensors stay."""
    return {
        part: {
            key: reference(f"{part}.{key}", tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
        for part, values in state.items()
    }


def full_state(state: dict[str, Any]) -> dict[str, Any]:
    """Every DTensor gathered by torch, for comparison. A collective: every rank of a tensor's mesh must call it."""
    return {
        part: {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}
        for part, values in state.items()
    }
