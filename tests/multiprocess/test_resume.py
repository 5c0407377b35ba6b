"""Runs that are stopped in every way and resumed, held against the run that never stops: the worked values, and each component lost."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resume_runs import train

from dcp_engine.errors import ClosedError, InvalidOptionError, LegFailedError, ResumeMismatchError
from dcp_engine.testing import Layout, RankProcesses, ResumeReport, RunContext, StopAt, assert_resume_equal, check_resume
from dcp_engine.testing.report import StraightRun

pytestmark = pytest.mark.xdist_group("ranks")

ALONE = Layout(1, init_group=False)
LOST = ("rng", "optimizer", "scheduler", "data", "scaler", "model")


class Comparisons:
    """Comparisons of ``train`` that share processes, and the straight runs, which do not depend on how a run saves and resumes."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes = processes
        self._straight: dict[tuple[Any, ...], StraightRun] = {}

    def __call__(self, *stop_at: Any, layouts: tuple[int | Layout, ...] = (ALONE,), **options: Any) -> ResumeReport:
        key = (layouts[0], *((name, options.get(name)) for name in ("last", "batch", "num_samples", "noise", "shared_rng", "digests")))
        report = check_resume(
            functools.partial(train, **options),
            stop_at=stop_at,
            layouts=layouts,
            processes=self._processes,
            straight=self._straight.get(key),
            timeout_secs=120,
        )
        self._straight[key] = report.straight
        return report


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


@pytest.fixture(scope="module")
def compared(processes: RankProcesses) -> Comparisons:
    return Comparisons(processes)


def assert_equal_bit_for_bit(report: ResumeReport) -> None:
    assert report.problems == ()
    assert {row.loss_difference for row in report.rows} == {row.grad_norm_difference for row in report.rows} == {0.0}
    assert {row.tolerance for row in report.rows} == {0.0}
    assert all(one.repeated == one.lost == () for one in report.boundaries)


def spans(report: ResumeReport) -> list[tuple[int | None, int | None, int | None, int]]:
    return [(leg.resumed_from, leg.first_step, leg.last_step, leg.redone) for leg in report.legs]


def test_killed_after_step_23_resumes_at_20_and_redoes_3(compared: Comparisons) -> None:
    report = compared(StopAt(23, end="sigkill"), layouts=(2,))
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 23, 0), (20, 21, 30, 3)]
    assert [leg.exit_statuses for leg in report.legs] == [(-9, -9), (0, 0)]
    assert [(row.leg, row.step) for row in report.rows] == [("leg-1", step) for step in range(1, 24)] + [
        ("leg-2", step) for step in range(21, 31)
    ]


def test_killed_with_the_save_of_20_unfinished_resumes_at_15_and_redoes_8(compared: Comparisons) -> None:
    report = compared(StopAt(23, end="sigkill", unfinished_save=20, resumes_at=15), layouts=(2,), saves="async")
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 23, 0), (15, 16, 30, 8)]


@pytest.mark.parametrize("point", ["in_save", "before_publish"])
def test_killed_inside_the_save_of_20_resumes_at_15(compared: Comparisons, point: str) -> None:
    report = compared(StopAt(20, point=point, end="sigkill", resumes_at=15), layouts=(2,))
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 20, 0), (15, 16, 30, 5)]


@pytest.mark.parametrize(("point", "ranks"), [("after_backward", (1,)), ("after_optimizer_step", None)])
def test_killed_inside_step_23_resumes_at_20_and_redoes_2(compared: Comparisons, point: str, ranks: tuple[int, ...] | None) -> None:
    report = compared(StopAt(23, point=point, end="sigkill", ranks=ranks), layouts=(2,))
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 22, 0), (20, 21, 30, 2)]
    assert report.legs[0].exit_statuses[1] == -9


def test_ended_by_an_exception_after_backward(compared: Comparisons) -> None:
    report = compared(StopAt(23, point="after_backward", end="exception"))
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 22, 0), (20, 21, 30, 2)]


def test_stops_at_17_at_23_and_at_the_end_of_the_epoch(compared: Comparisons) -> None:
    # An epoch of 200 samples is 25 steps of 8.
    report = compared(17, 23, 25, layouts=(2,), saves_at_stop=True)
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 17, 0), (17, 18, 23, 0), (23, 24, 25, 0), (25, 26, 30, 0)]
    assert [(one.step, one.num_before, one.num_after) for one in report.boundaries] == [(17, 136, 104), (23, 184, 56), (25, 200, 40)]


@pytest.mark.parametrize(
    "stops",
    [
        [StopAt(12, end="sigterm", ranks=(1,))],
        [StopAt(12, end="sigterm", ranks=(0,)), StopAt(12, point="after_backward", end="sigterm", ranks=(1,))],
    ],
    ids=["one rank", "different times"],
)
def test_sigterm_ends_all_ranks_after_one_step(compared: Comparisons, stops: list[StopAt]) -> None:
    report = compared(stops, layouts=(2,), saves_at_stop=True, heeds_sigterm=True)
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 12, 0), (12, 13, 30, 0)]
    assert report.legs[0].exit_statuses == (0, 0)


@pytest.mark.parametrize("drill", [10, 100])
def test_drill_is_equal_and_its_throughput_is_told(compared: Comparisons, drill: int) -> None:
    report = compared(10, last=10 + drill)
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 10, 0), (10, 11, 10 + drill, 0)]
    assert len([row for row in report.rows if row.leg == "leg-2"]) == drill
    assert report.legs[1].steps_per_sec is not None
    assert report.legs[1].steps_per_sec > 0
    assert f"{report.legs[1].steps_per_sec:.1f}" in str(report)


@pytest.mark.parametrize("lost", LOST)
def test_lost_component_is_named(compared: Comparisons, lost: str) -> None:
    report = compared(StopAt(23, end="sigkill"), drop=lost)
    assert report.what == lost
    # Lost moments are felt one step later: the first loss and gradient need only the weights.
    assert report.problems[0].step == (22 if lost == "optimizer" else 21)
    with pytest.raises(ResumeMismatchError) as caught:
        report.raise_if_different()
    assert isinstance(caught.value, AssertionError)
    assert (caught.value.what, caught.value.rank, caught.value.report) == (lost, 0, report)
    assert caught.value.step == report.problems[0].step
    assert caught.value.expected != caught.value.found


@pytest.mark.parametrize("lost", ["optimizer", "rng", "scaler", "data"])
def test_lost_component_is_named_at_once_where_the_whole_state_is_recorded(compared: Comparisons, lost: str) -> None:
    # The last step alone tells: there is no later one that would show lost moments by its loss.
    report = compared(20, last=21, drop=lost, digests="all")
    assert (report.what, report.problems[0].step) == (lost, 21)


def test_lost_rng_is_named_where_losses_are_too_close_to_tell(compared: Comparisons) -> None:
    kept = compared(20, layouts=(2, 1), shared_rng=True, noise=1e-6)
    assert kept.problems == ()
    lost = compared(20, layouts=(2, 1), shared_rng=True, noise=1e-6, drop="rng")
    assert lost.what == "rng"
    differing = [row for row in lost.rows if row.leg == "leg-2"]
    assert len(differing) == 10
    assert max(row.loss_difference for row in differing) < 1e-4


def test_four_two_four_ranks_take_every_sample_once(compared: Comparisons) -> None:
    options: dict[str, Any] = {"last": 35, "batch": 100, "num_samples": 5000, "saves_at_stop": True, "shared_rng": True, "digests": "none"}
    report = compared(12, 24, layouts=(4, 2, 4), **options)
    assert report.problems == ()
    assert spans(report) == [(None, 1, 12, 0), (12, 13, 24, 0), (24, 25, 35, 0)]
    assert [(one.step, one.num_before, one.num_after, one.repeated, one.lost) for one in report.boundaries] == [
        (12, 1000, 1000, (), ()),
        (24, 1000, 1000, (), ()),
    ]
    assert {row.leg: row.tolerance for row in report.rows} == {"leg-1": 0.0, "leg-2": 1e-4, "leg-3": 1e-4}
    assert max(row.loss_difference for row in report.rows) <= 1e-4
    off = compared(12, 24, layouts=(4, 2, 4), drop="cursor", **options)
    assert off.what == "data"
    assert (len(off.boundaries[0].repeated), len(off.boundaries[0].lost)) == (0, 100)


def test_run_that_begins_afresh_is_no_resume(compared: Comparisons) -> None:
    report = compared(20, save_every=100)
    assert (report.what, report.problems[0].text) == ("progress", "leg-2 began afresh: nothing was resumed")


def test_resume_from_another_step_than_expected_is_told(compared: Comparisons) -> None:
    report = compared(StopAt(23, end="sigkill", resumes_at=15))
    assert [problem.text for problem in report.problems] == ["leg-2 went on from step 20 instead of 15"]


def test_killed_before_the_first_save_may_begin_afresh(compared: Comparisons) -> None:
    report = compared(StopAt(3, end="sigkill", resumes_at=0))
    assert_equal_bit_for_bit(report)
    assert spans(report) == [(None, 1, 3, 0), (0, 1, 30, 3)]


def fail_on_resume(run: RunContext) -> None:
    for step in run.steps(after=0, last=2):
        if run.resume:
            raise ValueError("the reason")
        run.record(step, loss=1.0)


def hang(run: RunContext) -> None:
    for step in run.steps(after=0, last=2):
        run.record(step, loss=1.0)
        if run.rank == 1:
            time.sleep(600)


def do_nothing(run: RunContext) -> None:
    assert run.world_size == 1


def test_leg_that_fails_is_told_with_its_log(processes: RankProcesses) -> None:
    with pytest.raises(LegFailedError, match="'leg-2' on 1 rank failed") as caught:
        assert_resume_equal(fail_on_resume, stop_at=[1], processes=processes)
    assert "ValueError: the reason" in str(caught.value)


def test_leg_that_hangs_is_ended_with_its_stacks(processes: RankProcesses) -> None:
    with pytest.raises(LegFailedError, match="'straight' on 2 ranks hung") as caught:
        assert_resume_equal(hang, stop_at=[1], layouts=[2], processes=processes, timeout_secs=15)
    assert (caught.value.rank, caught.value.step) == (1, 1)
    assert "in hang" in str(caught.value)


def test_stop_that_is_never_reached_is_told(processes: RankProcesses) -> None:
    with pytest.raises(LegFailedError, match="'leg-1' on 1 rank was never at its stop"):
        assert_resume_equal(fail_on_resume, stop_at=[3], processes=processes)


def test_run_that_records_nothing_is_told(processes: RankProcesses) -> None:
    with pytest.raises(LegFailedError, match="'straight' on 1 rank recorded no step"):
        assert_resume_equal(do_nothing, stop_at=[1], processes=processes)


def test_straight_run_of_another_layout_is_refused() -> None:
    straight = StraightRun(layout=Layout(2), seed=0, records=())
    with pytest.raises(InvalidOptionError, match="another layout"):
        assert_resume_equal(do_nothing, stop_at=[1], straight=straight)


def draw_each_alone(run: RunContext) -> None:
    for step in run.steps(after=1 if run.resume else 0, last=2):
        torch.manual_seed(10 * step + run.rank)
        run.record(step, loss=1.0, draws=torch.rand(2), own=run.rank)


def test_what_differs_between_ranks_is_not_compared_on_another_number_and_said_so(processes: RankProcesses) -> None:
    report = check_resume(draw_each_alone, stop_at=[1], layouts=[2, 1], processes=processes)
    assert report.problems == ()
    assert report.not_compared == ("draws", "generators 'torch'", "values 'own'")


def test_closed_processes_start_no_rank(tmp_path: Path) -> None:
    processes = RankProcesses()
    processes.close()
    processes.close()
    with pytest.raises(ClosedError):
        processes.start(tmp_path / "job", log=tmp_path / "log", environment={})


def test_folder_in_use_is_refused_and_a_new_one_is_kept(processes: RankProcesses, tmp_path: Path) -> None:
    report = assert_resume_equal(draw_each_alone, stop_at=[1], folder=tmp_path / "new", processes=processes)
    assert report.holds
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "checkpoints",
        "leg-1",
        "leg-2",
        "straight",
        "straight-checkpoints",
    ]
    with pytest.raises(InvalidOptionError, match="not empty"):
        assert_resume_equal(draw_each_alone, stop_at=[1], folder=tmp_path / "new", processes=processes)
