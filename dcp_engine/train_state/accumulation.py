"""Saves inside an accumulation cycle, where the gradients are part of what makes the next step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

from dcp_engine.errors import InvalidOptionError, KeyMismatchError, StateError
from dcp_engine.train_state.counters import Counters

__all__ = ["GradPolicy", "check_cycle", "check_policy", "grads_state", "load_grads"]

GradPolicy = Literal["refuse", "defer", "save"]

_POLICIES: Final = ("refuse", "defer", "save")


def check_policy(policy: str) -> GradPolicy:
    """Refuse another text.

    Raises:
        InvalidOptionError: says what there is.
    """
    for known in _POLICIES:
        if policy == known:
            return known
    raise InvalidOptionError("grads is not a policy", expected=f"one of {list(_POLICIES)}", found=repr(policy))


def check_cycle(counters: Counters, policy: GradPolicy, *, unscaled: bool) -> None:
    """Refuse a save inside a cycle that would lose gradients.

    Args:
        counters: where training stands.
        policy: of the state.
        unscaled: a scaler is in use and has unscaled the gradients: it would do so again after a load.

    Raises:
        StateError: says where in the cycle the save fell.
    """
    if not counters.in_cycle:
        return
    if policy != "save":
        raise StateError(
            "a save fell inside an accumulation cycle, whose gradients it would lose",
            step=counters.step,
            found=f"micro_step {counters.micro_step}",
            remedy="save after Counters.update()" + (": ask may_save() first" if policy == "defer" else ', or pass grads="save"'),
        )
    if unscaled:
        raise StateError(
            "a save fell between unscale_ and update of the scaler, which keeps no state of that",
            step=counters.step,
            found=f"micro_step {counters.micro_step}, grads_unscaled",
            remedy="save before scaler.unscale_(), or after scaler.update()",
        )


def grads_state(names: Mapping[nn.Parameter, str], wanted: Collection[str] | None) -> dict[str, torch.Tensor]:
    """Name -> gradient, the live ones.

    Args:
        names: of the model's parameters.
        wanted: names whose gradients are about to be loaded: made where there are none. None: those that there are.
    """
    grads = {}
    for parameter, name in names.items():
        if wanted is None:
            if parameter.grad is not None:
                grads[name] = parameter.grad
        elif name in wanted:
            grads[name] = torch.zeros_like(parameter).detach() if parameter.grad is None else parameter.grad
    return grads


def load_grads(names: Mapping[nn.Parameter, str], stored: Mapping[str, Any], *, is_ours: Callable[[torch.Tensor], bool]) -> None:
    """Put the gradients back, and clear those of parameters that had none.

    Raises:
        KeyMismatchError: a gradient is of no parameter of the model. Nothing is changed then.
    """
    unexpected = tuple(sorted(f"grads.{name}" for name in stored.keys() - set(names.values())))
    if unexpected:
        raise KeyMismatchError("there are gradients of parameters that the model lacks", unexpected=unexpected)
    for parameter, name in names.items():
        grad = stored.get(name)
        if grad is None or grad is parameter.grad:
            parameter.grad = grad
        else:
            parameter.grad = grad if is_ours(grad) else grad.detach().clone()
