"""Memory for the meta tensors of a state that is to be loaded, kept tied where they were.

A tensor on the meta device has a shape and no data. Where it is a parameter, its replacement is one, with the same ``requires_grad``; a
DTensor stays a DTensor of the same mesh and placements; any other keeps its class and its attributes, such as the fields of torch 2.14's
``CheckpointableTensor``. Two meta tensors on one storage share memory afterwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_engine.compat import is_traceable_wrapper
from dcp_engine.errors import UnsupportedTensorError
from dcp_engine.planners.local_shards import speaks_duck_protocol

__all__ = ["Materialiser", "is_meta"]


def is_meta(value: object) -> bool:
    """Whether the value is a tensor without data."""
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


class Materialiser:
    """Gives meta tensors memory, one piece for all views of one storage that have the same geometry.

    Args:
        device: where plain tensors go. ``None``: the device of the default process group (the CPU where it serves several), else torch's
            default device. DTensors go to the device of their mesh.

    Thread-safety: none.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device
        # The storage is kept beside its memory: an identity is only good while the object lives.
        self._memory: dict[tuple[object, ...], tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def knows(self, value: torch.Tensor) -> bool:
        """Whether a tensor on the same storage, with the same geometry, has been given memory."""
        return _identity(_local(value))[0] in self._memory

    def __call__(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """The tensor to put in place of the meta tensor ``value``, uninitialised.

        Raises:
            UnsupportedTensorError: a class of tensor that only its owner can build.
        """
        is_dtensor = isinstance(value, DTensor)
        if not is_dtensor and (speaks_duck_protocol(value) or is_traceable_wrapper(value) or torch.nn.parameter.is_lazy(value)):
            raise UnsupportedTensorError(
                f"a meta tensor of class {type(value).__qualname__} cannot be given memory",
                tensor=key,
                remedy="materialise it before the load, for example with Module.to_empty(device=...)",
            )
        local = _local(value)
        identity, storage = _identity(local)
        if identity not in self._memory:
            device = _current_device(value.device_mesh.device_type) if isinstance(value, DTensor) else self._plain_device()
            self._memory[identity] = storage, torch.empty_like(local, device=device, requires_grad=False)
        return _like(value, self._memory[identity][1])

    def _plain_device(self) -> torch.device:
        if self._device is not None:
            return torch.device(self._device)
        if not dist.is_initialized():
            return torch.get_default_device()
        served = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
        return torch.device("cpu") if "cpu" in served or not served[0] else _current_device(served[0])


def _local(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value.as_subclass(torch.Tensor).detach()


def _identity(local: torch.Tensor) -> tuple[tuple[object, ...], torch.UntypedStorage]:
    storage = local.untyped_storage()  # all meta tensors have data_ptr() 0; the storage's object is one as long as it is alive
    return (id(storage), local.storage_offset(), tuple(local.shape), local.stride(), local.dtype), storage


def _current_device(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` in the guise of ``value``."""
    tensor = local.detach()
    if isinstance(value, DTensor):
        # Shape and stride are given: they cannot be told from the local part of an uneven sharding.
        tensor = DTensor.from_local(
            tensor, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=tuple(value.stride())
        )
    elif type(value) not in (torch.Tensor, torch.nn.Parameter):
        tensor = tensor.as_subclass(type(value))
    made: torch.Tensor
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(tensor, requires_grad=value.requires_grad)
    elif isinstance(value, torch.nn.Buffer):
        made = torch.nn.Buffer(tensor, persistent=value.persistent)
    else:
        made = tensor.requires_grad_(value.requires_grad)
    if not isinstance(value, DTensor):  # whose attributes are its geometry and its local tensor
        vars(made).update(vars(value))
    return made
