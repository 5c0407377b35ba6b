"""Options of policies, checked: what is wrong with one says its name and what is valid."""

from __future__ import annotations

import math

from dcp_engine.errors import InvalidOptionError

__all__ = ["check_count", "check_flag", "check_name", "check_secs", "check_share"]


def check_count(name: str, value: object, *, minimum: int = 1, why: str | None = None) -> int:
    """A whole number of at least ``minimum``; ``InvalidOptionError`` otherwise, with ``why`` as its remedy."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidOptionError(
            f"{name} is out of range", expected=f"a whole number, at least {minimum}", found=repr(value)[:300], remedy=why
        )
    return value


def check_secs(name: str, value: object, *, may_be_zero: bool = False) -> float:
    """A finite number of seconds above 0, or 0 where that may be; ``InvalidOptionError`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or (value == 0 and not may_be_zero):
        lowest = "at least 0" if may_be_zero else "above 0"
        raise InvalidOptionError(f"{name} is no duration", expected=f"a finite number of seconds, {lowest}", found=repr(value)[:300])
    return float(value)


def check_share(name: str, value: object) -> float:
    """A number between 0 and 1, neither of them; ``InvalidOptionError`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InvalidOptionError(f"{name} is no share", expected="a number between 0 and 1, as in 0.02 for 2 %", found=repr(value)[:300])
    return float(value)


def check_name(name: str, value: object) -> str:
    """A text that is not empty; ``InvalidOptionError`` otherwise."""
    if not isinstance(value, str) or not value:
        raise InvalidOptionError(f"{name} is no name", expected="a text that is not empty", found=repr(value)[:300])
    return value


def check_flag(name: str, value: object) -> bool:
    """True or False; ``InvalidOptionError`` otherwise."""
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} is not a bool", expected="True or False", found=repr(value)[:300])
    return value
