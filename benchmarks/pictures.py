"""Pictures of a row: a bar a system with the rounds' spread, and a line a system where the work grows."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.results import CaseResult, Role, RowResult

__all__ = ["draw"]

_COLOURS: dict[Role, str] = {"ours": "#0072b2", "dcp": "#e69f00", "peer": "0.8", "limit": "white"}
_ROLES: dict[Role, str] = {"ours": "dcp-engine", "dcp": "DCP", "peer": "other peers", "limit": "plain system calls"}
_NOT_COMPARABLE = "////"
_MARKERS = ("o", "s", "^", "x", "D", "v", "+", "<", ">", "*", "p", "h")
_FACTS_THAT_GROW = {"open_secs": "open, one rank", "load_plan_secs": "load plan, one rank"}


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
    heights = [0.75 + 0.24 * sum(bool(system.secs) for system in case.systems) for case in cases] + ([4.0] if lines else [])
    figure = Figure(figsize=(9, sum(heights) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, num), 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for case, axis in zip(cases, axes, strict=False):
        _bars(axis, case)
    if lines:
        _growth(axes[-1], lines)
    figure.suptitle(f"{row.name}: {row.title}", fontsize=11)
    figure.legend(handles=_legend(cases), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{row.name}.png")
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})
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
        hatch = "" if system.comparable else _NOT_COMPARABLE
        axis.barh(place, middle, color=_COLOURS[system.role], edgecolor="black", linewidth=0.7, hatch=hatch)
        axis.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=3, linewidth=1)
        axis.annotate(f"{middle:.3g}", (high, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(systems)), [system.name for system in systems], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(x=0.1)
    axis.set_xlabel("GB/s" if case.nbytes else "seconds", fontsize=8)
    axis.set_xlim(left=0)
    axis.set_title(case.name, fontsize=9, loc="left")


def _legend(cases: list[CaseResult]) -> list[Any]:
    """A patch for every kind of bar that there is."""
    from matplotlib.patches import Patch

    systems = [system for case in cases for system in case.systems if system.secs]
    there = {system.role for system in systems}
    patches = [Patch(facecolor=_COLOURS[role], edgecolor="black", label=label) for role, label in _ROLES.items() if role in there]
    if not all(system.comparable for system in systems):
        patches.append(Patch(facecolor="white", edgecolor="black", hatch=_NOT_COMPARABLE, label="does less or other work"))
    return patches


def _lines(cases: list[CaseResult]) -> dict[tuple[str, Role], list[tuple[float, float]]]:
    """System and its role -> (chunks, seconds), where a row's cases are sizes of one work."""
    found: dict[tuple[str, Role], list[tuple[float, float]]] = {}
    for case in cases:
        for system in case.systems:
            chunks = system.fact("chunks")
            if chunks and system.time is not None:
                found.setdefault((system.name, system.role), []).append((chunks, system.time.median))
                for fact, label in _FACTS_THAT_GROW.items():
                    if value := system.fact(fact):
                        found.setdefault((f"{system.name}: {label}", system.role), []).append((chunks, value))
    return {key: points for key, points in found.items() if len(points) > 1}


def _growth(axis: Any, lines: dict[tuple[str, Role], list[tuple[float, float]]]) -> None:
    """Both axes are logarithmic: what grows as the work does is parallel to the dotted line."""
    for ((name, role), points), marker in zip(lines.items(), _MARKERS, strict=False):
        axis.plot(*zip(*points, strict=True), color=_COLOURS[role], marker=marker, markeredgecolor="black", label=name)
    (first, *_, last) = next(iter(lines.values()))
    axis.plot([first[0], last[0]], [first[1], first[1] * last[0] / first[0]], color="0.4", linestyle=":", label="linear growth")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("chunks (ranks x tensors)", fontsize=8)
    axis.set_ylabel("seconds, of the coordinator if nothing else is said", fontsize=8)
    axis.tick_params(which="both", labelsize=8)
    axis.grid(visible=True, color="0.9", linewidth=0.6)
    axis.legend(fontsize=7)
