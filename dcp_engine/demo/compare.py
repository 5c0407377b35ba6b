"""The proof: the jobs of the run under test did what they had to, and each of their steps is that of the run that never stopped.

:mod:`dcp_engine.testing.compare` holds steps against each other. No I/O and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_engine.demo.records import LegRecords, StepRecord
from dcp_engine.demo.schedule import Leg
from dcp_engine.testing.compare import RELATIVE_TOLERANCE, Row, compare_step

__all__ = ["Comparison", "Crash", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """How the killed job ended.

    Attributes:
        rank: that killed itself with SIGKILL; None if none left word of having done so.
        num_tensors: tensors, or parts of them, that the rank had to hand to the writer.
        num_handed_over: how many it had handed over when it died.
        exit_status: of the job.
        leftovers: files of the attempt that was never published, relative to the folder of the checkpoints, with their sizes in bytes.
        complete_steps: what a reader saw afterwards.
    """

    rank: int | None
    num_tensors: int
    num_handed_over: int
    exit_status: int
    leftovers: tuple[tuple[str, int], ...]
    complete_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome.

    Attributes:
        rows: every step of every job of the run under test, in the order in which they ran.
        fault: part of the state that differs in the first row with a fault; None if there is none.
        problems: what is wrong, one sentence each; the proof holds if there is none.
    """

    rows: tuple[Row, ...]
    fault: str | None
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """The run under test was what the run without a stop was."""
        return not self.problems


def compare(reference: LegRecords, legs: Sequence[tuple[Leg, LegRecords]], crash: Crash | None) -> Comparison:
    """Holds jobs against the reference.

    Demanded of every step: the same documents, random draws, learning rate and bytes, exactly; the same loss and gradient norm, bit for
    bit while neither the layout nor any earlier one was another than the reference's, else within ``RELATIVE_TOLERANCE``. Demanded
    of every job: that it started from the checkpoint it had to, and trained and published every step of its share.

    Args:
        reference: of the run that never stopped.
        legs: the jobs of the run under test that have run, in their order.
        crash: how the killed job among them ended; None where none is to be killed.
    """
    by_step = {record.step: record for record in reference.steps}
    rows: list[Row] = []
    problems: list[str] = []
    for leg, records in legs:
        problems.extend(_coverage_problems(leg, records))
        if leg.die_at and crash is not None:
            problems.extend(_crash_problems(leg, crash))
        layout = records.start.layout if records.start is not None else ""
        rows.extend(_row(leg, layout, record, by_step) for record in records.steps if record.step in by_step)
    first = next((row for row in rows if row.fault is not None), None)
    if first is not None:
        problems.insert(0, f"{first.fault}: step {first.step} of the job {first.leg!r} differs from the reference: {first.reason}")
    return Comparison(rows=tuple(rows), fault=first.fault if first is not None else None, problems=tuple(problems))


def _coverage_problems(leg: Leg, records: LegRecords) -> list[str]:
    problems = []
    if records.start is None:
        return [f"the job {leg.name!r} never began to train"]
    if records.start.resumed_from != leg.resumed_from:
        found = "afresh" if records.start.resumed_from is None else f"from step {records.start.resumed_from}"
        problems.append(f"the job {leg.name!r} started {found}, but the newest complete step was {leg.resumed_from}")
    trained = [record.step for record in records.steps]
    last_step = leg.die_at or leg.last_step
    if trained[: leg.num_steps] != list(range(leg.first_step, last_step + 1)) or (not leg.die_at and len(trained) != leg.num_steps):
        problems.append(f"the job {leg.name!r} had to train steps {leg.first_step} to {last_step} and trained {_span(trained)}")
    published = [record.step for record in records.saves]
    due = [
        step
        for step in range(leg.first_step, last_step + 1)
        if leg.save_every and (step % leg.save_every == 0 or step == leg.last_step) and step != leg.die_at
    ]
    if published != due:
        problems.append(f"the job {leg.name!r} had to publish steps {due} and published {published}")
    return problems


def _crash_problems(leg: Leg, crash: Crash) -> list[str]:
    problems = []
    if crash.rank is None or crash.exit_status == 0:
        problems.append(f"no rank of the job {leg.name!r} was killed in the save of step {leg.die_at} (exit status {crash.exit_status})")
    due = tuple(range(leg.save_every, leg.die_at, leg.save_every))
    if crash.complete_steps != due:
        problems.append(f"after the crash the complete steps had to be {list(due)} and were {list(crash.complete_steps)}")
    return problems


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]} ({len(steps)} steps)" if steps else "none"


def _row(leg: Leg, layout: str, record: StepRecord, reference: Mapping[int, StepRecord]) -> Row:
    return compare_step(
        reference[record.step],
        record,
        leg=leg.name,
        layout=layout,
        tolerance=0.0 if leg.bitwise else RELATIVE_TOLERANCE,
        is_first=leg.resumed_from is not None and record.step == leg.first_step,
    )
