"""Whether a state is worth coming back to: a flag that goes with the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies.checked import check_name

__all__ = ["Health", "HealthVerdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthVerdict:
    """What is said of one state.

    Attributes:
        is_healthy: None: nothing is known.
        reason: what is wrong with it; empty for a healthy one.
    """

    is_healthy: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a healthy state is: all that is watched is finite, and within its bounds, and the caller's own check agrees.

    Attributes:
        finite: names of metrics that must be finite where they are given.
        at_most: name -> greatest healthy value, as in ``{"grad_norm": 100.0}``. Where it is given.
        check: called with the metrics: whether the state is healthy, or None where it cannot tell. If it raises, the state is not.

    Raises:
        InvalidOptionError: an option is out of range, or nothing is watched.
    """

    finite: tuple[str, ...] = ("loss", "grad_norm")
    at_most: Mapping[str, float] | None = None
    check: Callable[[Mapping[str, float]], bool | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "finite", _checked_names(self.finite))
        if self.at_most is not None:
            _check_bounds(self.at_most)
        if self.check is not None and not callable(self.check):
            raise InvalidOptionError("check cannot be called", expected="a function of the metrics", found=repr(self.check)[:300])
        if not self.finite and not self.at_most and self.check is None:
            raise InvalidOptionError("nothing says what is healthy", expected="one of finite, at_most and check")

    def judge(self, metrics: Mapping[str, float]) -> HealthVerdict:
        """What these metrics say of a state. Pure, but for the caller's check.

        Args:
            metrics: name -> number. None of those that are watched, and no check: nothing is known.
        """
        for name in self.finite:
            if name in metrics and not math.isfinite(metrics[name]):
                return HealthVerdict(is_healthy=False, reason=f"{name} is {metrics[name]}")
        bounds = self.at_most or {}
        for name, bound in bounds.items():
            if name in metrics and not metrics[name] <= bound:  # what is no number is not below it, either
                return HealthVerdict(is_healthy=False, reason=f"{name} is {metrics[name]:g}, above {bound:g}")
        watched = any(name in metrics for name in (*self.finite, *bounds))
        if self.check is None:
            return HealthVerdict(is_healthy=True if watched else None)
        try:
            answer = self.check(metrics)
        except Exception as error:  # noqa: BLE001  whatever the caller's function raises: a save must not fail for that
            return HealthVerdict(is_healthy=False, reason=f"the check failed: {type(error).__name__}: {error}")
        if answer is None:
            return HealthVerdict(is_healthy=True if watched else None)
        return HealthVerdict(is_healthy=bool(answer), reason="" if answer else "the check says so")


def _checked_names(names: object) -> tuple[str, ...]:
    if not isinstance(names, tuple | list):
        raise InvalidOptionError("finite is no list of names", expected='as in ("loss", "grad_norm")', found=repr(names)[:300])
    return tuple(check_name("a name in finite", name) for name in names)


def _check_bounds(bounds: object) -> None:
    if not isinstance(bounds, Mapping) or not bounds:
        raise InvalidOptionError("at_most holds no bounds", expected='as in {"grad_norm": 100.0}', found=repr(bounds)[:300])
    for name, bound in bounds.items():
        check_name("a name in at_most", name)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise InvalidOptionError(f"the bound of {name!r} is no number", expected="a finite number", found=repr(bound)[:300])
