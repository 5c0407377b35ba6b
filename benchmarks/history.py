"""The figures of full runs, one small JSON file a run, and what several runs together say: a ratio holds when it holds in three."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Claim, RowResult

__all__ = ["RUNS", "Run", "git_state", "load_runs", "measured_in", "save_run", "verdict"]

RUNS = 3
"""Runs in which a figure must hold."""

_SAME = ("cpu", "cores", "torch")
"""What two machines must share for their figures to stand side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's figures.

    Attributes:
        date: UTC, RFC 3339, to the second.
        code: what was measured: see :func:`git_state`.
        machine: see :func:`benchmarks.machine.describe`.
        options: of the command line, without folders.
        figures: row -> a claim's text -> what was measured; None where it could not be.
    """

    date: str
    code: str
    machine: dict[str, Any]
    options: dict[str, Any]
    figures: dict[str, dict[str, float | None]]

    @classmethod
    def of(cls, rows: Sequence[RowResult], *, date: str, code: str, machine: dict[str, Any], options: dict[str, Any]) -> Run:
        """From what was measured."""
        figures = {row.name: {claim.text: claim.measured for claim in row.claims} for row in rows}
        return cls(date=date, code=code, machine=machine, options=options, figures=figures)

    def is_like(self, other: Run) -> bool:
        """Same kind of machine, same torch, same threads: figures may be compared."""
        same_machine = all(self.machine.get(name) == other.machine.get(name) for name in _SAME)
        return same_machine and self.options.get("threads") == other.options.get("threads")


def measured_in(runs: Sequence[Run], row: str, claim: str) -> list[float]:
    """A figure in the last :data:`RUNS` runs that measured it, oldest first."""
    known = [value for run in runs if (value := run.figures.get(row, {}).get(claim)) is not None]
    return known[-RUNS:]


def verdict(claim: Claim, values: Sequence[float]) -> str:
    """Whether a figure holds in all of its last runs, and by how much its median run is short where it does not.

    Args:
        claim: bound and direction.
        values: what at most :data:`RUNS` runs measured.
    """
    if not values:
        return "not measured"
    held = sum(value <= claim.reach if claim.at_most else value >= claim.reach for value in values)
    runs = f"{held} run{'s' if held != 1 else ''} of {len(values)}"
    if held == len(values):
        return "**holds**" if held >= RUNS else f"holds in {runs}"
    middle = statistics.median(values)
    if not claim.reach:  # nothing is to grow: there is no share of it
        return f"holds in {runs}; over by {middle:.3g}"
    short = middle / claim.reach - 1 if claim.at_most else 1 - middle / claim.reach
    return f"holds in {runs}" + (f"; short by {short:.0%}" if short >= 0.005 else "")


def load_runs(folder: str) -> list[Run]:
    """All runs of a folder, oldest first; none where there is no folder."""
    if not os.path.isdir(folder):
        return []
    runs = []
    for name in os.listdir(folder):
        if name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                runs.append(Run(**json.load(file)))
    return sorted(runs, key=lambda run: run.date)


def save_run(run: Run, folder: str) -> str:
    """Adds a run as a file of its own, so that runs of two branches never conflict.

    Returns:
        Its path.

    Raises:
        FileExistsError: there is a run of that second.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{run.date.replace(':', '')}.json")
    document = {name: getattr(run, name) for name in Run.__dataclass_fields__}
    with open(path, "x", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    return path


def git_state(folder: str) -> str:
    """The commit that is measured, ``+ changes`` where files differ from it; ``unknown`` outside a repository or without git."""
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" + changes" if changed else "")


def _git(folder: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout.strip()
