"""What part of a tensor this rank holds: the boxes of the global tensor and the local data of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_engine.compat import is_fake_tensor, is_legacy_sharded_tensor, is_strided_shard, is_traceable_wrapper, wait_for_collective
from dcp_engine.errors import UnsupportedTensorError
from dcp_engine.planners.placements import Shape, Split, local_boxes, split_orders

__all__ = ["LocalShard", "LocalTensor", "describe", "is_tensor_like", "may_be_replicated", "speaks_duck_protocol"]

Kind = Literal["plain", "dtensor", "duck", "checkpointable"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_CHECKPOINTABLE_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class LocalShard(NamedTuple):  # there are as many as tensors: a frozen dataclass takes five times as long to make
    """One box of a global tensor that this rank holds.

    Attributes:
        offsets: start in the global tensor, elements.
        sizes: size of the box, elements.
        tensor: the local data of exactly ``sizes``: a view of the caller's memory, detached, on any device.
    """

    offsets: Shape
    sizes: Shape
    tensor: torch.Tensor


class LocalTensor(NamedTuple):
    """One key's tensor as this rank sees it.

    Attributes:
        key: key in the flattened state.
        dtype: element type.
        global_shape: shape of the whole tensor.
        shards: the boxes held here, none empty, except that a tensor without elements has one box of its whole shape. Empty where the
            rank takes part but holds no element.
        may_be_replicated: other ranks may hold the same boxes.
        kind: where the geometry came from.
    """

    key: str
    dtype: torch.dtype
    global_shape: Shape
    shards: tuple[LocalShard, ...]
    may_be_replicated: bool
    kind: Kind


def is_tensor_like(value: object) -> bool:
    """Whether :func:`describe` takes the value: a tensor, or an object of a class that speaks DCP's duck protocol for tensors."""
    return isinstance(value, torch.Tensor) or speaks_duck_protocol(value)


def speaks_duck_protocol(value: object) -> bool:
    """Whether the value's class says itself which chunks it holds. Instances are not asked: a dict may have an answer for any attribute."""
    return hasattr(type(value), "__create_write_items__") or hasattr(type(value), "__create_chunk_list__")


def may_be_replicated(value: torch.Tensor) -> bool:
    """Whether another rank may hold the same part of a tensor, told at once from how many ranks there are and its placements."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1 or not isinstance(value, DTensor):
        return world_size > 1
    mesh = value.device_mesh
    over = (isinstance(placement, Replicate) and mesh.size(dim) > 1 for dim, placement in enumerate(value.placements))
    return mesh.size() < world_size or any(over)


def describe(key: str, value: Any, *, loading: bool = False) -> LocalTensor | None:
    """The boxes of ``value`` that this rank holds.

    Args:
        key: key in the flattened state, for errors.
        value: a tensor of any kind: plain, ``nn.Parameter``, DTensor, one with 2.14's ``CheckpointableTensor`` fields, or an object with
            ``__create_write_items__`` / ``__create_chunk_list__`` and ``__get_tensor_shard__``.
        loading: the tensor is a target.

    Returns:
        None where this rank is outside the tensor's mesh.

    Raises:
        UnsupportedTensorError: a tensor that cannot be stored, by name: partial placements, legacy ``ShardedTensor``, sparse, nested,
            mkldnn or quantised layouts, fake or meta tensors, unknown wrapper subclasses; a target whose elements share memory.

    Thread-safety: pure, but for waiting on collectives in flight.
    """
    if type(value) in _PLAIN_TYPES and not hasattr(value, "global_shape"):  # the common case, kept short: there may be 100,000 of them
        return _describe_plain(key, _checked(key, value, loading))
    if is_legacy_sharded_tensor(value):
        raise UnsupportedTensorError(
            "a legacy ShardedTensor cannot be saved or loaded",
            tensor=key,
            found=_type_name(value),
            remedy="use FSDP2, or FSDP1 with a device_mesh, whose state dicts hold DTensors",
        )
    if isinstance(value, DTensor):
        return _describe_dtensor(key, value, loading)
    if speaks_duck_protocol(value):
        return _describe_duck(key, value, value, loading)
    if isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in _CHECKPOINTABLE_FIELDS):
        return _describe_checkpointable(key, value, loading)
    if not isinstance(value, torch.Tensor):
        raise UnsupportedTensorError("not a tensor", tensor=key, found=_type_name(value))
    return _describe_plain(key, _checked(key, value, loading))


def _describe_plain(key: str, tensor: torch.Tensor) -> LocalTensor:
    shape = tuple(tensor.shape)
    return LocalTensor(key, tensor.dtype, shape, (LocalShard((0,) * len(shape), shape, tensor),), True, "plain")


def _describe_dtensor(key: str, value: DTensor, loading: bool) -> LocalTensor | None:
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    shape = tuple(value.shape)
    splits, replicated = _splits(key, value, coordinate or [0] * mesh.ndim)
    if coordinate is None:
        return None
    with torch.no_grad():  # with gradients on, to_local would record an autograd function
        local = value.to_local()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    may_be_replicated = replicated or mesh.size() < world_size
    if speaks_duck_protocol(local):
        return _describe_duck(key, local, value, loading)
    local = _checked(key, local, loading)
    for order in split_orders(splits):
        local_shape, boxes = local_boxes(shape, order)
        if local_shape == tuple(local.shape) or (math.prod(local_shape) == 0 and local.numel() == 0):
            break
    else:
        raise UnsupportedTensorError(
            "the local tensor does not have the shape that the DTensor's placements give this rank",
            tensor=key,
            expected=f"{local_shape} of {shape} under {value.placements} on a mesh of {tuple(mesh.shape)}",
            found=tuple(local.shape),
            remedy="give DTensor.from_local the global shape and stride where shards are uneven",
        )
    if math.prod(shape) == 0:
        return LocalTensor(key, local.dtype, shape, (_without_elements(shape, local),), may_be_replicated, "dtensor")
    shards = tuple(LocalShard(offsets, sizes, _narrow(local, start, sizes)) for offsets, sizes, start in boxes)
    return LocalTensor(key, local.dtype, shape, shards, may_be_replicated, "dtensor")


def _splits(key: str, value: DTensor, coordinate: Sequence[int]) -> tuple[tuple[Split, ...], bool]:
    """The placements that divide a dimension, and whether the tensor is replicated over a mesh dimension."""
    splits = []
    replicated = False
    for mesh_dim, placement in enumerate(value.placements):
        num_parts, part = int(value.device_mesh.size(mesh_dim)), int(coordinate[mesh_dim])
        dim = getattr(placement, "dim", 0)
        dim = dim + value.ndim if dim < 0 else dim
        if is_strided_shard(placement):
            splits.append(Split(dim, num_parts, part, int(placement.split_factor)))  # type: ignore[attr-defined]
        elif isinstance(placement, Shard) and type(placement) is Shard:
            splits.append(Split(dim, num_parts, part))
        elif isinstance(placement, Replicate):
            replicated = replicated or num_parts > 1
        else:
            raise UnsupportedTensorError(
                f"a DTensor with the placement {placement!r} cannot be saved or loaded",
                tensor=key,
                expected="Shard or Replicate on every mesh dimension",
                found=value.placements,
                remedy="redistribute it to Replicate() or Shard() first" if placement.is_partial() else None,
            )
    return tuple(splits), replicated


def _without_elements(shape: Shape, local: torch.Tensor) -> LocalShard:
    return LocalShard((0,) * len(shape), shape, local.new_empty(shape))


def _narrow(local: torch.Tensor, start: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(start, sizes, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, begin, size)
    return local


def _describe_duck(key: str, value: Any, whole: Any, loading: bool) -> LocalTensor:
    """A value that speaks DCP's duck protocol; ``whole`` is the DTensor around it, or the value itself."""
    boxes: list[tuple[Shape, Shape, MetadataIndex]] = []
    shape: Shape | None = None
    dtype: torch.dtype | None = None
    if loading or not hasattr(value, "__create_write_items__"):
        _check_speaks(key, value, "__create_chunk_list__")
        for number, chunk in enumerate(value.__create_chunk_list__()):
            boxes.append((tuple(chunk.offsets), tuple(chunk.sizes), MetadataIndex(key, chunk.offsets, number)))
    else:
        for item in value.__create_write_items__(key, whole):
            if item.tensor_data is None or item.index.fqn != key:
                raise UnsupportedTensorError(
                    "__create_write_items__ of a tensor must give tensor items under its own key",
                    tensor=key,
                    expected=f"tensor items under {key!r}",
                    found=f"{item.type.name} under {item.index.fqn!r} from {_type_name(value)}",
                )
            shape, dtype = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
            boxes.append((tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes), item.index))
    _check_speaks(key, value, *["__get_tensor_shard__"] * bool(boxes))
    if shape is None or dtype is None:
        _check_speaks(key, whole, "size", "dtype")
        shape, dtype = tuple(whole.size()), whole.dtype
    shards = []
    for offsets, sizes, index in boxes:
        if 0 in sizes and 0 not in shape:
            continue
        data = _checked(key, value.__get_tensor_shard__(index), loading)
        if tuple(data.shape) != sizes:
            raise UnsupportedTensorError(
                f"__get_tensor_shard__ of {_type_name(value)} gives another shape than its chunk",
                tensor=key,
                expected=sizes,
                found=tuple(data.shape),
            )
        dtype = data.dtype
        shards.append(LocalShard(offsets, sizes, data))
    return LocalTensor(key, dtype, shape, tuple(shards), True, "duck")


def _check_speaks(key: str, value: object, *names: str) -> None:
    absent = [name for name in names if not hasattr(value, name)]
    if absent:
        raise UnsupportedTensorError(
            f"{_type_name(value)} speaks only a part of DCP's protocol for tensors",
            tensor=key,
            expected="__create_write_items__ to be saved, __create_chunk_list__ to be loaded, and __get_tensor_shard__; size() and dtype",
            found=f"no {', no '.join(absent)}",
        )


def _describe_checkpointable(key: str, value: Any, loading: bool) -> LocalTensor:
    """A plain tensor with the fields of torch 2.14's ``CheckpointableTensor`` protocol, which any release may carry."""
    local = _checked(key, value, loading)
    shape = tuple(int(size) for size in value.global_shape)
    columns = [[tuple(int(number) for number in row) for row in getattr(value, name)] for name in _CHECKPOINTABLE_FIELDS[1:]]
    if len({len(column) for column in columns}) != 1:
        raise _bad_fields(key, "as many global_offsets as local_offsets and local_sizes", [len(column) for column in columns])
    shards = []
    for offsets, start, sizes in zip(*columns, strict=True):
        inside = len(offsets) == len(sizes) == len(shape) and len(start) == local.ndim <= len(shape)
        if not inside or any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise _bad_fields(key, f"boxes inside {shape}", (offsets, sizes))
        if 0 in sizes and 0 not in shape:
            continue
        # Fewer local dimensions: the leading dimensions of the box are merged into rows of the local tensor.
        merged = len(sizes) - local.ndim + 1 if local.ndim < len(sizes) else 1
        flat = (math.prod(sizes[:merged]), *sizes[merged:]) if sizes else ()
        if any(b < 0 or b + s > n for b, s, n in zip(start, flat, local.shape, strict=True)):
            raise _bad_fields(key, f"local boxes inside {tuple(local.shape)}", (start, flat))
        shards.append(LocalShard(offsets, sizes, _narrow(local, start, flat).view(sizes) if merged > 1 else _narrow(local, start, flat)))
    return LocalTensor(key, local.dtype, shape, tuple(shards), True, "checkpointable")


def _bad_fields(key: str, expected: str, found: object) -> UnsupportedTensorError:
    return UnsupportedTensorError("the tensor's checkpoint fields contradict each other", tensor=key, expected=expected, found=found)


def _checked(key: str, tensor: Any, loading: bool) -> torch.Tensor:
    """Plain strided data, detached; refuses by name what has no bytes of its own."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensorError("the local part of a tensor is not a tensor", tensor=key, found=_type_name(tensor))
    if type(tensor) not in _PLAIN_TYPES:
        tensor = wait_for_collective(tensor)
    reason = _refusal(tensor, loading)
    if reason is not None:
        raise UnsupportedTensorError(
            f"{reason} cannot be {'loaded into' if loading else 'saved'}",
            tensor=key,
            found=_type_name(tensor),
            remedy="load into a plain tensor, and convert it afterwards" if loading else "save a plain tensor with data in its place",
        )
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    # detach() of a subclass would call its overrides
    return tensor.detach() if type(tensor) is torch.nn.Parameter else tensor.as_subclass(torch.Tensor).detach()


def _refusal(tensor: torch.Tensor, loading: bool) -> str | None:
    """Name of the kind of tensor that has no bytes to store or to fill, None where it has."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    if type(tensor) not in _PLAIN_TYPES:
        if torch.nn.parameter.is_lazy(tensor):
            return "a parameter that is not yet initialised"
        if is_fake_tensor(tensor):
            return "a fake tensor, which has no data,"
        if is_traceable_wrapper(tensor):
            return f"a tensor of the wrapper class {type(tensor).__qualname__}, whose content the engine does not know,"
    if tensor.is_meta:
        return "a meta tensor, which has no data,"
    if not tensor.data_ptr() and tensor.numel():
        # numpy would give it other memory: noise would be saved, and what is loaded lost.
        return "a tensor whose memory was freed"
    if loading and not tensor.is_contiguous() and _overlaps_itself(tensor):
        return "a tensor of which several elements are one place in memory, as expand() makes it,"
    return None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
