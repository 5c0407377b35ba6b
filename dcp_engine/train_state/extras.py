"""State of objects that only the user knows: modules, dicts of tensors, and whatever has ``state_dict`` and ``load_state_dict``.

Their tensors are stored as tensors, sharded ones as what they are, so that averaged weights reshard like the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from dcp_engine.errors import InvalidOptionError
from dcp_engine.train_state.labels import check_stateful, join
from dcp_engine.train_state.models import load_model_state, model_state
from dcp_engine.train_state.packed import pack
from dcp_engine.train_state.per_rank import PerRank

__all__ = ["check_extra", "extra_state", "load_extra"]


def check_extra(value: object, *, argument: str) -> None:
    """Refuse what cannot be put back: a load must fill the caller's own object.

    Raises:
        InvalidOptionError: naming the argument.
    """
    if isinstance(value, nn.Module | PerRank | MutableMapping):
        return
    try:
        check_stateful({"": value}, argument=argument)
    except InvalidOptionError as error:
        error.remedy = "a plain value can be kept in a dict; what differs between ranks in PerRank(value)"
        raise


def extra_state(value: Any, *, key: str) -> Any:
    """The state of one object other than a ``PerRank``; tensors are the live ones.

    Raises:
        UnencodableObjectError: a part that is not a tensor cannot be stored; names it.
    """
    if isinstance(value, nn.Module):
        state: Any = model_state([("", value)])
    else:
        state = dict(value) if isinstance(value, MutableMapping) else value.state_dict()
    _check(state, key)
    return state


def _check(value: Any, key: str) -> None:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check(part, join(key, str(name)))
    elif isinstance(value, list | tuple) and any(isinstance(part, torch.Tensor | Mapping | list | tuple) for part in value):
        for number, part in enumerate(value):
            _check(part, join(key, str(number)))
    else:
        pack(value, key=key)


def load_extra(value: Any, stored: Any, *, key: str) -> None:
    """Give the object back what :func:`extra_state` gave."""
    if isinstance(value, nn.Module):
        load_model_state([("", value)], stored, component=key)
    elif isinstance(value, MutableMapping):
        _fill(value, stored)
    else:
        value.load_state_dict(stored)


def _fill(mapping: MutableMapping[Any, Any], stored: Mapping[Any, Any]) -> None:
    """In place, down to the tensors: others hold them too."""
    for name in [name for name in mapping if name not in stored]:
        del mapping[name]
    for name, value in stored.items():
        live = mapping.get(name)
        if isinstance(live, MutableMapping) and isinstance(value, Mapping):
            _fill(live, value)
        elif isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape and live.dtype == value.dtype:
            if live is not value:
                live.detach().copy_(value)
        else:
            mapping[name] = value
