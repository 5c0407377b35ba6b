"""Whether schedulers stand where the counters say that training does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dcp_engine.errors import InvalidOptionError
from dcp_engine.train_state.counters import Counters

__all__ = ["SchedulerCount", "check_count", "scheduler_disagreements"]

SchedulerCount = Literal["applied", "attempted", "epoch"]


def check_count(count: SchedulerCount | None) -> SchedulerCount | None:
    """Refuse another text.

    Raises:
        InvalidOptionError: says what there is.
    """
    if count not in (None, "applied", "attempted", "epoch"):
        raise InvalidOptionError("scheduler_counts is not known", expected="'applied', 'attempted', 'epoch' or None", found=repr(count))
    return count


def scheduler_disagreements(schedulers: Mapping[str, Any], counters: Counters, count: SchedulerCount | None) -> tuple[str, ...]:
    """Schedulers whose own count of steps is not that of the counters, in words; none where the counters were never moved.

    With a GradScaler two counts of updates differ as soon as one was skipped. Which of them a scheduler follows is up to the loop, so
    without ``count`` each that fits will do.

    Args:
        schedulers: label -> scheduler; those without ``last_epoch`` are left out.
        counters: where training stands.
        count: what one step of a scheduler stands for.
    """
    if counters.step == 0 and counters.epoch == 0:
        return ()
    counts = {"applied": counters.updates_applied, "attempted": counters.step, "epoch": counters.epoch}
    allowed = counts if count is None else {count: counts[count]}
    texts = []
    for label, scheduler in schedulers.items():
        found = getattr(scheduler, "last_epoch", None)
        if isinstance(found, int) and found not in allowed.values():
            name = f"scheduler {label!r}" if label else "the scheduler"
            wanted = " or ".join(f"{number} ({kind})" for kind, number in allowed.items())
            texts.append(f"{name} has taken {found} steps, and the counters say {wanted}")
    return tuple(texts)
