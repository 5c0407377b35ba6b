"""The jobs of the demo follow each other without a gap, whatever their lengths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.demo.schedule import DemoConfig, plan_legs
from dcp_engine.errors import InvalidOptionError


def test_default_run_dies_at_12_and_comes_back_at_8_and_20() -> None:
    legs = {leg.name: leg for leg in plan_legs(DemoConfig())}
    assert list(legs) == ["reference", "killed", "same-4", "on-2", "on-4"]
    assert [(leg.num_ranks, leg.resumed_from, leg.last_step, leg.die_at) for leg in legs.values()] == [
        (4, None, 32, 0),
        (4, None, 32, 12),
        (4, 8, 12, 0),
        (2, 8, 20, 0),
        (4, 20, 32, 0),
    ]
    assert [leg.num_steps for leg in legs.values()] == [32, 12, 4, 12, 12]
    assert [leg.bitwise for leg in legs.values()] == [True, True, True, False, False]


@given(st.integers(1, 50), st.integers(4, 60), st.integers(0, 49))
def test_jobs_after_the_crash_cover_every_step_once(save_every: int, num_saves: int, extra: int) -> None:
    steps = save_every * num_saves + extra % save_every
    _, killed, same, two, four = plan_legs(DemoConfig(steps=steps, save_every=save_every))
    newest = killed.die_at - save_every
    assert newest >= save_every
    assert killed.die_at % save_every == 0
    assert same.resumed_from == two.resumed_from == newest
    assert same.last_step == killed.die_at
    assert two.last_step % save_every == 0
    assert four.resumed_from == two.last_step
    assert newest + two.num_steps + four.num_steps == steps
    assert two.num_steps > 0
    assert four.num_steps > 0


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"steps": 0}, "--steps"),
        ({"save_every": 0}, "--save-every"),
        ({"steps": 15, "save_every": 4}, "--steps"),
        ({"width": 12}, "--width"),
        ({"window_bytes": 31}, "--window-bytes"),
        ({"batch": 3}, "--batch"),
        ({"layers": -1}, "--layers"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOptionError, match=option) as caught:
        DemoConfig(**options)
    assert caught.value.expected is not None
    assert caught.value.found is not None
