"""Whether what is about to be saved belongs to one step: plain facts of this rank, and those among them that contradict each other. Pure.

Ranks are not compared here. Facts that all of them must share are saved as values under one key each, so that the planner's comparison of
replicas refuses a step that is not one, before anything is published and without another collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dcp_engine.data import ResumableLoader, ResumableSampler, ResumableStream
from dcp_engine.train_state import TrainState
from dcp_engine.train_state.labels import join
from dcp_engine.train_state.per_rank import PerRank
from dcp_engine.train_state.scheduling import (
    OptimizerCount,
    SchedulerCount,
    scheduler_disagreements,
    scheduler_positions,
)

__all__ = ["Fact", "disagreements_by_fact", "facts_of", "idle_data", "local_disagreements"]

Fact = int | float | str

_POSITION = ("epoch", "offset", "samples_consumed", "next_batch_hash")
_COUNTERS = ("step", "updates_applied", "micro_step", "epoch", "batch_in_epoch", "samples", "tokens")


def facts_of(state: TrainState | None, step: int, *, wait_for_device: bool = False) -> dict[str, Fact]:
    """Where each part of a state stands. All ranks that have a fact must have the same one, or their states are not of one step.

    ========================================  =====================================================================
    ``step``                                  the step that the checkpoint is saved as
    ``progress.<name>``                       the counters; ``progress.grads_stepped`` 1 between ``optimizer.step()`` and ``update()``
    ``optimizer[.<label>]``                   the largest ``step`` among its parameters' states; absent without one
    ``scheduler[.<label>]``                   its ``last_epoch``
    ``scaler[.<label>]``                      its scale
    ``data[.<label>].<name>``                 of a ``ResumableSampler``, or a loader over one: the position, the hash of the next batch
    ========================================  =====================================================================

    What differs between ranks by design (in a ``PerRank``) has none.

    Args:
        state: None: a state of which nothing is known.
        step: of the checkpoint.
        wait_for_device: also read counts of steps that lie on a GPU (of fused and capturable optimizers), which waits for all that is
            queued there. Before a save that would stall training.
    """
    if state is None:
        return {"step": step}
    counters = state.counters
    facts: dict[str, Fact] = {"step": step, **{f"progress.{name}": getattr(counters, name) for name in _COUNTERS}}
    facts["progress.grads_stepped"] = int(counters.in_cycle and counters.grads_stepped)
    for label, optimizer in state.parts("optimizer").items():
        taken = _steps_taken(optimizer, wait_for_device=wait_for_device)
        if taken is not None:
            facts[join("optimizer", label)] = taken
    for label, position in scheduler_positions(_shared(state, "scheduler")).items():
        facts[join("scheduler", label)] = position
    for label, scaler in _shared(state, "scaler").items():
        if callable(getattr(scaler, "get_scale", None)):
            facts[join("scaler", label)] = float(scaler.get_scale())
    for label, part in _shared(state, "data").items():
        facts.update({join("data", label, name): fact for name, fact in _position(part).items()})
    return facts


def local_disagreements(
    facts: Mapping[str, Fact], *, scheduler_counts: SchedulerCount | None = None, optimizer_counts: OptimizerCount | None = "applied"
) -> tuple[str, ...]:
    """The texts of :func:`disagreements_by_fact`."""
    return tuple(disagreements_by_fact(facts, scheduler_counts=scheduler_counts, optimizer_counts=optimizer_counts).values())


def disagreements_by_fact(
    facts: Mapping[str, Fact], *, scheduler_counts: SchedulerCount | None = None, optimizer_counts: OptimizerCount | None = "applied"
) -> dict[str, str]:
    """What of one rank's facts does not belong to one step: name of the fact -> how it disagrees with the counters, in words.

    Counters that were never moved are not held against anything: that loop does not use them.

    Args:
        facts: of :func:`facts_of`.
        scheduler_counts: of the ``TrainState``.
        optimizer_counts: of the ``TrainState``.
    """
    attempted, applied = _number(facts, "progress.step"), _number(facts, "progress.updates_applied")
    if attempted == 0 and _number(facts, "progress.epoch") == 0:
        return {}
    texts = {}
    if facts["step"] != attempted:
        texts["progress.step"] = f"the checkpoint is saved as step {facts['step']}, and the counters are at step {attempted}"
    # Between optimizer.step() and Counters.update() of an accumulation cycle, an update is done and not counted yet.
    num_uncounted = _number(facts, "progress.grads_stepped")
    if optimizer_counts == "applied":
        texts |= _optimizer_disagreements(facts, {applied, applied + num_uncounted})
    counts = {"applied": applied, "attempted": attempted, "epoch": _number(facts, "progress.epoch")}
    ahead = {**counts, "applied": applied + num_uncounted, "attempted": attempted + num_uncounted}
    for label, position in _labelled(facts, "scheduler").items():
        found = [scheduler_disagreements({label: position}, allowed, scheduler_counts) for allowed in (counts, ahead)]
        if all(found):
            texts[join("scheduler", label)] = found[0][0]
    return texts | _data_disagreements(facts)


def idle_data(state: TrainState) -> tuple[str, ...]:
    """Positions in the data of which none has ever moved, although the counters say that the run trains, in words.

    That is a loop which iterates a loader past its position: a run that comes back would take the same samples again. Nothing is held
    against data of which training takes only some.
    """
    counters = state.counters
    taken = {"samples": counters.samples, "micro-batches of this epoch": counters.batch_in_epoch, "updates": counters.step}
    moved = ", ".join(f"{number} {name}" for name, number in taken.items() if number)
    positions = {label: consumed for label, part in state.parts("data").items() if (consumed := _consumed(part)) is not None}
    if not moved or any(positions.values()):
        return ()
    return tuple(
        f"{join('data', label)} has handed out no sample, and the counters say that there were {moved}: iterate ResumableLoader(loader), "
        "or call consumed() after each batch"
        for label in positions
    )


def _optimizer_disagreements(facts: Mapping[str, Fact], allowed: set[int]) -> dict[str, str]:
    texts = {}
    for label, taken in _labelled(facts, "optimizer").items():
        if taken not in allowed:
            name = f"optimizer {label!r}" if label else "the optimizer"
            skipped = "; an update that a scaler skipped is counted by update(applied=False)" if taken < min(allowed) else ""
            texts[join("optimizer", label)] = f"{name} has taken {taken} steps, and the counters say {min(allowed)} (applied){skipped}"
    return texts


def _data_disagreements(facts: Mapping[str, Fact]) -> dict[str, str]:
    """A position that is one batch away from the samples that the loop has counted, over all ranks or those of its own rank.

    A loop may count something else, such as samples that are not padded, or take from several positions: that is held against nothing.
    """
    counted = _number(facts, "progress.samples")
    positions = [name for name in facts if name.endswith(".samples_consumed")]
    if len(positions) != 1 or not counted:
        return {}
    name = positions[0]
    key = name.removesuffix(".samples_consumed")
    consumed, num_ranks = _number(facts, name), _number(facts, f"{key}.world_size")
    distances = {consumed - counted, consumed - counted * num_ranks}
    size = _number(facts, f"{key}.global_batch")
    if 0 in distances or distances.isdisjoint({-size, size}):
        return {}
    return {name: f"{key} has handed out {consumed} samples, and the counters say {counted}: a batch of {size} apart"}


def _labelled(facts: Mapping[str, Fact], component: str) -> dict[str, int]:
    """Label -> count of a component's parts."""
    return {
        name.removeprefix(component).removeprefix("."): fact
        for name, fact in facts.items()
        if isinstance(fact, int) and (name == component or name.startswith(f"{component}."))
    }


def _number(facts: Mapping[str, Fact], name: str) -> int:
    value = facts.get(name, 0)
    return value if isinstance(value, int) else 0


def _shared(state: TrainState, component: str) -> dict[str, Any]:
    return {label: part for label, part in state.parts(component).items() if not isinstance(part, PerRank)}


def _source(part: Any) -> Any:
    return part.source if isinstance(part, ResumableLoader) else part


def _consumed(part: Any) -> int | None:
    """Samples since the run's beginning, of this rank or of all; None of somebody else's class."""
    source = _source(part.value if isinstance(part, PerRank) else part)
    if isinstance(source, ResumableStream):
        return int(source.state_dict()["samples_before"]) + source.samples_consumed
    return source.samples_consumed if isinstance(source, ResumableSampler) else None


def _position(part: Any) -> dict[str, Fact]:
    source = _source(part)
    if not isinstance(source, ResumableSampler):
        return {}  # the state of somebody else's class may cost anything to ask for
    state = source.state_dict()
    position: dict[str, Fact] = {name: state[name] for name in _POSITION}
    return {**position, "global_batch": state["batch_size"] * state["world_size"], "world_size": state["world_size"]}


def _steps_taken(optimizer: Optimizer, *, wait_for_device: bool) -> int | None:
    """Of the parameter that has taken most: others may have been frozen, or had no gradient."""
    slots = [state["step"] for state in optimizer.state.values() if isinstance(state, Mapping) and "step" in state]
    counts = slots or [group["step"] for group in optimizer.param_groups if "step" in group]
    tensors: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    numbers = [count for count in counts if isinstance(count, int | float)]
    for count in counts:
        if isinstance(count, torch.Tensor) and count.numel() == 1 and (wait_for_device or count.device.type == "cpu"):
            tensors.setdefault((count.device, count.dtype), []).append(count.detach().reshape(()))
    numbers += [torch.stack(group).max().item() for group in tensors.values()]
    most = max(numbers, default=math.nan)
    return int(most) if math.isfinite(most) and most == int(most) else None
