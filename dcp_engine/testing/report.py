"""The outcome of a comparison: what was run, what differs, and a table for people. No I/O and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_engine.errors import ResumeMismatchError
from dcp_engine.testing.compare import Row
from dcp_engine.testing.records import StepRecord
from dcp_engine.testing.samples import Boundary
from dcp_engine.testing.stops import Layout

__all__ = ["LegReport", "Problem", "ResumeReport", "StraightRun", "rows_to_show"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StraightRun:
    """The run that never stopped, for further comparisons with it.

    Attributes:
        layout: of its ranks.
        seed: that it began with.
        records: of each rank, in order.
    """

    layout: Layout
    seed: int
    records: tuple[tuple[StepRecord, ...], ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReport:
    """One leg of the run under test.

    Attributes:
        name: of it.
        layout: in words.
        end: how it ended, in words.
        resumed_from: step of the checkpoint that it went on from, 0 for a fresh start; None for the first leg.
        first_step: that it trained; None if it trained none.
        last_step: that it trained on all ranks.
        redone: steps that it trained again, because the checkpoint was older than the stop.
        steps_per_sec: throughput from its first step to its last; None with fewer than two. Reported, and never judged.
        exit_statuses: of its ranks; negative: the number of the signal that it died of.
    """

    name: str
    layout: str
    end: str
    resumed_from: int | None
    first_step: int | None
    last_step: int | None
    redone: int
    steps_per_sec: float | None
    exit_statuses: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        part: of the state, see :class:`~dcp_engine.testing.compare.Fault`.
        text: what is wrong, in words.
        leg: in which it was seen.
        step: likewise; None where it is in none.
        rank: likewise.
        expected: what had to be.
        found: what was.
    """

    part: str
    text: str
    leg: str
    step: int | None = None
    rank: int | None = None
    expected: object = None
    found: object = None

    def __str__(self) -> str:
        return f"{self.part}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What a comparison found.

    Attributes:
        straight: the run that never stopped.
        legs: of the run under test that have run; the first with a problem is the last.
        rows: every step of every leg, in the order in which they ran.
        boundaries: samples on both sides of each stop; none where the run records no sample ids.
        problems: what is wrong, causes before effects; the runs are equal if there is none.
        not_compared: what could not be held against the straight run on another topology, since it differs between ranks.
    """

    straight: StraightRun
    legs: tuple[LegReport, ...]
    rows: tuple[Row, ...] = field(repr=False)
    boundaries: tuple[Boundary, ...]
    problems: tuple[Problem, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """The run under test was what the run without a stop was."""
        return not self.problems

    @property
    def what(self) -> str | None:
        """The part of the state that differs first; None if there is none."""
        return self.problems[0].part if self.problems else None

    def raise_if_different(self) -> None:
        """Does nothing where the runs are equal.

        Raises:
            ResumeMismatchError: names what differs first, and where.
        """
        if self.holds:
            return
        first = self.problems[0]
        raise ResumeMismatchError(
            "\n".join([f"the resumed run is another one: {first}", *self.lines()]),
            what=first.part,
            report=self,
            step=first.step,
            rank=first.rank,
            expected=first.expected,
            found=first.found,
        )

    def lines(self) -> list[str]:
        """Tables of legs, steps and boundaries, and what is wrong, one line each."""
        lines = _table(
            ("leg", "layout", "steps", "from", "redone", "steps/s", "end"),
            [
                (
                    leg.name,
                    leg.layout,
                    f"{leg.first_step}-{leg.last_step}" if leg.first_step is not None else "none",
                    "-" if leg.resumed_from is None else str(leg.resumed_from),
                    str(leg.redone),
                    "-" if leg.steps_per_sec is None else f"{leg.steps_per_sec:.1f}",
                    leg.end,
                )
                for leg in self.legs
            ],
        )
        lines += _table(
            ("step", "leg", "loss", "straight", "difference", "allowed", "differs"),
            [
                (
                    str(row.step),
                    row.leg,
                    f"{row.loss:.6g}",
                    f"{row.reference_loss:.6g}",
                    f"{row.loss_difference:.0e}" if row.loss_difference else "0",
                    f"{row.tolerance:.0e}" if row.tolerance else "0",
                    ", ".join([row.fault, *row.also]) if row.fault else "",
                )
                for row in rows_to_show(self.rows)
            ],
        )
        for one in self.boundaries:
            lines.append(
                f"samples around step {one.step}: {one.num_before} before and {one.num_after} after; {len(one.repeated)} taken twice,"
                f" {len(one.lost)} lost"
            )
        lines += [f"not compared, since it differs between ranks: {name}" for name in self.not_compared]
        return lines + [f"differs: {problem}" for problem in self.problems]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def rows_to_show(rows: Sequence[Row]) -> list[Row]:
    """A leg's first step, its last and its worst; every one with a fault at the start of a leg's trouble. Order is kept."""
    shown: list[Row] = []
    for leg in dict.fromkeys(row.leg for row in rows):
        mine = [row for row in rows if row.leg == leg]
        wanted = {mine[0].step, mine[-1].step, max(mine, key=lambda row: row.loss_difference).step}
        wanted.update(row.step for row in [row for row in mine if row.fault is not None][:3])
        wanted.update(row.step for row in mine[:: max(1, len(mine) // 4)])
        shown.extend(row for row in mine if row.step in wanted)
    return shown


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [headings, *rows]]
