"""What the demo found, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dcp_engine.demo.compare import Comparison, Crash
from dcp_engine.demo.records import LegRecords, SaveRecord
from dcp_engine.demo.schedule import DemoConfig, Leg
from dcp_engine.testing.compare import RELATIVE_TOLERANCE, Row
from dcp_engine.testing.report import rows_to_show

__all__ = ["Outcome", "print_outcome", "to_json", "write_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that the demo found.

    Attributes:
        config: what was asked for.
        out: folder of the run.
        legs: jobs that ran, with their records; the first is the reference.
        crash: how the killed job ended; None if it did not come to that.
        comparison: the proof.
        picture: PNG file with the loss curves.
        wall_secs: of everything.
    """

    config: DemoConfig
    out: Path
    legs: tuple[tuple[Leg, LegRecords], ...]
    crash: Crash | None
    comparison: Comparison
    picture: Path
    wall_secs: float

    @property
    def saves(self) -> tuple[tuple[str, SaveRecord], ...]:
        """Every published checkpoint with the name of the job that wrote it, in order of time."""
        return tuple((leg.name, save) for leg, records in self.legs for save in records.saves)


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The report as plain values; numbers that JSON cannot hold become their names."""
    comparison = outcome.comparison
    tree: dict[str, Any] = {
        "holds": comparison.holds,
        "fault": comparison.fault,
        "problems": list(comparison.problems),
        "relative_tolerance": RELATIVE_TOLERANCE,
        "wall_secs": outcome.wall_secs,
        "config": asdict(outcome.config),
        "crash": None if outcome.crash is None else asdict(outcome.crash),
        "legs": [
            {**asdict(leg), "start": None if records.start is None else asdict(records.start), "steps": [asdict(r) for r in records.steps]}
            for leg, records in outcome.legs
        ],
        "rows": [asdict(row) for row in comparison.rows],
        "saves": [{"leg": leg, **asdict(save), "ratio": save.raw_bytes / save.stored_bytes} for leg, save in outcome.saves],
        "checkpoints": str(outcome.out / "checkpoints"),
        "picture": str(outcome.picture),
    }
    plain: dict[str, Any] = _plain(tree)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, outcome: Outcome) -> None:
    """Writes :func:`to_json` to a file."""
    path.write_text(json.dumps(to_json(outcome), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Prints the tables, the verdict, and where to go from here."""
    rows = outcome.comparison.rows
    console.print(_step_table(rows))
    console.print(
        f"{len(rows)} steps were compared. Demanded of each: the same documents, random draws, learning rate and bytes as in the run that"
        " never stopped, exactly; the same loss and gradient norm, bit for bit (0) on the same layout with the same history, else within"
        f" {RELATIVE_TOLERANCE:g} relative. The largest differences were {_worst(rows, 'loss')} (loss) and {_worst(rows, 'grad_norm')}"
        " (gradient norm).\n",
        highlight=False,
    )
    console.print(_save_table(outcome.saves))
    if outcome.crash is not None and outcome.crash.rank is not None:
        _print_crash(console, outcome.crash)
    if outcome.comparison.holds:
        console.print(f"[bold]The proof holds[/bold] ({outcome.wall_secs:.0f} s).", highlight=False)
    else:
        named = f": {outcome.comparison.fault}" if outcome.comparison.fault else ""
        console.print(f"[bold]The proof fails{named}[/bold] ({outcome.wall_secs:.0f} s).", highlight=False)
        for problem in outcome.comparison.problems:
            console.print(f"  - {problem}", highlight=False, markup=False)
        if outcome.config.drop is not None:
            console.print(f"  {outcome.config.drop.value} was left out of the checkpoints on purpose (--drop).", highlight=False)
    _print_next(console, outcome)


def _step_table(rows: Sequence[Row]) -> Table:
    table = Table(
        box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title="Losses against the run that never stopped", title_justify="left"
    )
    for heading in ("step", "job", "layout"):
        table.add_column(heading, justify="right" if heading == "step" else "left", no_wrap=True)
    for heading in ("loss", "reference", "difference", "allowed"):
        table.add_column(heading, justify="right", no_wrap=True)
    if any(row.fault for row in rows):
        table.add_column("differs", no_wrap=True)
    before = ""
    for row in rows_to_show(rows):
        if before and row.leg != before:
            table.add_section()
        before = row.leg
        table.add_row(
            str(row.step),
            row.leg,
            row.layout,
            f"{row.loss:.5f}",
            f"{row.reference_loss:.5f}",
            _difference(row.loss_difference),
            _difference(row.tolerance),
            *([row.fault] if row.fault else []),
        )
    return table


def _worst(rows: Sequence[Row], name: str) -> str:
    return _difference(max((getattr(row, f"{name}_difference") for row in rows), default=0.0))


def _difference(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def _save_table(saves: Sequence[tuple[str, SaveRecord]]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title="Asynchronous saves", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("job")
    for heading in ("save time", "stall", "state", "stored", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for leg, save in saves:
        table.add_row(
            str(save.step),
            leg,
            f"{save.save_secs * 1e3:.0f} ms",
            f"{save.stall_secs * 1e3:.0f} ms",
            f"{save.raw_bytes / 1e6:.2f} MB",
            f"{save.stored_bytes / 1e6:.2f} MB",
            f"{save.raw_bytes / save.stored_bytes:.2f}",
        )
    return table


def _print_crash(console: Console, crash: Crash) -> None:
    console.print(
        f"Rank {crash.rank} was killed with SIGKILL when it had handed {crash.num_handed_over} of its {crash.num_tensors} tensors to the"
        f" writer. {_left_of(crash)}; complete were steps {', '.join(map(str, crash.complete_steps))}.",
        highlight=False,
    )


def _left_of(crash: Crash) -> str:
    """What is left of the attempt: all of it, where the other ranks were ended before they could remove it."""
    if not crash.leftovers:
        return "The other ranks learned of it and removed the attempt"
    num_bytes = sum(size for _, size in crash.leftovers)
    own = ", ".join(
        f"{os.path.basename(name)} with {size} bytes" for name, size in crash.leftovers if name.endswith(f"-{crash.rank:05d}.shard")
    )
    return (
        f"It left {own or 'no file'}. The attempt's {len(crash.leftovers)} files ({num_bytes / 1e6:.2f} MB) are still there and no reader"
        " takes them for a step"
    )


def _print_next(console: Console, outcome: Outcome) -> None:
    saves = outcome.saves
    if saves:
        newest = os.path.abspath(saves[-1][1].path)
        console.print(f"\nCheckpoint:  {newest}", highlight=False, soft_wrap=True, markup=False)
        console.print(f"Picture:     {outcome.picture.absolute()}", highlight=False, soft_wrap=True, markup=False)
        console.print(f"Report:      {(outcome.out / 'report.json').absolute()}", highlight=False, soft_wrap=True, markup=False)
        console.print("\nNext, look into the checkpoint:", highlight=False)
        code = f"import dcp_engine as d; m = d.ShardReader({newest!r}).read_metadata(); print(m.step, *m.state_dict_metadata, sep='\\n')"
        console.print(f'  {sys.executable} -c "{code}"', highlight=False, soft_wrap=True, markup=False)
    if outcome.config.drop is None:
        console.print("or leave a part of the state out and watch the proof fail:", highlight=False)
        program = shutil.which("dcp-engine") or f"{sys.executable} -m dcp_engine.cli"
        console.print(f"  {program} demo --drop rng", highlight=False, soft_wrap=True, markup=False)
