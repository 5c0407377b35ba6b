"""Which dtypes may be loaded into which: a table, and exactness against the values themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from dcp_engine.errors import InvalidOptionError
from dcp_engine.planners.dtype_policy import CASTABLE, check_policy, is_exact, refusal

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_equal_dtypes_are_loaded_under_any_policy(dtype: torch.dtype) -> None:
    assert refusal(dtype, dtype, "refuse") is None
    assert refusal(dtype, dtype, "cast") is None


@pytest.mark.parametrize(("stored", "wanted"), list(itertools.permutations(FLOATS, 2)), ids=str)
def test_floats_are_cast_only_when_asked(stored: torch.dtype, wanted: torch.dtype) -> None:
    assert refusal(stored, wanted, "cast") is None
    reason = refusal(stored, wanted, "refuse")
    assert reason is not None
    assert "dtype='cast'" in reason


@pytest.mark.parametrize(("stored", "wanted"), [*itertools.permutations(OTHERS, 2), *itertools.product(OTHERS, FLOATS)], ids=str)
def test_anything_but_floats_is_never_cast(stored: torch.dtype, wanted: torch.dtype) -> None:
    for one, other in ((stored, wanted), (wanted, stored)):
        reason = refusal(one, other, "cast")
        assert reason is not None
        assert f"give the state a tensor of {one}" in reason


@pytest.mark.parametrize(
    ("stored", "wanted", "exact"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.float64, True),
        (torch.float8_e5m2, torch.float16, True),
        (torch.float8_e4m3fn, torch.float16, True),
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float8_e5m2, torch.float8_e4m3fn, False),
        (torch.float8_e5m2, torch.float8_e5m2fnuz, False),
    ],
)
def test_a_widening_cast_is_called_exact(stored: torch.dtype, wanted: torch.dtype, exact: bool) -> None:
    assert is_exact(stored, wanted) is exact


@pytest.mark.parametrize(
    ("stored", "wanted"),
    list(itertools.permutations([*sorted((d for d in CASTABLE if d.itemsize <= 2), key=str), torch.float32], 2)),
    ids=str,
)
def test_a_cast_called_exact_keeps_every_value(stored: torch.dtype, wanted: torch.dtype) -> None:
    if not is_exact(stored, wanted) or stored.itemsize > 2:
        return
    patterns = torch.arange(2 ** (8 * stored.itemsize), dtype=torch.int32)
    values = patterns.to(torch.uint8 if stored.itemsize == 1 else torch.uint16).view(stored)
    there_and_back = values.to(wanted).to(torch.float64)
    assert torch.equal(there_and_back.nan_to_num(nan=7e300), values.to(torch.float64).nan_to_num(nan=7e300))
    assert torch.equal(there_and_back.signbit() & ~there_and_back.isnan(), values.to(torch.float64).signbit() & ~there_and_back.isnan())


def test_an_unknown_policy_names_the_valid_ones() -> None:
    assert check_policy("cast") == "cast"
    with pytest.raises(InvalidOptionError, match="'refuse' or 'cast'"):
        check_policy("upcast")
