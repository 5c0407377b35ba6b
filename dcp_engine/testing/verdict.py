"""Judges the legs of a run under test, one after the other, against the run that never stopped. Pure: no I/O and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcp_engine.testing.compare import Row, compare_ranks, rank_local
from dcp_engine.testing.records import StepRecord
from dcp_engine.testing.report import LegReport, Problem, ResumeReport, StraightRun
from dcp_engine.testing.samples import Boundary, all_samples, boundaries
from dcp_engine.testing.stops import LegPlan

__all__ = ["Verdict"]

_Ranks = Sequence[Sequence[StepRecord]]
_BySteps = Mapping[int, tuple[StepRecord, ...]]


class Verdict:
    """Takes the legs in their order and finds what differs first.

    Args:
        straight: the run that never stopped.
        tolerance: relative, for loss and gradient norm once the topology has been another.

    Thread-safety: none.
    """

    def __init__(self, straight: StraightRun, *, tolerance: float) -> None:
        self._straight = straight
        self._tolerance = tolerance
        self._idle = _idle_generators(straight.records)
        self._expected = self._by_step(straight.records)
        self._legs: list[LegReport] = []
        self._steps: list[_BySteps] = []
        self._rows: list[Row] = []
        self._problems: list[Problem] = []
        self._not_compared: dict[str, None] = {}

    @property
    def holds(self) -> bool:
        """Nothing differs so far."""
        return not self._problems

    def add(self, plan: LegPlan, records: _Ranks, *, exit_statuses: tuple[int, ...] = ()) -> None:
        """Judges the next leg.

        Args:
            plan: of it.
            records: of each of its ranks, in order.
            exit_statuses: for the report.
        """
        steps = self._by_step(records)
        leg = self._leg(plan, records, steps, exit_statuses)
        self._problems += self._of_progress(plan, records, leg)
        rows = [self._row(plan, leg, self._expected[step], steps[step]) for step in sorted(steps) if step in self._expected]
        self._legs.append(leg)
        self._steps.append(steps)
        self._rows += rows
        first = next((row for row in rows if row.fault is not None), None)
        if first is not None:
            self._problems.append(_of_row(first))
        for boundary in self._boundaries():
            if boundary.leg == plan.name and (boundary.repeated or boundary.lost):
                self._problems.append(_of_boundary(boundary))

    def report(self) -> ResumeReport:
        """What was found so far."""
        return ResumeReport(
            straight=self._straight,
            legs=tuple(self._legs),
            rows=tuple(self._rows),
            boundaries=self._boundaries(),
            problems=tuple(self._problems),
            not_compared=tuple(self._not_compared),
        )

    def _row(self, plan: LegPlan, leg: LegReport, expected: tuple[StepRecord, ...], found: tuple[StepRecord, ...]) -> Row:
        if not plan.bitwise:
            self._not_compared.update(dict.fromkeys(rank_local(expected)))
        return compare_ranks(
            expected,
            found,
            leg=plan.name,
            layout=leg.layout,
            bitwise=plan.bitwise,
            tolerance=self._tolerance,
            is_first=plan.resumes and found[0].step == leg.first_step,
        )

    def _leg(self, plan: LegPlan, records: _Ranks, steps: _BySteps, exit_statuses: tuple[int, ...]) -> LegReport:
        first, last = min(steps, default=None), max(steps, default=None)
        begin = min(self._expected)
        resumed_from = None if not plan.resumes or first is None else 0 if first == begin else first - 1
        before = self._legs[-1].last_step if self._legs else None
        times = [record.at_secs for record in records[0] if record.step in steps]
        return LegReport(
            name=plan.name,
            layout=str(plan.layout),
            end=plan.title,
            resumed_from=resumed_from,
            first_step=first,
            last_step=last,
            redone=0 if resumed_from is None or before is None else max(0, before - resumed_from),
            steps_per_sec=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None,
            exit_statuses=exit_statuses,
        )

    def _of_progress(self, plan: LegPlan, records: _Ranks, leg: LegReport) -> list[Problem]:
        """Whether the leg began where it had to and trained every step once, and, if it is the last, came to the end."""
        problems = []
        starts = {rank: mine[0].step for rank, mine in enumerate(records) if mine}
        if len(set(starts.values())) > 1:
            problems.append(Problem(part="progress", text=f"ranks of {plan.name} began at different steps", leg=plan.name, found=starts))
        for rank, mine in enumerate(records):
            trained = [record.step for record in mine]
            if trained and trained != list(range(trained[0], trained[0] + len(trained))):
                text = f"rank {rank} of {plan.name} did not train one step after the other"
                problems.append(Problem(part="progress", text=text, leg=plan.name, rank=rank, found=_span(trained)))
        if not problems:
            text = self._start_fault(plan, leg) or self._end_fault(plan, leg)
            if text:
                problems.append(Problem(part="progress", text=text, leg=plan.name, step=leg.first_step))
        return problems

    def _start_fault(self, plan: LegPlan, leg: LegReport) -> str:
        if leg.first_step is None:
            return ""
        if not plan.resumes:
            begin = min(self._expected)
            return "" if leg.first_step == begin else f"{plan.name} began at step {leg.first_step} instead of {begin}"
        assert leg.resumed_from is not None
        before = self._legs[-1].last_step if self._legs else None
        if plan.resumes_at is not None and leg.resumed_from != plan.resumes_at:
            return f"{plan.name} went on from step {leg.resumed_from} instead of {plan.resumes_at}"
        if plan.resumes_at is None and leg.resumed_from == 0:
            return f"{plan.name} began afresh: nothing was resumed"
        if before is not None and leg.resumed_from > before:
            return f"{plan.name} went on from step {leg.resumed_from}, and only {before} were trained"
        return ""

    def _end_fault(self, plan: LegPlan, leg: LegReport) -> str:
        end = max(self._expected)
        if plan.stops or leg.last_step == end:
            return ""
        return f"{plan.name} ended at step {leg.last_step} instead of {end}"

    def _by_step(self, records: _Ranks) -> dict[int, tuple[StepRecord, ...]]:
        """The steps that all ranks have trained: step -> the record of each rank, without generators that are idle."""
        ranks = [{record.step: self._without_idle(record) for record in mine} for mine in records]
        common = set.intersection(*(set(mine) for mine in ranks)) if ranks else set()
        return {step: tuple(mine[step] for mine in ranks) for step in sorted(common)}

    def _without_idle(self, record: StepRecord) -> StepRecord:
        return replace(record, generators={name: state for name, state in record.generators.items() if name not in self._idle})

    def _boundaries(self) -> tuple[Boundary, ...]:
        straight = _samples(self._expected)
        legs = [(leg.name, leg.resumed_from or 0, _samples(steps)) for leg, steps in zip(self._legs, self._steps, strict=True)]
        if straight is None or any(samples is None for _, _, samples in legs):
            return ()
        return boundaries(straight, [(name, step, samples or {}) for name, step, samples in legs])


def _idle_generators(records: _Ranks) -> frozenset[str]:
    """The global generators that training never draws from: what state they are in has no effect, and need not be saved."""
    names = {name for mine in records for record in mine for name in record.generators}
    return frozenset(name for name in names if all(len({record.generators.get(name) for record in mine}) == 1 for mine in records))


def _samples(steps: _BySteps) -> dict[int, tuple[int, ...]] | None:
    """Step -> samples of all ranks; None where a step has none, or no ids."""
    samples = {step: all_samples([record.batch for record in ranks]) for step, ranks in steps.items()}
    together = {step: batch for step, batch in samples.items() if isinstance(batch, tuple)}
    return together if len(together) == len(samples) else None


def _of_row(row: Row) -> Problem:
    also = f" (so do, as effects most likely: {', '.join(row.also)})" if row.also else ""
    return Problem(
        part=row.fault or "",
        text=f"step {row.step} of {row.leg} on {row.layout} differs from the run that never stopped: {row.reason}{also}",
        leg=row.leg,
        step=row.step,
        rank=row.rank,
        expected=row.expected,
        found=row.found,
    )


def _of_boundary(boundary: Boundary) -> Problem:
    return Problem(
        part="data",
        text=f"{boundary.leg} took {len(boundary.repeated)} samples twice and left {len(boundary.lost)} out where it went on",
        leg=boundary.leg,
        step=boundary.step,
        expected="0 twice, 0 lost",
        found=f"twice {list(boundary.repeated[:8])}, lost {list(boundary.lost[:8])}",
    )


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]} ({len(steps)} steps)"
