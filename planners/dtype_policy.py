"""Whether a stored dtype may be loaded into another one: the dtype policy, decided from the two dtypes alone.

Only real floating-point numbers are ever cast, and only where the caller asked for it with ``"cast"``. Integers, booleans and complex
numbers never are: a cast of a step counter, a mask or an index is a fault, not a precision. What a cast gives is what
``Tensor.copy_`` gives: the nearest value of the target dtype, ties to even; a widening cast (:func:`is_exact`) keeps every value. Values
beyond the target's range become infinite, or for dtypes without infinity (the ``fn`` float8 family) what the installed torch makes of them.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch

from dcp_engine.errors import InvalidOptionError

__all__ = ["CASTABLE", "DtypePolicy", "check_policy", "is_exact", "refusal"]

DtypePolicy = Literal["refuse", "cast"]

CASTABLE: Final = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    }
)
"""Signed floats. ``float8_e8m0fnu`` is not one: it holds scales, with neither sign nor zero."""

_UNSIGNED_ZERO = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_NO_INFINITY = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


def check_policy(policy: object) -> DtypePolicy:
    """``policy`` itself, where it is one.

    Raises:
        InvalidOptionError: it is neither ``"refuse"`` nor ``"cast"``.
    """
    for valid in get_args(DtypePolicy):
        if policy == valid:
            return valid  # type: ignore[no-any-return]
    raise InvalidOptionError("dtype is not a dtype policy", expected="'refuse' or 'cast'", found=repr(policy))


def refusal(stored: torch.dtype, wanted: torch.dtype, policy: DtypePolicy) -> str | None:
    """Why ``stored`` may not be loaded into ``wanted``, as the remedy to print; None where it may.

    Pure and thread-safe.
    """
    if stored == wanted:
        return None
    if stored not in CASTABLE or wanted not in CASTABLE:
        return f"only floats are ever cast: give the state a tensor of {stored}"
    if policy == "cast":
        return None
    return f"pass dtype='cast' to convert floats on load, or give the state a tensor of {stored}"


def is_exact(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether every value of the float dtype ``stored``, infinities and signed zero included, is one of ``wanted``. Pure."""
    if stored == wanted:
        return True
    if wanted in _UNSIGNED_ZERO or (wanted in _NO_INFINITY and stored not in _NO_INFINITY):
        return False
    source, target = torch.finfo(stored), torch.finfo(wanted)
    least_source, least_target = source.smallest_normal * source.eps, target.smallest_normal * target.eps
    return target.eps <= source.eps and target.max >= source.max and least_target <= least_source
