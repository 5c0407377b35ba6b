"""The loss curves as a picture that can be read without colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dcp_engine.demo.records import LegRecords, StepRecord
from dcp_engine.demo.schedule import Drop, Leg
from dcp_engine.testing.compare import RELATIVE_TOLERANCE, relative_difference

__all__ = ["draw_losses"]

_MARKERS = ("o", "x", "s", "^", "D")


def draw_losses(path: Path, legs: Sequence[tuple[Leg, LegRecords]], *, drop: Drop | None) -> None:
    """Draws the loss of every job over the steps, and below it the relative difference from the reference.

    Args:
        path: PNG file to write.
        legs: all jobs that ran; the first is the reference.
        drop: what was left out of the checkpoints.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = legs[0][1]
    worst = 0.0
    by_step = {record.step: _loss(record) for record in reference.steps}
    losses.plot(list(by_step), list(by_step.values()), color="0.75", linewidth=5, label="reference: never stops, 4 ranks")
    for (leg, records), marker in zip(legs[1:], _MARKERS, strict=False):
        steps = [record.step for record in records.steps]
        style = {"color": "black", "linewidth": 0.8, "marker": marker, "markersize": 5, "markerfacecolor": "none"}
        layout = f", {records.start.layout}" if records.start is not None else ""
        losses.plot(steps, [_loss(record) for record in records.steps], label=f"{leg.title}{layout}", **style)
        relative = [relative_difference(_loss(record), by_step[record.step]) for record in records.steps]
        worst = max([worst, *filter(math.isfinite, relative)])
        differences.plot(steps, relative, **style)
        if leg.die_at:
            for axes in (losses, differences):
                axes.axvline(leg.die_at, color="black", linestyle=":", linewidth=1.2)
            losses.annotate(
                f"killed in the save of step {leg.die_at}",
                (leg.die_at, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, -12),
                textcoords="offset points",
                fontsize=9,
            )
    dropped = f" ({drop.value} left out of the checkpoints)" if drop is not None else ""
    losses.set_title(f"One training run, killed and resumed on other topologies{dropped}")
    losses.set_ylabel("loss (nats per byte)")
    losses.legend(fontsize=9)
    # Linear below the smallest float32 difference, so that exact equality has a place: zero.
    differences.set_yscale("symlog", linthresh=1e-8)
    differences.set_ylim(0, max(10 * RELATIVE_TOLERANCE, 2 * worst))
    differences.axhline(RELATIVE_TOLERANCE, color="black", linestyle="--", linewidth=0.8)
    differences.annotate("allowed on another topology", (1, RELATIVE_TOLERANCE), xytext=(0, 3), textcoords="offset points", fontsize=9)
    differences.set_ylabel("relative difference of the loss")
    differences.set_xlabel("step")
    figure.savefig(path, dpi=130)


def _loss(record: StepRecord) -> float:
    return math.nan if record.loss is None else record.loss
