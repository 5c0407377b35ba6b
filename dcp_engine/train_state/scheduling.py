"""Whether schedulers stand where the counters say that training does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dcp_engine.errors import InvalidOptionError
from dcp_engine.train_state.counters import Counters

__all__ = [
    "OptimizerCount",
    "SchedulerCount",
    "check_count",
    "check_optimizer_count",
    "counts_of",
    "scheduler_disagreements",
    "scheduler_positions",
]

SchedulerCount = Literal["applied", "attempted", "epoch"]
OptimizerCount = Literal["applied"]


def check_count(count: SchedulerCount | None) -> SchedulerCount | None:
    """Refuse another text.

    Raises:
        InvalidOptionError: says what there is.
    """
    if count not in (None, "applied", "attempted", "epoch"):
        raise InvalidOptionError("scheduler_counts is not known", expected="'applied', 'attempted', 'epoch' or None", found=repr(count))
    return count


def check_optimizer_count(count: OptimizerCount | None) -> OptimizerCount | None:
    """Refuse another text.

    Raises:
        InvalidOptionError: says what there is.
    """
    if count not in (None, "applied"):
        raise InvalidOptionError("optimizer_counts is not known", expected="'applied' or None", found=repr(count))
    return count


def counts_of(counters: Counters) -> dict[str, int]:
    """What a scheduler may count, by the names of :data:`SchedulerCount`."""
    return {"applied": counters.updates_applied, "attempted": counters.step, "epoch": counters.epoch}


def scheduler_positions(schedulers: Mapping[str, Any]) -> dict[str, int]:
    """Label -> the scheduler's own count of steps; those without ``last_epoch`` are left out."""
    found = {label: getattr(scheduler, "last_epoch", None) for label, scheduler in schedulers.items()}
    return {label: position for label, position in found.items() if isinstance(position, int)}


def scheduler_disagreements(positions: Mapping[str, int], counts: Mapping[str, int], count: SchedulerCount | None) -> tuple[str, ...]:
    """Schedulers whose own count of steps is not that of the counters, in words; none where the counters were never moved.

    With a GradScaler two counts of updates differ as soon as one was skipped. Which of them a scheduler follows is up to the loop, so
    without ``count`` each that fits will do.

    Args:
        positions: of :func:`scheduler_positions`.
        counts: of :func:`counts_of`.
        count: what one step of a scheduler stands for.
    """
    if counts["attempted"] == 0 and counts["epoch"] == 0:
        return ()
    allowed = counts if count is None else {count: counts[count]}
    texts = []
    for label, position in positions.items():
        if position not in allowed.values():
            name = f"scheduler {label!r}" if label else "the scheduler"
            wanted = " or ".join(f"{number} ({kind})" for kind, number in allowed.items())
            texts.append(f"{name} has taken {position} steps, and the counters say {wanted}")
    return tuple(texts)
