"""The proof: every step of the run under test is held against the run that never stopped. No I/O and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_engine.demo.records import LegRecords, StepRecord
from dcp_engine.demo.schedule import Leg

__all__ = ["RELATIVE_TOLERANCE", "Comparison", "Crash", "Row", "compare", "relative_difference"]

RELATIVE_TOLERANCE = 1e-4
"""For loss and gradient norm once the layout has been another: sums in another order round differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step of one job of the run under test, against the reference.

    Attributes:
        leg: name of the job.
        layout: how the model lay over its ranks.
        step: training step.
        loss: of the run under test.
        reference_loss: of the run that never stopped.
        loss_difference: relative; 0 means equal bit for bit.
        grad_norm_difference: relative; 0 means equal bit for bit.
        tolerance: largest relative difference of loss and gradient norm that is allowed; 0 demands equal bits.
        fault: part of the state that differs first in this row (``data``, ``rng``, ``scheduler``, ``model``, ``optimizer``); None if none.
        reason: what the fault shows, in words; empty without one.
    """

    leg: str
    layout: str
    step: int
    loss: float
    reference_loss: float
    loss_difference: float
    grad_norm_difference: float
    tolerance: float
    fault: str | None
    reason: str


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
    bit while neither the layout nor any earlier one was another than the reference's, else within :data:`RELATIVE_TOLERANCE`. Demanded
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
    expected = reference[record.step]
    tolerance = 0.0 if leg.bitwise else RELATIVE_TOLERANCE
    fault, reason = _fault(record, expected, tolerance=tolerance, is_first=leg.resumed_from is not None and record.step == leg.first_step)
    return Row(
        leg=leg.name,
        layout=layout,
        step=record.step,
        loss=record.loss,
        reference_loss=expected.loss,
        loss_difference=relative_difference(record.loss, expected.loss),
        grad_norm_difference=relative_difference(record.grad_norm, expected.grad_norm),
        tolerance=tolerance,
        fault=fault,
        reason=reason,
    )


def _fault(record: StepRecord, expected: StepRecord, *, tolerance: float, is_first: bool) -> tuple[str | None, str]:
    """What differs first, in the order of cause and effect: a wrong batch changes the loss, so the loss is asked last."""
    if record.documents != expected.documents:
        return "data", "another place in the data"
    if record.draws != expected.draws:
        return "rng", "other random numbers were drawn"
    if record.lr != expected.lr:
        return "scheduler", f"learning rate {record.lr:.6g} instead of {expected.lr:.6g}"
    if record.tokens != expected.tokens:
        return "data", "the text itself is another"
    for name, found, wanted in (("loss", record.loss, expected.loss), ("gradient norm", record.grad_norm, expected.grad_norm)):
        difference = relative_difference(found, wanted)
        if not difference <= tolerance:
            # The first step of a resumed job is computed before the optimizer has moved anything: only the weights can be wrong there.
            return "model" if is_first else "optimizer", f"{name} {found:.8g} instead of {wanted:.8g}, {difference:.1e} relative"
    return None, ""


def relative_difference(found: float, expected: float) -> float:
    """``(found - expected) / expected`` without its sign; exactly 0 for equal values, NaN where either is NaN."""
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else float("inf")
