"""The model's part of a state: parameters and persistent buffers under the names that the plain module gives them.

Wrappers leave no trace in the names: DDP's ``module.``, the compiler's ``_orig_mod.``, activation checkpointing's. So a state fits every
layout of the same model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dcp_engine.errors import DuplicateKeyError, KeyMismatchError, ShapeMismatchError, UnsupportedModeError

__all__ = ["Part", "load_model_state", "model_state", "parameter_names"]

Part = tuple[str, nn.Module]
"""What the names of a part begin with (with its dot, or empty), and its module."""

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where ``torch.compile`` and activation checkpointing keep the module that they wrap."""


def parameter_names(parts: Sequence[Part]) -> dict[nn.Parameter, str]:
    """Parameter -> name. One that has several names (tied weights) goes by the first.

    Args:
        parts: the model's parts.

    Raises:
        DuplicateKeyError: two parameters have one name: parts of a pipeline that number their layers alike, say.
        UnsupportedModeError: a module is wrapped in FSDP1, whose flat parameters have no names of their own.
    """
    names: dict[nn.Parameter, str] = {}
    owners: dict[str, nn.Parameter] = {}
    for prefix, module in parts:
        for name, parameter in _walk(module, prefix):
            if owners.setdefault(name, parameter) is not parameter:
                raise DuplicateKeyError(
                    "two parameters of the model's parts have one name",
                    tensor=f"model.{name}",
                    remedy="give the parts as a dict, so that each has a name of its own, or keep the whole model's names in them",
                )
            names.setdefault(parameter, name)
    return names


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(module, FullyShardedDataParallel):
        raise UnsupportedModeError("FSDP1 is not supported", tensor=f"model.{prefix}", remedy="use fully_shard (FSDP2)")
    children = dict(module.named_children())
    wrapped = next((children[name] for name in _WRAPPED if name in children), None)
    if isinstance(module, DistributedDataParallel):
        wrapped = module.module
    if wrapped is not None:
        yield from _walk(wrapped, prefix)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in children.items():
        yield from _walk(child, f"{prefix}{name}.")


def model_state(parts: Sequence[Part]) -> dict[str, Any]:
    """Name -> live tensor (or a module's extra state), of all parts.

    Raises:
        DuplicateKeyError: two parts have a buffer of one name.
    """
    state: dict[str, Any] = {}
    for prefix, module in parts:
        for name, value in get_model_state_dict(module).items():
            key = prefix + name
            if key in state:
                raise DuplicateKeyError("two values of the model's parts have one name", tensor=f"model.{key}")
            state[key] = value
    return state


def load_model_state(parts: Sequence[Part], stored: Mapping[str, Any], *, component: str = "model") -> None:
    """Put every value into its module, or none.

    Raises:
        KeyMismatchError: names differ, both lists given.
        ShapeMismatchError: a tensor has another global shape.
    """
    live = [get_model_state_dict(module) for _, module in parts]
    wanted = {prefix + name: value for (prefix, _), part in zip(parts, live, strict=True) for name, value in part.items()}
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unexpected:
        raise KeyMismatchError(
            "the stored model is another one",
            missing=tuple(f"{component}.{name}" for name in missing),
            unexpected=tuple(f"{component}.{name}" for name in unexpected),
            found=f"missing {missing[:5]}, unexpected {unexpected[:5]}",
        )
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor) and value.shape != stored[name].shape:
            raise ShapeMismatchError(
                "a stored tensor has another shape",
                tensor=f"{component}.{name}",
                expected=list(value.shape),
                found=list(stored[name].shape),
            )
    for (prefix, module), part in zip(parts, live, strict=True):
        set_model_state_dict(module, {name: stored[prefix + name] for name in part})
