"""``assert_resume_equal``: runs a training function straight through and with stops, and holds the two against each other."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from dcp_engine.errors import InvalidOptionError
from dcp_engine.testing.compare import RELATIVE_TOLERANCE
from dcp_engine.testing.context import RunContext
from dcp_engine.testing.launch import LegRun, Target, run_leg, target_of
from dcp_engine.testing.processes import RankProcesses
from dcp_engine.testing.report import ResumeReport, StraightRun
from dcp_engine.testing.stops import Layout, LegPlan, StopAt, plan_legs
from dcp_engine.testing.verdict import Verdict

__all__ = ["assert_resume_equal", "check_resume"]

_SEED_STEP: Final = 1000
"""Generators of a leg that resumes must not be by chance where those of a fresh start are: so much is added to the seed for each."""


def assert_resume_equal(
    make_run: Callable[[RunContext], object],
    *,
    stop_at: Sequence[int | StopAt | Sequence[StopAt]],
    layouts: Sequence[int | Layout] = (1,),
    folder: str | Path | None = None,
    seed: int = 0,
    tolerance: float = RELATIVE_TOLERANCE,
    timeout_secs: float = 300.0,
    grace_secs: float = 10.0,
    straight: StraightRun | None = None,
    processes: RankProcesses | None = None,
) -> ResumeReport:
    """Fails unless a run that is stopped and resumed is the run that never stops.

    As :func:`check_resume`, which returns what it found in either case.

    Raises:
        ResumeMismatchError: they differ; names the part of the state that differs first, the step and the rank. An ``AssertionError``, too.
        LegFailedError: a leg failed, hung, or was never at its stop.
        InvalidOptionError, UnencodableObjectError: as :func:`check_resume`.
    """
    report = check_resume(
        make_run,
        stop_at=stop_at,
        layouts=layouts,
        folder=folder,
        seed=seed,
        tolerance=tolerance,
        timeout_secs=timeout_secs,
        grace_secs=grace_secs,
        straight=straight,
        processes=processes,
    )
    report.raise_if_different()
    return report


def check_resume(
    make_run: Callable[[RunContext], object],
    *,
    stop_at: Sequence[int | StopAt | Sequence[StopAt]],
    layouts: Sequence[int | Layout] = (1,),
    folder: str | Path | None = None,
    seed: int = 0,
    tolerance: float = RELATIVE_TOLERANCE,
    timeout_secs: float = 300.0,
    grace_secs: float = 10.0,
    straight: StraightRun | None = None,
    processes: RankProcesses | None = None,
) -> ResumeReport:
    """Runs a training function straight through, then with stops, every leg in fresh processes on this machine, and compares step by step.

    Compared are the samples, random draws and the state of the global generators, learning rates, scaler, counters, loss, gradient norm,
    other values and the whole state, as far as the function records them. On the topology of the straight run all of it must be equal bit
    for bit. Once a leg had another one, loss and gradient norm may differ by ``tolerance``; samples, draws, learning rates, scaler and
    counters may not.

    The global batch must be the same on all layouts: steps are held against each other by number.

    Args:
        make_run: called on each rank of each leg with a :class:`RunContext`. A function at the top level of a module, which another process
            can find, or a ``functools.partial`` of one with arguments that the format holds. It makes everything anew, resumes if it is
            told to, trains to the end, and returns.
        stop_at: for each leg but the last a step (a clean stop after it), a :class:`StopAt`, or a list of these for different ranks.
        layouts: ranks of each leg, or one number, or :class:`Layout`, for all. The straight run has the first.
        folder: for checkpoints, records and logs: new or empty. None: a temporary one, removed at the end.
        seed: of the global generators at a fresh start.
        tolerance: relative.
        timeout_secs: after which a leg is ended, and counts as hung.
        grace_secs: how long the other ranks may go on when one has failed or was killed.
        straight: of an earlier report, with the same layout and seed: it is not run again.
        processes: that start the ranks, shared by several comparisons. None: of this one alone, which costs the seconds of importing torch.

    Returns:
        What was found. The first leg with a problem is the last: what comes after it could repair nothing.

    Raises:
        LegFailedError: a leg failed, hung, or was never at its stop; with the end of its log.
        InvalidOptionError: an argument is out of range, or the function cannot be found by another process.
        UnencodableObjectError: an argument of a ``functools.partial`` cannot be sent.
    """
    target, plans = target_of(make_run), plan_legs(stop_at, layouts)
    for name, value in (("tolerance", tolerance), ("timeout_secs", timeout_secs), ("grace_secs", grace_secs)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidOptionError(f"{name} is out of range", expected="a finite number of 0 or more", found=repr(value))
    if straight is not None and (straight.layout, straight.seed) != (plans[0].layout, seed):
        raise InvalidOptionError(
            "the straight run is one on another layout or with another seed",
            expected=f"{plans[0].layout}, seed {seed}",
            found=f"{straight.layout}, seed {straight.seed}",
        )
    with _place(folder) as place, nullcontext(processes) if processes is not None else RankProcesses() as starter:
        runner = _Runner(starter, target, place, seed, timeout_secs, grace_secs)
        verdict = Verdict(straight or runner.straight(plans[0].layout), tolerance=tolerance)
        for number, plan in enumerate(plans):
            begins_afresh = plan.resumes_at == 0
            run = runner.leg(plan, root="checkpoints", seed=seed if begins_afresh else seed + _SEED_STEP * number)
            verdict.add(plan, run.records, exit_statuses=run.exit_statuses)
            if not verdict.holds:
                break
        return verdict.report()


class _Runner:
    """Runs legs of one function below one folder."""

    def __init__(self, processes: RankProcesses, target: Target, place: Path, seed: int, timeout_secs: float, grace_secs: float) -> None:
        self._processes = processes
        self._target = target
        self._place = place
        self._seed = seed
        self._timeout_secs = timeout_secs
        self._grace_secs = grace_secs

    def straight(self, layout: Layout) -> StraightRun:
        run = self.leg(LegPlan(name="straight", layout=layout), root="straight-checkpoints", seed=self._seed)
        return StraightRun(layout=layout, seed=self._seed, records=run.records)

    def leg(self, plan: LegPlan, *, root: str, seed: int) -> LegRun:
        run = run_leg(
            self._processes,
            self._target,
            plan,
            folder=self._place / plan.name,
            root=self._place / root,
            seed=seed,
            timeout_secs=self._timeout_secs,
            grace_secs=self._grace_secs,
        )
        run.require_planned_end()
        return run


@contextmanager
def _place(folder: str | Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="resume-") as temporary:
            yield Path(temporary)
        return
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        raise InvalidOptionError("the folder is not empty", path=str(place), remedy="name one that does not exist yet")
    yield place
