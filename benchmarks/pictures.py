"""Pictures of a row: a bar a system with the rounds' spread, and a line where the work grows."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.results import CaseResult, RowResult

__all__ = ["draw"]

_COLOURS = {"ours": "0.15", "dcp": "0.55", "peer": "0.8", "limit": "white"}
_MARKERS = ("o", "s", "^", "x", "D", "v", "+")


def draw(row: RowResult, folder: str) -> str:
    """Writes ``<row>.png`` into the folder.

    Returns:
        Its path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = [case for case in row.cases if any(system.secs for system in case.systems)]
    lines = _lines(cases)
    num = len(cases) + bool(lines)
    heights = [0.9 + 0.28 * sum(bool(system.secs) for system in case.systems) for case in cases] + ([4.0] if lines else [])
    figure = Figure(figsize=(9, sum(heights) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, num), 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for case, axis in zip(cases, axes, strict=False):
        _bars(axis, case)
    if lines:
        _growth(axes[-1], lines)
    figure.suptitle(f"{row.name}: {row.title}")
    path = os.path.join(folder, f"{row.name}.png")
    figure.savefig(path, dpi=110)
    return path


def _bars(axis: Any, case: CaseResult) -> None:
    """Speed where bytes are moved, seconds elsewhere; the whisker spans all rounds."""
    systems = [system for system in case.systems if system.secs][::-1]
    for place, system in enumerate(systems):
        time = system.time
        assert time is not None
        low, middle, high = (time.low, time.median, time.high)
        if case.nbytes:
            low, middle, high = (case.nbytes / secs / 1e9 for secs in (time.high, time.median, time.low))
        axis.barh(place, middle, color=_COLOURS[system.role], edgecolor="black", linewidth=0.7)
        axis.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=3, linewidth=1)
    axis.set_yticks(range(len(systems)), [system.name for system in systems], fontsize=8)
    axis.set_xlabel("GB/s" if case.nbytes else "seconds", fontsize=8)
    axis.set_xlim(left=0)
    axis.set_title(case.name, fontsize=9, loc="left")


def _lines(cases: list[CaseResult]) -> dict[str, list[tuple[float, float]]]:
    """System -> (chunks, seconds), where a row's cases are sizes of one work."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        for system in case.systems:
            chunks = system.fact("chunks")
            if chunks and system.time is not None:
                found.setdefault(system.name, []).append((chunks, system.time.median))
    return {name: points for name, points in found.items() if len(points) > 1}


def _growth(axis: Any, lines: dict[str, list[tuple[float, float]]]) -> None:
    for (name, points), marker in zip(lines.items(), _MARKERS, strict=False):
        axis.plot(*zip(*points, strict=True), color="black", linewidth=0.8, marker=marker, markerfacecolor="none", label=name)
    first = next(iter(lines.values()))
    axis.plot(
        [first[0][0], first[-1][0]],
        [first[0][1], first[0][1] * first[-1][0] / first[0][0]],
        color="0.6",
        linestyle=":",
        label="linear growth",
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("chunks", fontsize=8)
    axis.set_ylabel("coordinator's seconds", fontsize=8)
    axis.legend(fontsize=8)
