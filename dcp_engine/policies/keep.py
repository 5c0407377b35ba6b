"""What to keep: for each step whether it stays, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies.checked import check_count, check_flag, check_name

__all__ = ["Best", "Keep", "KeepDecision", "KeepPlan", "StepFacts", "plan_keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best steps by a metric.

    Attributes:
        metric: its name.
        mode: ``"min"``: the least value is the best. ``"max"``: the greatest.
        num: how many steps.

    Raises:
        InvalidOptionError: an option is out of range.
    """

    metric: str
    mode: str = "min"
    num: int = 1

    def __post_init__(self) -> None:
        check_name("metric", self.metric)
        if self.mode not in ("min", "max"):
            raise InvalidOptionError("mode says what is better", expected='"min" or "max"', found=repr(self.mode)[:300])
        check_count("num", self.num)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What stays: each rule keeps what it names, and what no rule names goes.

    ::

        Keep(last=5)
        Keep(last=5, every=10_000, daily=True, best=Best(metric="eval_loss", num=3), pinned={120_000})

    Whatever the rules say, these stay: the newest step that a run can come back to; the newest of those that are healthy; the newest of
    those that are healthy and verified; what is being read; what is not durable yet; what this release cannot read. And nothing goes
    before a newer step is durable that is at least as healthy.

    Attributes:
        last: the newest steps, at least 1, since the newest is what a run comes back to. Those that hold a part of the state only are
            counted apart, and named by no other rule but ``pinned``.
        every: multiples of this number, for ever.
        daily: the last of each UTC day, for ever. One whose day is unknown stays.
        best: steps by a metric.
        pinned: these, for ever, damaged or not.
        verified: nothing goes before a newer step was read back and found whole. Each save is read back for that, beside training.

    Raises:
        InvalidOptionError: an option is out of range.
    """

    last: int = 1
    every: int | None = None
    daily: bool = False
    best: Best | None = None
    pinned: Collection[int] = ()
    verified: bool = False

    def __post_init__(self) -> None:
        check_count("last", self.last, why="the newest good step is never deleted: it is what a run comes back to")
        if self.every is not None:
            check_count("every", self.every)
        check_flag("daily", self.daily)
        check_flag("verified", self.verified)
        if self.best is not None and not isinstance(self.best, Best):
            raise InvalidOptionError("best is no metric", expected='as in Best(metric="loss", num=3)', found=repr(self.best)[:300])
        if isinstance(self.pinned, str | Mapping) or not isinstance(self.pinned, Collection):
            raise InvalidOptionError("pinned holds no steps", expected="as in {30, 60}", found=repr(self.pinned)[:300])
        for step in self.pinned:
            check_count("a pinned step", step, minimum=0)
        object.__setattr__(self, "pinned", frozenset(self.pinned))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of one step.

    Attributes:
        step: its number.
        saved_at: when; None where that is unknown.
        is_durable: it is published, and safe from a loss of power.
        is_damaged: something of it is missing or wrong, so that nobody comes back to it.
        is_readable: this release can tell what it is; one of a newer release is left alone.
        is_partial: it holds a part of the state only.
        is_read: somebody reads or copies it.
        is_healthy: None where nothing was said of it.
        is_verified: all of it was read, and is whole. None where nobody has read it.
        is_pinned: it was saved as a milestone.
        metrics: name -> number.
    """

    step: int
    saved_at: datetime | None = None
    is_durable: bool = True
    is_damaged: bool = False
    is_readable: bool = True
    is_partial: bool = False
    is_read: bool = False
    is_healthy: bool | None = None
    is_verified: bool | None = None
    is_pinned: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether a run can come back to it."""
        return self.is_durable and self.is_readable and not self.is_partial and not self.is_damaged and self.is_verified is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepDecision:
    """What becomes of one step.

    Attributes:
        step: its number.
        keep: whether it stays.
        reasons: why, in words; at least one.
    """

    step: int
    keep: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"step {self.step}: {'stays' if self.keep else 'goes'}: {', '.join(self.reasons)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPlan:
    """What becomes of all steps.

    Attributes:
        decisions: by step, ascending.
    """

    decisions: tuple[KeepDecision, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """Steps that stay, ascending."""
        return tuple(decision.step for decision in self.decisions if decision.keep)

    @property
    def surplus(self) -> tuple[int, ...]:
        """Steps that go, ascending."""
        return tuple(decision.step for decision in self.decisions if not decision.keep)

    def __str__(self) -> str:
        return "\n".join(map(str, self.decisions)) or "there are no steps"


def plan_keep(keep: Keep, steps: Iterable[StepFacts]) -> KeepPlan:
    """What becomes of each step, and why. Pure.

    Args:
        keep: the rules.
        steps: all that there are, in any order; each once.

    Raises:
        InvalidOptionError: a step is there twice.
    """
    facts = sorted(steps, key=lambda one: one.step)
    if len({one.step for one in facts}) != len(facts):
        raise InvalidOptionError("a step is there twice", expected="each step once", found=[one.step for one in facts])
    reasons: dict[int, list[str]] = {one.step: [] for one in facts}
    for named in (_protected(facts), _by_rules(keep, facts)):
        for step, reason in named:
            reasons[step].append(reason)
    decisions = []
    for place, one in enumerate(facts):
        why = tuple(reasons[one.step])
        if why:
            decisions.append(KeepDecision(step=one.step, keep=True, reasons=why))
        elif not any(_may_replace(newer, one, keep) for newer in facts[place + 1 :]):
            newer = "durable and verified" if keep.verified else "durable"
            decisions.append(KeepDecision(step=one.step, keep=True, reasons=(f"no newer step of its worth is {newer}",)))
        else:
            decisions.append(KeepDecision(step=one.step, keep=False, reasons=("no rule names it",)))
    return KeepPlan(decisions=tuple(decisions))


def _protected(facts: Sequence[StepFacts]) -> list[tuple[int, str]]:
    """What stays whatever the rules say."""
    named = []
    for one in facts:
        if not one.is_durable:
            named.append((one.step, "not durable yet"))
        if not one.is_readable:
            named.append((one.step, "a newer release wrote it"))
        if one.is_read:
            named.append((one.step, "being read"))
    good = [one for one in facts if one.is_good]
    healthy = _healthiest(good)
    newest = (
        (good, "the newest good step"),
        (healthy, "the last healthy step"),
        ([one for one in healthy if one.is_verified], "the last healthy verified step"),
    )
    named.extend((some[-1].step, reason) for some, reason in newest if some)
    return named


def _healthiest(good: Sequence[StepFacts]) -> list[StepFacts]:
    """Those that are healthy; where none is known to be, those of which nothing else is known."""
    return [one for one in good if one.is_healthy] or [one for one in good if one.is_healthy is None]


def _by_rules(keep: Keep, facts: Sequence[StepFacts]) -> list[tuple[int, str]]:
    """What the rules name."""
    named = [(one.step, "pinned") for one in facts if one.is_pinned or one.step in keep.pinned]
    sound = [one for one in facts if one.is_durable and one.is_readable and not one.is_damaged and one.is_verified is not False]
    for is_partial in (False, True):
        newest = [one.step for one in sound if one.is_partial == is_partial][-keep.last :]
        named.extend((step, f"one of the last {keep.last}") for step in newest)
    whole = [one for one in sound if not one.is_partial]
    if keep.every is not None:
        named.extend((one.step, f"a multiple of {keep.every}") for one in whole if one.step % keep.every == 0)
    if keep.daily:
        days = {_day(one.saved_at): one.step for one in whole if one.saved_at is not None}
        named.extend((step, f"the last of {day}") for day, step in days.items())
        named.extend((one.step, "its day is unknown") for one in whole if one.saved_at is None)
    if keep.best is not None:
        named.extend(_best(keep.best, whole))
    return named


def _day(saved_at: datetime) -> str:
    return saved_at.astimezone(UTC).date().isoformat() if saved_at.tzinfo else saved_at.date().isoformat()


def _best(best: Best, facts: Sequence[StepFacts]) -> list[tuple[int, str]]:
    values = {one.step: one.metrics[best.metric] for one in facts if not math.isnan(one.metrics.get(best.metric, math.nan))}
    sign = 1 if best.mode == "min" else -1
    order = sorted(values, key=lambda step: (sign * values[step], -step))  # of equally good ones the newest
    return [(step, f"one of the {best.num} best by {best.metric}: {values[step]:g}") for step in order[: best.num]]


def _may_replace(newer: StepFacts, older: StepFacts, keep: Keep) -> bool:
    """Whether the older may go for the newer: who goes back to it loses nothing but time."""
    return newer.is_good and (bool(newer.is_verified) or not keep.verified) and _worth(newer) >= _worth(older)


def _worth(one: StepFacts) -> int:
    if not one.is_good:
        return 0
    return {False: 0, None: 1, True: 2}[one.is_healthy]
