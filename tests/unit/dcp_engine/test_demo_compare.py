"""The proof of the demo fails when a job did not do what it had to or a step differs, and names what differed first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dcp_engine.demo.compare import Comparison, Crash, compare
from dcp_engine.demo.records import LegRecords, SaveRecord, StartRecord, StepRecord
from dcp_engine.demo.schedule import DemoConfig, Leg, plan_legs

CONFIG = DemoConfig(steps=8, save_every=2)
LEGS = {leg.name: leg for leg in plan_legs(CONFIG)}
CRASH = Crash(rank=3, num_tensors=10, num_handed_over=5, exit_status=1, leftovers=((".tmp-step-00000004-0/x", 7),), complete_steps=(2,))


def step_record(step: int) -> StepRecord:
    values = {"text": f"t{step}"}
    return StepRecord(step=step, loss=5.0 / step, grad_norm=1.0 + step, lr=(step / 10,), batch=(step,), draws=f"r{step}", values=values)


def save_record(step: int) -> SaveRecord:
    return SaveRecord(step=step, path=f"step-{step:08d}", save_secs=1.0, stall_secs=0.1, raw_bytes=100, stored_bytes=80)


def records(leg: Leg) -> LegRecords:
    """What a job leaves that did what it had to."""
    start = StartRecord(
        world_size=leg.num_ranks, layout="layout", resumed_from=leg.resumed_from, num_parameters=1, corpus_bytes=1, load_secs=0.0
    )
    last = leg.die_at or leg.last_step
    steps = tuple(step_record(step) for step in range(leg.first_step, last + 1))
    saves = tuple(save_record(r.step) for r in steps if leg.save_every and r.step % leg.save_every == 0 and r.step != leg.die_at)
    return LegRecords(start, steps, saves)


def run(crash: Crash = CRASH, **changed: Callable[[LegRecords], LegRecords]) -> Comparison:
    """Compares good runs, but for the jobs whose records are changed (names with ``_`` for ``-``)."""
    tested = []
    for name, leg in LEGS.items():
        change = changed.get(name.replace("-", "_"), lambda unchanged: unchanged)
        tested.append((leg, change(records(leg))))
    return compare(tested[0][1], tested[1:], crash)


def with_step(step: int, **fields: Any) -> Callable[[LegRecords], LegRecords]:
    return lambda leg: replace(leg, steps=tuple(replace(r, **fields) if r.step == step else r for r in leg.steps))


def test_equal_runs_are_a_proof() -> None:
    comparison = run()
    assert comparison.holds
    assert comparison.fault is None
    assert comparison.problems == ()
    assert [(row.leg, row.step) for row in comparison.rows] == [
        *(("killed", step) for step in (1, 2, 3, 4)),
        *(("same-4", step) for step in (3, 4)),
        *(("on-2", step) for step in (3, 4, 5)[:2]),
        *(("on-4", step) for step in (5, 6, 7, 8)),
    ]
    assert {row.leg: row.tolerance for row in comparison.rows} == {"killed": 0.0, "same-4": 0.0, "on-2": 1e-4, "on-4": 1e-4}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"batch": (9,), "draws": "other", "lr": (9.0,), "loss": 9.0}, "data"),
        ({"draws": "other", "loss": 9.0}, "rng"),
        ({"lr": (9.0,), "loss": 9.0}, "scheduler"),
        ({"loss": 9.0}, "optimizer"),
        ({"grad_norm": 9.0}, "optimizer"),
        ({"values": {"text": "other"}}, "values"),
    ],
)
def test_cause_is_named_before_effect(fields: dict[str, Any], fault: str) -> None:
    comparison = run(on_4=with_step(7, **fields))
    assert not comparison.holds
    assert comparison.fault == fault
    assert comparison.problems[0].startswith(f"{fault}: step 7 of the job 'on-4'")


def test_wrong_loss_before_the_first_optimizer_step_is_the_models() -> None:
    assert run(on_4=with_step(5, loss=9.0)).fault == "model"


def test_what_differs_first_in_time_is_named() -> None:
    assert run(same_4=with_step(4, loss=9.0), on_2=with_step(3, draws="other")).fault == "optimizer"


def test_another_layout_may_differ_by_a_ten_thousandth_and_the_same_one_by_nothing() -> None:
    assert run(same_4=with_step(4, loss=5.0 / 4 * 1.00009)).fault == "optimizer"
    assert run(on_2=with_step(4, loss=5.0 / 4 * 1.00009)).holds
    assert run(on_2=with_step(4, loss=5.0 / 4 * 1.00011)).fault == "optimizer"


def test_start_from_another_step_than_the_newest_is_told() -> None:
    def start_afresh(leg: LegRecords) -> LegRecords:
        assert leg.start is not None
        return replace(leg, start=replace(leg.start, resumed_from=None))

    assert run(on_2=start_afresh).problems == ("the job 'on-2' started afresh, but the newest complete step was 2",)


def test_missing_and_repeated_steps_are_told() -> None:
    short = run(on_4=lambda leg: replace(leg, steps=leg.steps[:-1]))
    assert short.problems == ("the job 'on-4' had to train steps 5 to 8 and trained 5 to 7 (3 steps)",)
    assert not run(on_4=lambda leg: replace(leg, steps=(*leg.steps, leg.steps[-1]))).holds
    assert not run(on_4=lambda leg: replace(leg, steps=())).holds


def test_killed_job_may_have_trained_on_while_it_saved() -> None:
    assert run(killed=lambda leg: replace(leg, steps=(*leg.steps, step_record(5)))).holds


def test_missing_save_is_told() -> None:
    comparison = run(on_4=lambda leg: replace(leg, saves=leg.saves[1:]))
    assert comparison.problems == ("the job 'on-4' had to publish steps [6, 8] and published [8]",)


def test_job_that_never_trained_is_told() -> None:
    assert run(same_4=lambda leg: LegRecords(None, (), ())).problems == ("the job 'same-4' never began to train",)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": None}, "no rank of the job 'killed' was killed in the save of step 4"),
        ({"exit_status": 0}, "no rank of the job 'killed' was killed in the save of step 4"),
        ({"complete_steps": (2, 4)}, r"after the crash the complete steps had to be [2] and were [2, 4]"),
        ({"complete_steps": ()}, r"after the crash the complete steps had to be [2] and were []"),
    ],
)
def test_crash_must_have_happened_and_left_nothing_half_published(changes: dict[str, Any], problem: str) -> None:
    comparison = run(crash=replace(CRASH, **changes))
    assert not comparison.holds
    assert any(text.startswith(problem) for text in comparison.problems)
