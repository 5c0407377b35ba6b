"""Saves inside an accumulation cycle, where the gradients are part of what makes the next step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dcp_engine.errors import InvalidOptionError, KeyMismatchError, StateError
from dcp_engine.train_state.counters import Counters
from dcp_engine.train_state.per_rank import name_of_rank, rank_of_name

__all__ = ["SHARED", "GradPolicy", "blank_grads", "check_cycle", "check_grads", "check_policy", "grads_state", "load_grads"]

GradPolicy = Literal["refuse", "defer", "save"]

SHARED: Final = "shared"
"""Key below ``grads`` of gradients that are one tensor over all ranks."""

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


def grads_state(names: Mapping[nn.Parameter, str], *, rank: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """The live gradients: ``shared``, those that are one tensor over all ranks, and this rank's, by the name of the rank.

    A plain tensor's gradient inside a cycle is what this rank has added up: DDP reduces at the cycle's end.

    Args:
        names: of the model's parameters.
        rank: of the caller.
        world_size: number of ranks.

    Raises:
        StateError: there are none, although a cycle is under way.
    """
    found = {name: parameter.grad for parameter, name in names.items() if parameter.grad is not None}
    if not found:
        raise StateError(
            "a save fell inside an accumulation cycle, and no parameter has a gradient",
            remedy="save after Counters.update(): FSDP2 without gradient sync keeps what it adds up where nobody can read it",
        )
    shared = {name: grad for name, grad in found.items() if world_size == 1 or isinstance(grad, DTensor)}
    mine = {name: grad for name, grad in found.items() if name not in shared}
    return {place: grads for place, grads in ((SHARED, shared), (name_of_rank(rank), mine)) if grads}


def blank_grads(
    names: Mapping[nn.Parameter, str], stored: Mapping[str, Collection[str]], *, rank: int, world_size: int
) -> dict[str, dict[str, torch.Tensor]]:
    """What to load stored gradients into.

    Args:
        names: of the model's parameters.
        stored: place of :func:`grads_state` -> names of the parameters whose gradients are stored there.
        rank: of the caller.
        world_size: number of ranks.

    Raises:
        StateError: as :func:`check_grads`.
    """
    check_grads(stored, world_size=world_size)
    mine = {place: wanted for place, wanted in stored.items() if place in (SHARED, name_of_rank(rank))}
    return {
        place: {name: torch.zeros_like(parameter).detach() for parameter, name in names.items() if name in wanted}
        for place, wanted in mine.items()
    }


def check_grads(places: Iterable[str], *, world_size: int, saved_world_size: int | None = None) -> None:
    """Refuse what ranks had added up each for itself on another number of ranks: no rule says whose they are then.

    Args:
        places: below ``grads`` in the checkpoint.
        world_size: number of ranks.
        saved_world_size: ranks that saved. None: as many as the places tell.

    Raises:
        StateError: says how many ranks saved them.
    """
    ranks = [rank for place in places if (rank := rank_of_name(place)) is not None]
    if not ranks:
        return
    saved = max(ranks) + 1 if saved_world_size is None else saved_world_size
    if saved != world_size:
        raise StateError(
            "the save fell inside an accumulation cycle, and each rank's gradients can go on only there",
            tensor="grads",
            expected=f"{saved} ranks",
            found=f"{world_size} ranks",
            remedy="load it on as many ranks, or another checkpoint",
        )


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
