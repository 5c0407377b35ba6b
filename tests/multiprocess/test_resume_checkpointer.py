"""Runs of ``Checkpointer`` that are killed in every way come back to the newest step that is whole, and are the run that never stops."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from support.resume_runs import Training

from dcp_engine import Checkpointer
from dcp_engine.testing import Layout, RankProcesses, ResumeReport, RunContext, StopAt, check_resume
from dcp_engine.testing.report import StraightRun

pytestmark = pytest.mark.xdist_group("ranks")


def train(run: RunContext, *, last: int = 30, waits: bool = False, shared_rng: bool = False, digests: bool = True) -> None:
    """Trains to step ``last`` and saves every 5 steps; ``waits``: until the checkpoint is durable, else until the one before is."""
    training = Training(run, batch=8, num_samples=200, shared_rng=shared_rng)
    with Checkpointer(run.root, save_every=5) as checkpointer:
        checkpointer.restore(training.state, missing_ok=True)
        batches = training.batches()
        for number in run.steps(after=training.state.counters.step, last=last):
            ids, features = next(batches)
            training.step(run, number, ids, features, noise=0.1, digests=digests and number == last)
            if number % 5 == 0:
                checkpointer.wait()
            checkpointer.maybe_save(number, training.state, wait=waits)


@pytest.fixture(scope="module")
def straight() -> dict[tuple[Any, ...], StraightRun]:
    """Straight runs, which do not depend on how a run saves."""
    return {}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


def check(
    processes: RankProcesses,
    straight: dict[tuple[Any, ...], StraightRun],
    *stop_at: StopAt,
    layouts: tuple[int | Layout, ...] = (2,),
    **options: Any,
) -> list[tuple[int | None, int | None, int | None, int]]:
    key = (layouts[0], options.get("last"), options.get("shared_rng"))
    report: ResumeReport = check_resume(
        functools.partial(train, **options), stop_at=stop_at, layouts=layouts, processes=processes, straight=straight.get(key)
    )
    straight[key] = report.straight
    assert report.problems == (), str(report)
    assert all(row.loss_difference <= row.tolerance for row in report.rows)
    return [(leg.resumed_from, leg.first_step, leg.last_step, leg.redone) for leg in report.legs]


def test_killed_after_step_23_resumes_at_20_and_redoes_3(processes: RankProcesses, straight: dict[tuple[Any, ...], StraightRun]) -> None:
    spans = check(processes, straight, StopAt(23, end="sigkill"), waits=True)
    assert spans == [(None, 1, 23, 0), (20, 21, 30, 3)]


def test_killed_with_the_save_of_20_unfinished_resumes_at_15_and_redoes_8(
    processes: RankProcesses, straight: dict[tuple[Any, ...], StraightRun]
) -> None:
    spans = check(processes, straight, StopAt(23, end="sigkill", unfinished_save=20))
    assert spans == [(None, 1, 23, 0), (15, 16, 30, 8)]


@pytest.mark.parametrize("point", ["in_save", "before_publish"])
def test_killed_inside_the_save_of_20_resumes_at_15(
    processes: RankProcesses, straight: dict[tuple[Any, ...], StraightRun], point: str
) -> None:
    spans = check(processes, straight, StopAt(20, point=point, end="sigkill"), waits=True)
    assert spans == [(None, 1, 20, 0), (15, 16, 30, 5)]


def test_one_rank_killed_inside_a_step_and_an_exception_after_it(
    processes: RankProcesses, straight: dict[tuple[Any, ...], StraightRun]
) -> None:
    stops = (StopAt(12, point="after_backward", end="sigkill", ranks=(1,)), StopAt(17, end="exception"))
    assert check(processes, straight, *stops, waits=True) == [(None, 1, 11, 0), (10, 11, 17, 1), (15, 16, 30, 2)]


def test_four_two_and_four_ranks(processes: RankProcesses, straight: dict[tuple[Any, ...], StraightRun]) -> None:
    stops = (StopAt(6, end="sigkill"), StopAt(11, end="sigkill"))
    spans = check(processes, straight, *stops, layouts=(4, 2, 4), last=15, waits=True, shared_rng=True, digests=False)
    assert spans == [(None, 1, 6, 0), (5, 6, 11, 1), (10, 11, 15, 1)]
