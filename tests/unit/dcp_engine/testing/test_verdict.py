"""Legs are judged in their order: where each began, what it trained, and what of its steps differs first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dcp_engine.errors import ResumeMismatchError
from dcp_engine.testing.records import StepRecord
from dcp_engine.testing.report import ResumeReport, StraightRun, rows_to_show
from dcp_engine.testing.stops import Layout, StopAt, plan_legs
from dcp_engine.testing.verdict import Verdict

LAST = 8


def record(step: int, **changed: Any) -> StepRecord:
    batch = (2 * step, 2 * step + 1)
    good = StepRecord(step=step, loss=1.0 / step, lr=(0.1,), batch=batch, generators={"torch": f"t{step}", "python": "p"}, at_secs=step / 4)
    return replace(good, **changed)


def steps(first: int, last: int, **changed: Any) -> list[StepRecord]:
    return [record(step, **changed) for step in range(first, last + 1)]


def judged(*legs: Sequence[Sequence[StepRecord]], stop_at: Sequence[int | StopAt] = (5,), layouts: Sequence[int] = (1,)) -> ResumeReport:
    plans = plan_legs(stop_at, layouts)
    straight = StraightRun(layout=plans[0].layout, seed=0, records=(tuple(steps(1, LAST)),) * plans[0].layout.world_size)
    verdict = Verdict(straight, tolerance=1e-4)
    for plan, records in zip(plans, legs, strict=False):
        verdict.add(plan, records, exit_statuses=(0,) * plan.layout.world_size)
    return verdict.report()


def test_good_legs_have_no_problem() -> None:
    report = judged([steps(1, 5)], [steps(4, LAST)])
    assert report.holds
    assert report.what is None
    assert [(leg.resumed_from, leg.first_step, leg.last_step, leg.redone, leg.steps_per_sec) for leg in report.legs] == [
        (None, 1, 5, 0, 4.0),
        (3, 4, 8, 2, 4.0),
    ]
    assert [(one.step, one.num_before, one.num_after, one.repeated, one.lost) for one in report.boundaries] == [(3, 6, 10, (), ())]
    report.raise_if_different()


@pytest.mark.parametrize(
    ("legs", "stop_at", "text"),
    [
        (([steps(1, 5)], [steps(1, 8)]), [5], "leg-2 began afresh: nothing was resumed"),
        (([steps(1, 5)], [steps(6, 8)]), [StopAt(5, resumes_at=4)], "leg-2 went on from step 5 instead of 4"),
        (([steps(1, 5)], [steps(2, 8)]), [StopAt(5, resumes_at=0)], "leg-2 went on from step 1 instead of 0"),
        (([steps(1, 5)], [steps(7, 8)]), [5], "leg-2 went on from step 6, and only 5 were trained"),
        (([steps(1, 5)], [steps(6, 7)]), [5], "leg-2 ended at step 7 instead of 8"),
        (([steps(2, 5)],), [5], "leg-1 began at step 2 instead of 1"),
        (([[*steps(1, 3), *steps(5, 5)]],), [5], "rank 0 of leg-1 did not train one step after the other"),
        (([[*steps(1, 3), *steps(3, 5)]],), [5], "rank 0 of leg-1 did not train one step after the other"),
    ],
)
def test_wrong_steps_are_a_fault_of_the_progress(legs: Any, stop_at: Any, text: str) -> None:
    report = judged(*legs, stop_at=stop_at)
    assert (report.what, report.problems[0].text) == ("progress", text)


def test_ranks_that_began_at_different_steps_are_told() -> None:
    report = judged([steps(1, 5)] * 2, [steps(6, 8), steps(4, 8)], layouts=[2])
    assert report.problems[0].text == "ranks of leg-2 began at different steps"
    assert report.problems[0].found == {0: 6, 1: 4}


def test_fresh_start_that_is_expected_is_none_of_the_problems() -> None:
    assert judged([steps(1, 2)], [steps(1, 8)], stop_at=[StopAt(2, end="sigkill", resumes_at=0)]).holds


def test_step_that_only_some_ranks_recorded_is_none_that_was_done() -> None:
    report = judged([steps(1, 5), steps(1, 4)], [steps(5, 8)] * 2, stop_at=[StopAt(5, end="sigkill")], layouts=[2])
    assert report.holds
    assert (report.legs[0].last_step, report.legs[1].redone) == (4, 0)


def test_first_step_that_differs_is_named_with_all_that_is_known() -> None:
    found = [*steps(6, 6), record(7, lr=(0.2,), loss=9.0), record(8, batch=(0, 1))]
    report = judged([steps(1, 5)], [found])
    first = report.problems[0]
    assert (first.part, first.leg, first.step, first.rank, first.expected, first.found) == ("scheduler", "leg-2", 7, 0, (0.1,), (0.2,))
    assert first.text == (
        "step 7 of leg-2 on 1 rank differs from the run that never stopped: learning rate 0.2 instead of 0.1"
        " (so do, as effects most likely: optimizer)"
    )
    with pytest.raises(ResumeMismatchError, match="scheduler: step 7") as caught:
        report.raise_if_different()
    assert (caught.value.what, caught.value.step, caught.value.rank) == ("scheduler", 7, 0)


def test_wrong_loss_in_the_first_step_after_a_resume_is_the_models() -> None:
    assert judged([steps(1, 5)], [[record(6, loss=9.0), *steps(7, 8)]]).what == "model"
    assert judged([[*steps(1, 2), record(3, loss=9.0), *steps(4, 5)]]).what == "optimizer"


def test_generator_that_training_never_draws_from_is_not_compared() -> None:
    assert judged([steps(1, 5)], [[record(s, generators={"torch": f"t{s}", "python": "q"}) for s in (6, 7, 8)]]).holds
    assert judged([steps(1, 5)], [[record(s, generators={"torch": "x", "python": "p"}) for s in (6, 7, 8)]]).what == "rng"


def test_samples_taken_twice_are_counted_where_the_run_went_on() -> None:
    off = [record(step, batch=(2 * step - 2, 2 * step - 1)) for step in (6, 7, 8)]
    report = judged([steps(1, 5)], [off])
    assert [problem.part for problem in report.problems] == ["data", "data"]
    assert report.problems[1].text == "leg-2 took 2 samples twice and left 0 out where it went on"
    assert report.boundaries[0].repeated == (10, 11)


def test_runs_without_sample_ids_have_no_boundaries() -> None:
    assert judged([steps(1, 5)], [[record(step, batch=None) for step in (6, 7, 8)]]).boundaries == ()


def test_table_shows_legs_steps_and_what_differs() -> None:
    report = judged([steps(1, 5)], [[*steps(4, 7), record(8, loss=9.0)]], stop_at=[StopAt(5, end="sigkill")])
    lines = [line.split() for line in str(report).splitlines()]
    assert ["leg-2", "1", "rank", "4-8", "3", "2", "4.0", "runs", "to", "its", "end"] in lines
    assert ["8", "leg-2", "9", "0.125", "7e+01", "0", "optimizer"] in lines
    assert "samples around step 3: 6 before and 10 after; 0 taken twice, 0 lost" in str(report)
    assert str(report).splitlines()[-1].startswith("differs: optimizer: step 8 of leg-2")


def test_first_last_and_worst_step_of_every_leg_are_shown() -> None:
    (row,) = judged([steps(1, 1)], stop_at=[1]).rows
    rows = [replace(row, step=step, leg="a", loss_difference=0.1 if step == 18 else 0.0) for step in range(1, 101)]
    rows += [replace(row, step=step, leg="b") for step in (101, 102)]
    shown = [entry.step for entry in rows_to_show(rows)]
    assert {1, 18, 100, 101, 102} <= set(shown)
    assert shown == sorted(shown)
    assert len(shown) < 12


def test_layouts_are_named() -> None:
    plans = plan_legs([1], [Layout(2, "fsdp"), Layout(2, "tp")])
    assert [str(plan.layout) for plan in plans] == ["fsdp", "tp"]
