"""Saves of one rank or several within one process: DCP's calls in DCP's order, one rank after the other, so that runs repeat exactly."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from support.values import full, same

from dcp_engine import BalancedSavePlanner, ShardWriter
from dcp_engine.planners import save as save_module

__all__ = ["RanksFailedError", "merged", "same_state", "save_in_turn", "state_of", "writers_for"]

_Result = TypeVar("_Result")
SHAPES = {"w": (50, 40), "bias": (3_000,), "large": (150, 130)}


class RanksFailedError(Exception):
    """What ``CheckpointException`` is to a user of ``dcp.save``.

    Attributes:
        failures: rank -> what it raised.
    """

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__(str(failures))
        self.failures = failures


def state_of(step: int, rank: int, *, filled: bool = True) -> dict[str, Any]:
    """What a rank holds at a step: replicas, a tensor of its own, and an object."""
    model = {key: full(f"{step} {key}", shape) if filled else torch.zeros(shape) for key, shape in SHAPES.items()}
    own = full(f"{step} own {rank}", (70, 9)) if filled else torch.zeros(70, 9)
    return {"model": model, "optimizer": {f"own {rank}": own}, "step": step if filled else -1}


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that the ranks hold together."""
    return {**states[0], "optimizer": {key: value for state in states for key, value in state["optimizer"].items()}}


def same_state(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two states of this module are equal, bit by bit."""
    return found["step"] == expected["step"] and all(
        same(found[part][key], value) for part in ("model", "optimizer") for key, value in expected[part].items()
    )


def writers_for(path: str | os.PathLike[str], world_size: int, **options: Any) -> list[ShardWriter]:
    """A writer for each rank."""
    return [ShardWriter(path, threads=1, **options) for _ in range(world_size)]


def save_in_turn(writers: Sequence[ShardWriter], states: Sequence[dict[str, Any]]) -> None:
    """One save. Raises :class:`RanksFailedError` after a step that failed on some rank, as ``dcp.save`` does."""
    planners = [BalancedSavePlanner() for _ in writers]

    def plan(rank: int) -> Any:
        planners[rank].set_up_planner(states[rank], storage_meta=writers[rank].storage_meta(), is_coordinator=rank == 0)
        writers[rank].set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        return writers[rank].prepare_local_plan(planners[rank].create_local_plan())

    def write(rank: int) -> Any:
        return writers[rank].write_data(planners[rank].finish_plan(plans[rank]), planners[rank]).wait()

    with mock.patch.object(save_module, "_num_ranks", return_value=len(writers)):  # it would ask torch.distributed, which is not in use
        local_plans = _each(len(writers), plan)
    global_plans, metadata = _each(1, lambda _: planners[0].create_global_plan(local_plans))[0]
    plans = _each(1, lambda _: writers[0].prepare_global_plan(global_plans))[0]
    results = _each(len(writers), write)
    _each(1, lambda _: writers[0].finish(metadata, results))


def _each(world_size: int, step: Callable[[int], _Result]) -> list[_Result]:
    """One step of DCP's: every rank takes it, whatever becomes of the others."""
    results: list[_Result] = []
    failures: dict[int, Exception] = {}
    for rank in range(world_size):
        try:
            results.append(step(rank))
        except Exception as error:  # as DCP, which sends it to all ranks
            failures[rank] = error
    if failures:
        raise RanksFailedError(failures)
    return results
