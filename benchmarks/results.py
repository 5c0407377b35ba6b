"""What a run found: the records that are written as JSON, and from which tables and pictures are made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.stats import Spread, ratio, spread

__all__ = ["CaseResult", "Claim", "Role", "RowResult", "SystemResult", "as_document"]

Role = Literal["ours", "dcp", "peer", "limit"]


@dataclass(slots=True, kw_only=True)
class SystemResult:
    """One system in one case.

    Attributes:
        name: of the system.
        role: ours, DCP, another peer, or a physical limit.
        secs: round -> seconds.
        facts: name -> round -> value of whatever else the system told (stored bytes, say).
        peak_bytes: memory that one run takes beyond the state and the targets, resident, mapped files included; None: not measured.
        comparable: does what the others do, so that it may be the best of its kind; a save that is not durable on disk is not.
        note: what a reader has to know.
        failure: why there is no figure; empty where there is one.
    """

    name: str
    role: Role
    secs: dict[int, float] = field(default_factory=dict)
    facts: dict[str, dict[int, float]] = field(default_factory=dict)
    peak_bytes: int | None = None
    comparable: bool = True
    note: str = ""
    failure: str = ""

    @property
    def time(self) -> Spread | None:
        """Seconds over the rounds."""
        return spread(self.secs.values()) if self.secs else None

    def fact(self, name: str) -> float | None:
        """Median of a fact; None where it was not told."""
        known = self.facts.get(name)
        return spread(known.values()).median if known else None


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """Systems that were measured against each other.

    Attributes:
        name: what was done and where.
        nbytes: bytes that one run moves, for GB/s; 0 where bytes are not the point.
        systems: in the order in which they ran.
    """

    name: str
    nbytes: int
    systems: list[SystemResult]

    def best(self, role: Role) -> SystemResult | None:
        """The comparable system of a role with the smallest median; None where none has a figure."""
        known = [system for system in self.systems if system.role == role and system.secs and system.comparable]
        return min(known, key=lambda system: spread(system.secs.values()).median, default=None)

    def named(self, name: str) -> SystemResult | None:
        """The system of that name, if it has a figure."""
        return next((system for system in self.systems if system.name == name and system.secs), None)

    def times_faster(self, than: SystemResult | None, ours: SystemResult | None = None) -> Spread | None:
        """How many times as long another system takes as ours, the best one if None: median and spread of the rounds' ratios."""
        ours = self.best("ours") if ours is None else ours
        return ratio(than.secs, ours.secs) if ours is not None and than is not None else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure to reach against what was measured.

    Attributes:
        text: what is compared: the same words in every run, which is how runs are put side by side.
        reach: the figure to reach.
        measured: what it is; None where it could not be measured.
        at_most: the figure is an upper bound.
        low: worst of the rounds, where there are rounds.
        high: best of the rounds.
        detail: what may differ from run to run: who was the best peer, say.
    """

    text: str
    reach: float
    measured: float | None
    at_most: bool = False
    low: float | None = None
    high: float | None = None
    detail: str = ""

    @property
    def holds(self) -> bool | None:
        """None: not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.reach if self.at_most else self.measured >= self.reach

    @classmethod
    def of_ratio(cls, text: str, reach: float, measured: Spread | None, *, at_most: bool = False, detail: str = "") -> Claim:
        """From the ratios of rounds."""
        if measured is None:
            return cls(text, reach, None, at_most=at_most, detail=detail)
        return cls(text, reach, measured.median, at_most=at_most, low=measured.low, high=measured.high, detail=detail)


@dataclass(slots=True, kw_only=True)
class RowResult:
    """One row of the figures to reach.

    Attributes:
        name: F1 and so on.
        title: the work.
        cases: what was measured.
        claims: the row's figures.
        notes: what a reader has to know.
        elapsed_secs: of everything.
    """

    name: str
    title: str
    cases: list[CaseResult]
    claims: list[Claim]
    notes: list[str]
    elapsed_secs: float


def as_document(rows: list[RowResult], machine: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The whole as plain containers for JSON: seconds of every round, so that others can compute other statistics."""
    document = [dataclasses.asdict(row) for row in rows]
    for row, plain in zip(rows, document, strict=True):
        for claim, entry in zip(row.claims, plain["claims"], strict=True):
            entry["holds"] = claim.holds
        for case, case_entry in zip(row.cases, plain["cases"], strict=True):
            for system, system_entry in zip(case.systems, case_entry["systems"], strict=True):
                system_entry["median_secs"] = system.time.median if system.time else None
    return {"machine": machine, "options": options, "rows": document}
