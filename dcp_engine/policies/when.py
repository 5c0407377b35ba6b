"""When to save: by steps, by time, by phases of training, by a budget, or by what failures cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies.checked import check_count, check_secs, check_share
from dcp_engine.policies.interval import Interval, choose_interval
from dcp_engine.policies.pace import Pace

__all__ = ["Phase", "SaveDecision", "When", "decide_save"]

_AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """An interval for a part of training.

    Attributes:
        every: number of steps; the multiples of it are saved.
        until: last step of the phase, inclusive; None: to the end.

    Raises:
        InvalidOptionError: one is below 1.
    """

    every: int
    until: int | None = None

    def __post_init__(self) -> None:
        check_count("every", self.every)
        if self.until is not None:
            check_count("until", self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """When to save. Of several rules, whichever comes first; but the budget comes before all of them.

    ::

        When(steps=500)                                             # after every 500 steps
        When(steps=500, secs=1800)                                  # or half an hour after the last save, if that is earlier
        When(phases=(Phase(every=500, until=10_000), Phase(every=2_000)))
        When(secs="auto", mtbf_secs=36 * 3600, restart_secs=300)    # at the optimum for a failure in 36 hours
        When(budget=0.02)                                           # as often as 2 % of the time allows

    Attributes:
        steps: multiples of this number are saved.
        phases: likewise, with an interval for each part of training, in order; the last without an end.
        secs: longest time from the beginning of a save to that of the next; or ``"auto"``: the optimum of Young for what saves were
            measured to cost, see :func:`~dcp_engine.policies.choose_interval`. Then the first save comes at once, to measure it.
        budget: share of the time that saves may take, as in 0.02: after a save that stalled training for x seconds none begins before
            x / 0.02. A step that is due before that is saved when that time is over. Alone: a save as soon as it allows one.
        mtbf_secs: for ``"auto"``, mean time between failures of the whole job; None: as observed, see :class:`~dcp_engine.policies.Pace`.
        restart_secs: for ``"auto"``, what a failure costs besides the steps that are done again. Shown in the expected loss.

    Raises:
        InvalidOptionError: options contradict each other, or are out of range.
    """

    steps: int | None = None
    phases: Sequence[Phase] = ()
    secs: float | Literal["auto"] | None = None
    budget: float | None = None
    mtbf_secs: float | None = None
    restart_secs: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", _checked_phases(self.phases))
        if self.steps is not None:
            check_count("steps", self.steps)
            if self.phases:
                raise InvalidOptionError(
                    "steps and phases contradict each other",
                    expected="one of them",
                    remedy="Phase(every=...) without until is the same as steps",
                )
        if self.secs is not None:
            _check_interval(self.secs)
        if self.budget is not None:
            check_share("budget", self.budget)
        for name in ("mtbf_secs", "restart_secs"):
            value = getattr(self, name)
            if value is not None:
                check_secs(name, value, may_be_zero=name == "restart_secs")
                if self.secs != _AUTO:
                    raise InvalidOptionError(f"{name} is of no use here", expected='secs="auto" with it', found=f"secs={self.secs!r}")
        if self.steps is None and not self.phases and self.secs is None and self.budget is None:
            raise InvalidOptionError("nothing says when to save", expected="one of steps, phases, secs and budget, or several")

    @classmethod
    def of(cls, value: When | str) -> When:
        """``"auto"`` is short for ``When(secs="auto")``. ``InvalidOptionError`` for what is neither."""
        if isinstance(value, When):
            return value
        if value == _AUTO:
            return cls(secs="auto")
        raise InvalidOptionError("when is not known", expected='a When, as in When(steps=500), or "auto"', found=repr(value)[:300])

    @property
    def uses_time(self) -> bool:
        """Whether decisions need a clock, so that one rank has to make them for all."""
        return self.secs is not None or self.budget is not None

    def next_step(self, after: int) -> int | None:
        """The first step above ``after`` that the rules by steps name; None where there are none."""
        start = 0
        for phase in self.phases or ([] if self.steps is None else [Phase(every=self.steps)]):
            step = (max(after, start) // phase.every + 1) * phase.every
            if phase.until is None or step <= phase.until:
                return step
            start = phase.until
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """Whether to save now, for all ranks. Crosses ranks by pickle.

    Attributes:
        save: whether.
        reason: why, or why not, in words.
        ask_again_step: no rule asks for a save before this step, if steps go on taking the time that they have taken.
        interval: with ``secs="auto"``, what was found to be best; None before the first save.
        conflict: a rule that the budget overrides, with both numbers; else None.
    """

    save: bool
    reason: str
    ask_again_step: int
    interval: Interval | None = None
    conflict: str | None = None


def decide_save(when: When, pace: Pace, step: int) -> SaveDecision:
    """Whether the state after ``step`` is to be saved. Pure.

    With rules by steps alone, every rank can ask for itself, with its own ``Pace.last_step``, and all get the same answer. Where
    :attr:`When.uses_time`, times differ from rank to rank: one rank measures, asks, and sends the whole decision to the others (it
    pickles); none of them asks again before ``ask_again_step``, at which all meet again. That is at most half of the way to the next
    save, and at most as far as steps have been timed, so that an interval of n steps costs about 2 log2(n) such messages.

    Args:
        when: the rules.
        pace: of the rank that asks, at this step's end.
        step: that training has reached.
    """
    only_budget = when.steps is None and not when.phases and when.secs is None
    if pace.stall_secs is None and (only_budget or when.secs == _AUTO):
        return SaveDecision(save=True, reason="nothing is known yet of what a save costs", ask_again_step=step + 1)
    interval = _auto_interval(when, pace)
    floor_secs = pace.stalls[-1] / when.budget if when.budget is not None and pace.stalls else 0.0
    secs = _secs_between(when, interval, floor_secs)
    due_step = when.next_step(pace.last_step)
    by_step = due_step is not None and due_step <= step
    wanted = f"step {due_step} is due" if by_step else None
    if wanted is None and secs is not None and pace.since_secs >= secs:
        wanted = f"a save every {secs:,.0f} s is wanted"
    conflict = None if interval is None else interval.conflict
    if wanted is not None and pace.since_secs >= floor_secs:
        return SaveDecision(save=True, reason=wanted, ask_again_step=step + 1, interval=interval, conflict=conflict)
    left_secs = None if secs is None else max(secs, floor_secs) - pace.since_secs
    reason = "no rule asks for a save"
    if wanted is not None:
        reason = conflict = f"{wanted}, and an overhead budget of {when.budget:.2%} allows one every {floor_secs:,.0f} s: the budget wins"
        left_secs = floor_secs - pace.since_secs
    ask_again_step = _ask_again_step(pace, step, None if by_step else due_step, left_secs)
    return SaveDecision(save=False, reason=reason, ask_again_step=ask_again_step, interval=interval, conflict=conflict)


def _secs_between(when: When, interval: Interval | None, floor_secs: float) -> float | None:
    """What the rules by time ask for; None without any."""
    if interval is not None:
        return interval.secs
    if when.secs is not None:
        assert not isinstance(when.secs, str), "of which the interval is known"
        return when.secs
    return None if when.steps is not None or when.phases else floor_secs  # the budget is the only rule


def _auto_interval(when: When, pace: Pace) -> Interval | None:
    cost = pace.stall_secs
    if when.secs != _AUTO or cost is None:
        return None
    return choose_interval(
        save_secs=cost,
        mtbf_secs=when.mtbf_secs or pace.mtbf_secs,
        restart_secs=when.restart_secs or 0.0,
        budget=when.budget,
        durable_secs=pace.durable_secs,
    )


def _ask_again_step(pace: Pace, step: int, due_step: int | None, left_secs: float | None) -> int:
    """Half of the way to when time may ask for a save, but not beyond the next step that is due.

    Nor further ahead than steps have been timed: they may get slower, and the first ones say little.
    """
    candidates = [] if due_step is None else [due_step]
    if left_secs is not None:
        step_secs = pace.step_secs(step)
        ahead = 1 if step_secs is None else min(int(left_secs / step_secs / 2), step - pace.since_step)
        candidates.append(step + max(1, ahead))
    return min(candidates, default=step + 1)


def _check_interval(secs: object) -> None:
    if isinstance(secs, str) and secs != _AUTO:
        raise InvalidOptionError("secs is not known", expected='a number of seconds above 0, or "auto"', found=repr(secs)[:300])
    if not isinstance(secs, str):
        check_secs("secs", secs)


def _checked_phases(phases: object) -> tuple[Phase, ...]:
    if not isinstance(phases, Sequence) or not all(isinstance(phase, Phase) for phase in phases):
        raise InvalidOptionError(
            "phases are no phases", expected="as in (Phase(every=500, until=10_000), Phase(every=2_000))", found=repr(phases)[:300]
        )
    ends = [phase.until for phase in phases]
    closed = [end for end in ends if end is not None]
    if phases and (ends[-1] is not None or len(closed) != len(ends) - 1 or closed != sorted(set(closed))):
        raise InvalidOptionError(
            "phases do not follow one another",
            expected="each with an until above that of the one before, and the last without, so that saving never ends",
            found=f"until = {ends}",
        )
    return tuple(phases)
