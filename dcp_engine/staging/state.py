"""Which values of a state are tensors to be staged, and the staged state made of them: same containers, nothing mutable shared."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_engine.compat import is_traceable_wrapper, rewrapped, wait_for_collective
from dcp_engine.errors import StagingError
from dcp_engine.planners.local_shards import describe, speaks_duck_protocol
from dcp_engine.staging.layout import StagePlan

__all__ = ["StagedTensor", "find_tensors", "rebuilt", "views_in"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_CHUNK_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""What makes a plain tensor a part of a larger one (torch 2.14's ``CheckpointableTensor``)."""


class StagedTensor:
    """A value of the state that is staged as a tensor.

    Attributes:
        name: where it stands first, for messages.
        value: as it stands in the state.
        local: the plain tensor with this rank's data: ``value`` itself, or what a DTensor wraps.
    """

    __slots__ = ("local", "name", "value")

    def __init__(self, name: str, value: torch.Tensor, local: torch.Tensor) -> None:
        self.name = name
        self.value = value
        self.local = local

    def around(self, staged: torch.Tensor) -> torch.Tensor:
        """The value's like around a copy of ``local``."""
        is_plain = type(self.value) in _PLAIN_TYPES
        if not is_plain and isinstance(self.value, DTensor):
            return rewrapped(self.value, staged)
        # A plain tensor's class has no such attribute, and to find that out would take longer than all else.
        if "global_shape" in vars(self.value) if is_plain else hasattr(self.value, "global_shape"):
            for field in _CHUNK_FIELDS:
                if hasattr(self.value, field):  # an incomplete set is the planner's to refuse
                    setattr(staged, field, copy.deepcopy(getattr(self.value, field)))
        return staged


def find_tensors(state_dict: Mapping[Any, Any]) -> list[StagedTensor]:
    """The tensors in mappings, lists and tuples at any depth, each object once, in the state's order.

    Left out, to be copied as the objects that they are: tensors inside of other objects, on devices without streams of their own, and of
    classes that speak DCP's duck protocol.

    Raises:
        UnsupportedTensorError: a tensor that no planner of ours could save, by name.
    """
    found: list[StagedTensor] = []
    seen: set[int] = set()
    # Containers that are being walked, with the beginning of their members' names: no recursion, whose limit a deep state would meet.
    walked: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter([*state_dict.items()]))]
    while walked:
        prefix, members = walked[-1]
        for key, value in members:
            cls = type(value)
            if cls in _ATOMS or id(value) in seen:
                continue
            if cls in _PLAIN_TYPES or isinstance(value, torch.Tensor):
                seen.add(id(value))
                name = f"{prefix}{key}"
                local = value if cls in _PLAIN_TYPES and _is_ordinary(value) else _local(name, value)
                if local is not None:
                    found.append(StagedTensor(name, value, local))
            elif cls is dict or isinstance(value, Mapping):
                seen.add(id(value))
                walked.append((f"{prefix}{key}.", iter([*value.items()])))
                break
            elif isinstance(value, list | tuple):
                seen.add(id(value))
                walked.append((f"{prefix}{key}.", enumerate(tuple(value))))
                break
        else:
            walked.pop()
    return found


def _local(name: str, value: torch.Tensor) -> torch.Tensor | None:
    local = value
    if type(value) not in _PLAIN_TYPES:
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                describe(name, value)  # refuses it
            with torch.no_grad():
                local = wait_for_collective(value.to_local())
            if speaks_duck_protocol(local):
                return None
        elif speaks_duck_protocol(value):
            return None
        else:
            local = wait_for_collective(value)
        if type(local) not in _PLAIN_TYPES or is_traceable_wrapper(local):
            describe(name, value)  # refuses what cannot be saved; what passes has plain memory of its own
            local = local.detach().as_subclass(torch.Tensor)
    if local.layout is not torch.strided or local.is_quantized or local.is_nested or local.device.type == "meta" or _is_freed(local):
        describe(name, value)
    return local if local.device.type in ("cpu", "cuda") else None


def _is_ordinary(value: torch.Tensor) -> bool:
    """Whether a plain tensor is staged as it is, which nearly all are."""
    return (
        (value.is_cpu or value.is_cuda)
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
        and (value.data_ptr() != 0 or value.numel() == 0)
    )


def _is_freed(local: torch.Tensor) -> bool:
    """Whether no memory is behind the elements, as after ``resize_(0)`` of the storage."""
    return not local.data_ptr() and local.numel() > 0


def views_in(flat: torch.Tensor, plan: StagePlan, tensors: Sequence[StagedTensor]) -> dict[int, Any]:
    """Id of a tensor of the state -> its staged like."""
    of_dtype: dict[torch.dtype, torch.Tensor] = {}
    staged = {}
    for tensor, view in zip(tensors, plan.views, strict=True):
        dtype = tensor.local.dtype
        whole = of_dtype.get(dtype)
        if whole is None:
            whole = of_dtype[dtype] = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        staged[id(tensor.value)] = tensor.around(whole.as_strided(tensor.local.shape, view.stride, view.first))
    return staged


def rebuilt(state_dict: Mapping[Any, Any], staged: Mapping[int, Any]) -> dict[str, Any]:
    """A deep copy of the state.

    Args:
        state_dict: the state.
        staged: id of a value -> what stands for it in the copy.

    Raises:
        StagingError: something cannot be copied; names the first such value.
    """
    try:
        return _copied_dict(dict(state_dict), dict(staged))
    except RecursionError as error:
        raise StagingError(
            "the state is nested too deeply to be copied",
            found=f"more levels than the recursion limit of {sys.getrecursionlimit():,} allows",
            remedy="flatten it, or save without staging (dcp.save)",
        ) from error
    except Exception as error:  # whatever a class of the user's raises when it is copied
        name, value = _first_uncopied(state_dict, staged)
        raise StagingError(
            "a value of the state cannot be copied, and could change while it is written",
            tensor=name,
            found=f"{type(value).__module__}.{type(value).__qualname__}: {error}",
            remedy="leave it out of the state, put its state_dict() there, or save without staging (dcp.save)",
        ) from error


def _copied_dict(values: Mapping[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """As ``copy.deepcopy`` of a dict, without its calls for each text, number and staged tensor, which are nearly all of a state."""
    copied: dict[Any, Any] = {}
    memo[id(values)] = copied
    for key, value in values.items():
        if type(key) not in _ATOMS:
            key = copy.deepcopy(key, memo)
        cls = type(value)
        if cls in _ATOMS:
            copied[key] = value
            continue
        found = memo.get(id(value), memo)
        if found is not memo:
            copied[key] = found
        elif cls is dict:
            copied[key] = _copied_dict(value, memo)
        else:
            copied[key] = copy.deepcopy(value, memo)
    return copied


def _first_uncopied(state_dict: Mapping[Any, Any], staged: Mapping[int, Any]) -> tuple[str, Any]:
    """Name and value of the innermost thing that cannot be copied."""
    name = ""
    here: Any = state_dict
    while True:
        # One for all children: each is met for the first time, and a copy for each would take their number squared.
        memo = dict(staged)
        children: Any = ()
        if isinstance(here, Mapping):
            children = here.items()
        elif isinstance(here, list | tuple):
            children = enumerate(here)
        for key, child in children:
            try:
                copy.deepcopy(child, memo)
            except Exception:  # noqa: BLE001  the one that is looked for, whatever it raises
                name, here = f"{name}.{key}" if name else str(key), child
                break
        else:
            return name, here
