"""Stops and layouts make the legs that they say, and those that go together with nothing are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_engine.errors import InvalidOptionError
from dcp_engine.testing.stops import Layout, StopAt, plan_legs


def test_each_stop_ends_a_leg_and_the_last_leg_runs_to_the_end() -> None:
    legs = plan_legs([17, StopAt(23, end="sigkill", resumes_at=20), [StopAt(25, end="sigterm", ranks=(0,))]], [4])
    assert [(leg.name, leg.stops, leg.resumes, leg.resumes_at) for leg in legs] == [
        ("leg-1", (StopAt(17),), False, None),
        ("leg-2", (StopAt(23, end="sigkill", resumes_at=20),), True, None),
        ("leg-3", (StopAt(25, end="sigterm", ranks=(0,)),), True, 20),
        ("leg-4", (), True, None),
    ]
    assert {leg.layout for leg in legs} == {Layout(4)}


def test_bits_are_demanded_until_the_first_leg_on_another_topology() -> None:
    assert [leg.bitwise for leg in plan_legs([1, 2, 3], [4, 4, 2, 4])] == [True, True, False, False]
    assert [leg.bitwise for leg in plan_legs([1], [Layout(4, "fsdp"), Layout(4, "tp")])] == [True, False]


@pytest.mark.parametrize(
    ("stop_at", "layouts", "text"),
    [
        ([], [1], "stopped nowhere"),
        ([1], [1, 2, 3], "1, or 2"),
        ([1], [0], "no such number of ranks"),
        ([1], [True], "no such number of ranks"),
        (["1"], [1], "no stop"),
        ([[]], [1], "no stop"),
        ([StopAt(1, ranks=(2,))], [2], "no such rank"),
    ],
)
def test_what_makes_no_legs_is_refused(stop_at: Any, layouts: Any, text: str) -> None:
    with pytest.raises(InvalidOptionError, match=text):
        plan_legs(stop_at, layouts)


@pytest.mark.parametrize(
    "fields",
    [
        {"step": 0},
        {"step": True},
        {"step": 1.0},
        {"step": 1, "end": "sigint"},
        {"step": 1, "point": ""},
        {"step": 1, "point": "after_backward"},
        {"step": 1, "point": "in_save", "end": "exception"},
        {"step": 1, "ranks": ()},
        {"step": 1, "ranks": (-1,)},
        {"step": 1, "unfinished_save": 0},
        {"step": 1, "resumes_at": -1},
    ],
)
def test_stop_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        StopAt(**fields)
    assert caught.value.expected is not None
    assert caught.value.found is not None


def test_stop_and_layout_in_words() -> None:
    assert str(StopAt(17)) == "stop at step 17"
    assert str(StopAt(23, "in_save", "sigkill", ranks=(1, 2))) == "sigkill at step 23 in_save of rank 1, 2"
    assert str(StopAt(23, end="sigkill", unfinished_save=20)) == "sigkill at step 23, save of 20 unfinished"
    assert (str(Layout(1)), str(Layout(4)), str(Layout(4, "fsdp+tp"))) == ("1 rank", "4 ranks", "fsdp+tp")
