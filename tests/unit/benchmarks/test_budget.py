"""Who takes part in another round."""

from __future__ import annotations

import math

from benchmarks.budget import Turn, takes_part


def turn(name: str, *, rounds: int, secs: float, compared: bool = False, max_rounds: int = 5) -> Turn:
    return Turn(name=name, compared=compared, rounds=rounds, max_rounds=max_rounds, secs=secs)


def test_everybody_runs_once_even_when_the_seconds_are_gone() -> None:
    turns = [turn("ours", rounds=0, secs=0.0, compared=True), turn("peer", rounds=0, secs=0.0)]
    assert takes_part(turns, left_secs=-5.0) == ["ours", "peer"]


def test_who_enters_a_ratio_has_three_rounds_whatever_they_take() -> None:
    for rounds, chosen in ((1, ["ours"]), (2, ["ours"]), (3, [])):
        turns = [turn("ours", rounds=rounds, secs=60.0, compared=True), turn("peer", rounds=1, secs=0.5)]
        assert takes_part(turns, left_secs=0.0) == chosen


def test_seconds_that_the_compared_still_need_are_kept_for_them() -> None:
    # ours needs two more rounds of 4 s: 8 of 10 s; a peer of 3 s would take some of them, one of 2 s would not.
    ours = turn("ours", rounds=1, secs=4.0, compared=True)
    assert takes_part([ours, turn("peer", rounds=1, secs=3.0)], left_secs=10.0) == ["ours"]
    assert takes_part([ours, turn("peer", rounds=1, secs=2.0)], left_secs=10.0) == ["ours", "peer"]


def test_what_is_left_goes_to_the_compared_first_then_to_the_quick() -> None:
    turns = [
        turn("slow", rounds=3, secs=5.0),
        turn("quick", rounds=3, secs=1.0),
        turn("ours", rounds=3, secs=2.0, compared=True),
        turn("dcp", rounds=3, secs=3.0, compared=True),
    ]
    assert takes_part(turns, left_secs=11.0) == ["slow", "quick", "ours", "dcp"]
    assert takes_part(turns, left_secs=10.9) == ["quick", "ours", "dcp"]
    assert takes_part(turns, left_secs=5.0) == ["ours", "dcp"]
    assert takes_part(turns, left_secs=2.5) == ["ours"]
    assert takes_part(turns, left_secs=0.5) == []


def test_nobody_has_more_rounds_than_allowed_not_even_for_a_ratio() -> None:
    turns = [turn("dcp", rounds=1, secs=60.0, compared=True, max_rounds=1), turn("ours", rounds=5, secs=1.0, compared=True)]
    assert takes_part(turns, left_secs=math.inf) == []
