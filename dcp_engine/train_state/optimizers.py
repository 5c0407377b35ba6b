"""An optimizer's part of a state, keyed by the names of the parameters, so that it fits every layout and every order of groups.

torch's own ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` are not used, because they

- lose the settings of a group without parameters that is not the last one;
- leave out parameters that were frozen after they had been trained, and refuse those that never had a gradient;
- give one optimizer's entries to another's groups where several have them;
- keep the groups in a list, which no longer fits once a group has an entry more: a scheduler adds ``initial_lr``.

The layout, below the component's key::

    state.<parameter>.<slot>     the slots, tensors as they are
    membership.<parameter>       (index of its group, names of its slots); without slots the optimizer had no state for it yet
    param_groups.<index>         all entries but the parameters, one packed value
    others                       what the optimizer keeps under keys that are no parameters, packed

Keys must be the same for a fresh optimizer, which has no slots, and for one that has trained. So a parameter that wants gradients and has
no state gets *blank* slots in the state, as its first step would make them; what is stored under them is never put into an optimizer.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dcp_engine.errors import InvalidOptionError, KeyMismatchError, StateError
from dcp_engine.train_state.labels import join
from dcp_engine.train_state.packed import pack, unpack
from dcp_engine.train_state.report import Moved

__all__ = ["check_optimizer", "check_optimizer_state", "load_optimizer_state", "optimizer_state"]

Names = Mapping[nn.Parameter, str]

_BLANK_BYTES = 64 << 20
"""Stand-ins of parameters that are made at a time, in bytes: they come on top of the state."""


def check_optimizer(optimizer: Optimizer, names: Names, *, argument: str) -> None:
    """Refuse parameters that are not the model's.

    Raises:
        InvalidOptionError: naming group and position.
    """
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise InvalidOptionError(
                    f"{argument} trains a parameter that is not the model's",
                    found=f"group {number}, parameter {position}, shape {list(parameter.shape)}",
                    remedy="pass the model, or all its parts, and make the optimizer after wrapping and moving it",
                )


def optimizer_state(
    optimizer: Optimizer, names: Names, *, key: str, started: Collection[str] | None = None
) -> tuple[dict[str, Any], list[Any]]:
    """The state of one optimizer. Tensors are the live ones.

    Args:
        optimizer: not changed.
        names: of all parameters of the model.
        key: of the component, for messages.
        started: names of the parameters that have slots in the checkpoint that is about to be loaded. None: a save, or not known.

    Returns:
        The state, and the blank tensors in it.

    Raises:
        UnencodableObjectError: an entry of a group cannot be stored; names it.
    """
    slots: dict[str, Any] = {}
    membership: dict[str, Any] = {}
    blanks: list[Any] = []
    for number, group in enumerate(optimizer.param_groups):
        without = []
        for parameter in group["params"]:
            name = names[parameter]
            state = optimizer.state.get(parameter) or {}
            membership[name] = (number, tuple(sorted(state)))
            if state and (started is None or name in started):
                slots[name] = dict(state)
            elif parameter.requires_grad if started is None else name in started:
                without.append(parameter)
        for parameter, state in _blank_slots(optimizer, group, without):
            slots[names[parameter]] = state
            blanks.extend(_tensors(state))
    groups = {
        str(number): pack({name: value for name, value in group.items() if name != "params"}, key=join(key, "param_groups", str(number)))
        for number, group in enumerate(optimizer.param_groups)
    }
    others = {name: value for name, value in optimizer.state.items() if not isinstance(name, torch.Tensor)}
    state = {"state": slots, "membership": membership, "param_groups": groups, "others": pack(others, key=join(key, "others"))}
    return state, blanks


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)


def _blank_slots(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Slots as a first step makes them, from steps on stand-ins; nothing for an optimizer that needs none, or that takes no such step."""
    if not parameters or not _step(optimizer, group, [torch.zeros(1, dtype=parameters[0].dtype, device=parameters[0].device)], {}):
        return
    chunk: list[nn.Parameter] = []
    num_bytes = 0
    for number, parameter in enumerate(parameters):
        chunk.append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
        if num_bytes >= _BLANK_BYTES or number == len(parameters) - 1:
            stand_ins = [torch.zeros_like(one) for one in chunk]
            made: dict[torch.Tensor, dict[str, Any]] = {}
            _step(optimizer, group, stand_ins, made)
            yield from ((one, made[stand_in]) for one, stand_in in zip(chunk, stand_ins, strict=True) if made.get(stand_in))
            chunk, num_bytes = [], 0


def _step(optimizer: Optimizer, group: dict[str, Any], stand_ins: list[torch.Tensor], made: dict[torch.Tensor, dict[str, Any]]) -> bool:
    """One step over stand-ins with gradients of zero.

    Returns:
        Whether it makes slots, as far as can be told: True also where it raised, since a stand-in of one element may not be enough for it.
    """
    for stand_in in stand_ins:
        stand_in.requires_grad_(True)
        stand_in.grad = torch.zeros_like(stand_in)
    # Without the wrappers: those of torch call the user's hooks, and that of a scheduler counts.
    step: Callable[[Optimizer], Any] = inspect.unwrap(type(optimizer).step)
    state, groups = optimizer.state, optimizer.param_groups
    try:
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [{**group, "params": stand_ins}]
        with torch.no_grad():
            step(optimizer)
        made.update({stand_in: dict(optimizer.state[stand_in]) for stand_in in stand_ins if optimizer.state.get(stand_in)})
        return bool(made)
    except Exception:  # noqa: BLE001  it wants a closure, sparse gradients, a matrix: then the slots are known from live ones only
        return True
    finally:
        optimizer.state, optimizer.param_groups = state, groups


def check_optimizer_state(optimizer: Optimizer, names: Names, stored: Mapping[str, Any], *, key: str) -> None:
    """Refuse a stored state that is not this optimizer's, before anything is changed.

    Raises:
        KeyMismatchError: other parameters, or a parameter's slots are not all there.
        StateError: another number of groups.
    """
    live = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    membership = stored["membership"]
    slots = stored.get("state", {})
    missing = [join(key, "membership", name) for name in live - membership.keys()]
    missing += [
        join(key, "state", name, slot) for name, (_, names_) in membership.items() for slot in names_ if slot not in slots.get(name, {})
    ]
    unexpected = [join(key, "membership", name) for name in membership.keys() - live]
    if missing or unexpected:
        raise KeyMismatchError(
            "the stored optimizer state does not fit the optimizer",
            missing=tuple(sorted(missing)),
            unexpected=tuple(sorted(unexpected)),
            found=f"missing {sorted(missing)[:5]}, unexpected {sorted(unexpected)[:5]}",
            remedy="make the optimizer over the same parameters as in the run that saved",
        )
    if len(stored["param_groups"]) != len(optimizer.param_groups):
        raise StateError(
            "the optimizer has another number of parameter groups",
            tensor=join(key, "param_groups"),
            expected=len(stored["param_groups"]),
            found=len(optimizer.param_groups),
        )


def load_optimizer_state(
    optimizer: Optimizer, names: Names, stored: Mapping[str, Any], *, label: str, key: str, is_ours: Callable[[torch.Tensor], bool]
) -> tuple[list[Moved], list[str]]:
    """Take all of a state that :func:`check_optimizer_state` let pass.

    Args:
        optimizer: fresh or trained.
        names: of all parameters of the model.
        stored: the state.
        label: of the optimizer, for what is returned.
        key: of the component, for messages.
        is_ours: whether a tensor was made for this load, so that it may be kept instead of copied.

    Returns:
        Parameters that are in another group than when they were saved, and names of those that had no state yet.
    """
    moved, unstarted = [], []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[parameter]
            saved_group, slots = stored["membership"][name]
            if saved_group != number:
                moved.append(Moved(parameter=name, optimizer=label, saved_group=saved_group, group=number))
            live = optimizer.state.pop(parameter, {})
            if slots:
                optimizer.state[parameter] = {slot: _settled(live.get(slot), stored["state"][name][slot], is_ours) for slot in slots}
            else:
                unstarted.append(name)
        _load_group(group, unpack(stored["param_groups"][str(number)], key=join(key, "param_groups", str(number))))
    state: dict[Any, Any] = optimizer.state
    for other in [other for other in state if not isinstance(other, torch.Tensor)]:
        del state[other]
    state.update(unpack(stored["others"], key=join(key, "others")))
    return moved, unstarted


def _load_group(group: dict[str, Any], entries: dict[str, Any]) -> None:
    for name, value in entries.items():
        live = group.get(name)
        if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor) and live.shape == value.shape and live.dtype == value.dtype:
            live.detach().copy_(value)  # a captured graph or a scheduler holds this very tensor
        else:
            group[name] = value


def _settled(live: Any, value: Any, is_ours: Callable[[torch.Tensor], bool]) -> Any:
    """The value to keep: the live tensor filled, where it fits; else one that nobody else holds."""
    if isinstance(value, Mapping):
        parts = live if isinstance(live, Mapping) else {}
        return {name: _settled(parts.get(name), part, is_ours) for name, part in value.items()}
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if value is live or is_ours(value):
        return value
    if isinstance(live, torch.Tensor) and type(live) is type(value) and live.shape == value.shape and live.dtype == value.dtype:
        return live.copy_(value)
    return value.detach().clone()
