"""How often to save: what saving costs against what failures cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dcp_engine.policies.checked import check_secs, check_share

__all__ = ["Interval", "choose_interval", "daly_interval", "waste", "young_interval"]


def young_interval(save_secs: float, mtbf_secs: float) -> float:
    """The interval that wastes least, to first order: ``sqrt(2 C M)``.

    What a restart costs does not move it: each failure costs that much at any interval. Source: J. W. Young, "A first order approximation
    to the optimum checkpoint interval", CACM 17 (1974).

    Args:
        save_secs: C, for how long one save keeps training from training.
        mtbf_secs: M, mean time between failures of the whole job.

    Returns:
        seconds from the beginning of one save to that of the next.

    Raises:
        InvalidOptionError: an argument is no duration.
    """
    return math.sqrt(2 * check_secs("save_secs", save_secs, may_be_zero=True) * check_secs("mtbf_secs", mtbf_secs))


def daly_interval(save_secs: float, mtbf_secs: float) -> float:
    """The interval to higher order, which matters where saves take more than a few percent of the time between failures.

    Counted, as in the source, from the end of one save to the beginning of the next. Source: J. T. Daly, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", FGCS 22 (2006), equation 37.

    Args:
        save_secs, mtbf_secs: as for :func:`young_interval`.

    Raises:
        InvalidOptionError: an argument is no duration.
    """
    cost, mtbf = check_secs("save_secs", save_secs, may_be_zero=True), check_secs("mtbf_secs", mtbf_secs)
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def waste(interval_secs: float, *, save_secs: float, mtbf_secs: float, restart_secs: float = 0.0) -> float:
    """The share of the time that does not go into training that lasts: ``C/T + (T/2 + R)/M``.

    Of first order: it holds while it is well below 1. From 1 on the job gets nowhere.

    Args:
        interval_secs: T, from the beginning of one save to that of the next.
        save_secs, mtbf_secs: as for :func:`young_interval`.
        restart_secs: R, what a failure costs besides the steps that are done again: to notice it, to start, to restore.

    Raises:
        InvalidOptionError: an argument is no duration.
    """
    interval, mtbf = check_secs("interval_secs", interval_secs), check_secs("mtbf_secs", mtbf_secs)
    cost, restart = check_secs("save_secs", save_secs, may_be_zero=True), check_secs("restart_secs", restart_secs, may_be_zero=True)
    return cost / interval + (interval / 2 + restart) / mtbf


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An interval and what it is worth. All times in seconds; shares of the whole time.

    Attributes:
        secs: to save at, from the beginning of one save to that of the next. 0: after every step.
        optimum_secs: of Young; what failures and saves alone ask for.
        budget_secs: the shortest that the overhead budget allows; None without a budget.
        overhead: share that saves take.
        waste: share that saves and failures take together.
        optimum_overhead, optimum_waste: the same at the optimum.
        lost_secs: expected loss of one failure: half an interval, what was not durable yet, and the restart.
        budget: share that saves may take; None without one.
    """

    secs: float
    optimum_secs: float
    budget_secs: float | None
    overhead: float
    waste: float
    optimum_overhead: float
    optimum_waste: float
    lost_secs: float
    budget: float | None

    @property
    def conflict(self) -> str | None:
        """Where the budget forbids the optimum: a sentence with both numbers. Else None."""
        if self.budget is None or self.budget_secs is None or self.budget_secs <= self.optimum_secs:
            return None
        allowed = f"an overhead budget of {self.budget:.2%} allows a save every {self.budget_secs:,.0f} s (waste {self.waste:.2%})"
        best = f"every {self.optimum_secs:,.0f} s (overhead {self.optimum_overhead:.2%}, waste {self.optimum_waste:.2%})"
        return f"{allowed}, and the optimum would be one {best}: the budget wins"

    def __str__(self) -> str:
        return (
            f"a save every {self.secs:,.0f} s: saves take {self.overhead:.2%} of the time, saves and failures {self.waste:.2%}; a failure "
            f"loses {self.lost_secs:,.0f} s on average"
        )


def choose_interval(
    *, save_secs: float, mtbf_secs: float, restart_secs: float = 0.0, budget: float | None = None, durable_secs: float = 0.0
) -> Interval:
    """Young's optimum, unless an overhead budget or the duration of a save makes it longer.

    Args:
        save_secs: C, for how long one save keeps training from training.
        mtbf_secs: M, mean time between failures of the whole job.
        restart_secs: R, as for :func:`waste`.
        budget: share of the time that saves may take; None: any.
        durable_secs: from the beginning of a save until it is durable, beside training. No save begins before the last one has ended, and a
            failure loses that time as well.

    Raises:
        InvalidOptionError: an argument is out of range.
    """
    optimum = young_interval(save_secs, mtbf_secs)
    durable = check_secs("durable_secs", durable_secs, may_be_zero=True)
    restart = check_secs("restart_secs", restart_secs, may_be_zero=True) + durable
    shortest = None if budget is None else save_secs / check_share("budget", budget)
    secs = max(optimum, durable, shortest or 0.0)

    def shares(interval_secs: float) -> tuple[float, float]:
        if interval_secs == 0:  # a save that costs nothing
            return 0.0, restart / mtbf_secs
        wasted = waste(interval_secs, save_secs=save_secs, mtbf_secs=mtbf_secs, restart_secs=restart)
        return save_secs / interval_secs, wasted

    overhead, wasted = shares(secs)
    optimum_overhead, optimum_waste = shares(optimum)
    return Interval(
        secs=secs,
        optimum_secs=optimum,
        budget_secs=shortest,
        overhead=overhead,
        waste=wasted,
        optimum_overhead=optimum_overhead,
        optimum_waste=optimum_waste,
        lost_secs=secs / 2 + restart,
        budget=budget,
    )
