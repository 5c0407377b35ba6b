"""What differs in a step is named, causes before effects, exactly where it must be exact and within the tolerance where it may not be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dcp_engine.testing.compare import Row, compare_ranks, compare_step, rank_local, relative_difference
from dcp_engine.testing.records import StepRecord

GOOD = StepRecord(
    step=7,
    loss=2.0,
    grad_norm=4.0,
    lr=(0.5, 0.25),
    scaler={"scale": 8.0, "_growth_tracker": 1},
    batch=(3, 1, 2),
    draws="0.5 #a",
    generators={"torch": "t7", "python": "p7"},
    counters={"step": 7, "samples": 56},
    values={"accuracy": 0.5, "name": "x"},
    state={"model.w": "m7", "optimizer.state.w.exp_avg": "o7", "ema.w": "e7", "scheduler": "s7", "progress.world_size": "4"},
)


def compared(*, tolerance: float = 0.0, is_first: bool = False, **changed: Any) -> Row:
    return compare_step(GOOD, replace(GOOD, **changed), leg="leg-2", layout="2 ranks", tolerance=tolerance, is_first=is_first, rank=1)


def test_equal_step_has_no_fault() -> None:
    row = compared()
    assert (row.leg, row.layout, row.step, row.rank) == ("leg-2", "2 ranks", 7, 1)
    assert (row.loss, row.reference_loss, row.loss_difference, row.grad_norm_difference) == (2.0, 2.0, 0.0, 0.0)
    assert (row.fault, row.reason, row.also) == (None, "", ())


@pytest.mark.parametrize(
    ("changed", "fault", "reason"),
    [
        ({"batch": (3, 1, 4)}, "data", "another place in the data: samples [3, 1, 4] instead of [3, 1, 2]"),
        ({"batch": (3, 1)}, "data", "a batch of 2 samples instead of 3"),
        ({"batch": None}, "data", "another place in the data"),
        ({"draws": "0.25 #b"}, "rng", "drew 0.25 #b instead of 0.5 #a"),
        ({"generators": {"torch": "t8", "python": "p7"}}, "rng", "state of the generator 'torch' t8 instead of t7"),
        ({"lr": (0.5, 0.125)}, "scheduler", "learning rate 0.5, 0.125 instead of 0.5, 0.25"),
        ({"scaler": {"scale": 16.0, "_growth_tracker": 1}}, "scaler", "scale 16 instead of 8, 1.0e+00 relative"),
        ({"scaler": {"scale": 8.0, "_growth_tracker": 0}}, "scaler", "_growth_tracker 0 instead of 1"),
        ({"scaler": {}}, "scaler", "scale None instead of 8"),
        ({"counters": {"step": 7, "samples": 48}}, "progress", "samples 48 instead of 56"),
        ({"loss": 3.0}, "optimizer", "loss 3 instead of 2, 5.0e-01 relative"),
        ({"grad_norm": 2.0}, "optimizer", "gradient norm 2 instead of 4, 5.0e-01 relative"),
        ({"values": {"accuracy": 0.5, "name": "y"}}, "values", "name y instead of x"),
        ({"values": {**GOOD.values, "more": 1}}, "values", "more 1 instead of None"),
        ({"state": {**GOOD.state, "ema.w": "e8"}}, "ema", "ema.w is another one"),
        ({"state": {**GOOD.state, "model.v": "m"}}, "model", "model.v is there in one run only"),
        (
            {"state": {**GOOD.state, "model.w": "m8", "optimizer.state.w.exp_avg": "o8"}},
            "optimizer",
            "optimizer.state.w.exp_avg is another one",
        ),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], fault: str, reason: str) -> None:
    row = compared(**changed)
    assert (row.fault, row.reason) == (fault, reason)
    assert row.expected != row.found


def test_causes_come_before_effects() -> None:
    changed: dict[str, Any] = {
        "batch": (9,),
        "draws": "other",
        "lr": (9.0,),
        "scaler": {"scale": 1.0},
        "counters": {},
        "loss": 9.0,
        "values": {},
        "state": {"ema.w": "x"},
    }
    order = ["data", "rng", "scheduler", "scaler", "progress", "optimizer", "values"]
    for number, part in enumerate(order):
        row = compared(**changed)
        assert row.fault == part
        assert row.also[: len(order) - number - 1] == tuple(order[number + 1 :])
        del changed[next(iter(changed))]
    assert compared(**changed).fault == "scheduler"  # of the whole state: it lacks one


def test_wrong_loss_before_the_first_optimizer_step_is_the_models() -> None:
    assert compared(loss=9.0, is_first=True).fault == "model"


def test_one_bit_is_a_fault_without_tolerance_and_none_with_it() -> None:
    loss = math.nextafter(2.0, 3.0)
    assert compared(loss=loss).fault == "optimizer"
    assert compared(loss=loss, tolerance=1e-4).fault is None


@pytest.mark.parametrize(("factor", "fault"), [(1.000099, None), (1.000101, "optimizer"), (0.999901, None), (0.999899, "optimizer")])
def test_tolerance_is_relative(factor: float, fault: str | None) -> None:
    assert compared(loss=2.0 * factor, tolerance=1e-4).fault == fault
    assert compared(grad_norm=4.0 * factor, tolerance=1e-4).fault == fault
    assert compared(values={"accuracy": 0.5 * factor, "name": "x"}, tolerance=1e-4).fault == (fault and "values")


def test_learning_rate_scale_and_counters_must_be_exact_within_any_tolerance() -> None:
    assert compared(lr=(math.nextafter(0.5, 1.0), 0.25), tolerance=1e-4).fault == "scheduler"
    assert compared(scaler={"scale": math.nextafter(8.0, 9.0), "_growth_tracker": 1}, tolerance=1e-4).fault == "scaler"
    assert compared(counters={"step": 7, "samples": 57}, tolerance=0.5).fault == "progress"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_is_no_number_is_a_fault(loss: float) -> None:
    assert compared(loss=loss, tolerance=1e-4).fault == "optimizer"


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [(2.0, 2.0, 0.0), (3.0, 2.0, 0.5), (1.0, 2.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (-3.0, -2.0, 0.5)],
)
def test_relative_difference(found: float, expected: float, difference: float) -> None:
    assert relative_difference(found, expected) == difference


def ranks(*parts: dict[str, Any]) -> list[StepRecord]:
    return [replace(GOOD, **part) for part in parts]


def compared_ranks(expected: list[StepRecord], found: list[StepRecord], *, bitwise: bool = False) -> Row:
    return compare_ranks(expected, found, leg="leg-2", layout="l", bitwise=bitwise, tolerance=1e-4, is_first=False)


def test_each_rank_is_held_against_the_same_rank_on_the_same_topology() -> None:
    expected = ranks({"batch": (1, 2)}, {"batch": (3, 4)})
    assert compared_ranks(expected, expected, bitwise=True).fault is None
    row = compared_ranks(expected, ranks({"batch": (3, 4)}, {"batch": (1, 2)}), bitwise=True)
    assert (row.fault, row.rank, row.tolerance) == ("data", 0, 0.0)


def test_rank_with_the_cause_is_told_before_a_rank_with_an_effect() -> None:
    expected = ranks({}, {}, {})
    row = compared_ranks(expected, ranks({"loss": 9.0}, {}, {"draws": "other"}), bitwise=True)
    assert (row.fault, row.rank) == ("rng", 2)


def test_samples_of_all_ranks_and_the_mean_loss_are_compared_on_another_topology() -> None:
    expected = ranks({"batch": (1, 2), "loss": 1.0}, {"batch": (3, 4), "loss": 3.0})
    assert compared_ranks(expected, ranks({"batch": (4, 3, 2, 1), "loss": 2.0})).fault is None
    assert compared_ranks(expected, ranks({"batch": (4, 3, 2, 1), "loss": 2.001})).fault == "optimizer"
    assert compared_ranks(expected, ranks({"batch": (4, 3, 2, 5), "loss": 2.0})).fault == "data"
    # Tensor-parallel ranks have the same samples.
    assert compared_ranks(expected, ranks(*({"batch": part, "loss": 2.0} for part in ((1, 2), (1, 2), (3, 4), (3, 4))))).fault is None


def test_what_is_the_same_on_all_ranks_must_be_so_on_any_number_of_them() -> None:
    same = ranks({}, {})
    row = compared_ranks(same, ranks({}, {}, {"draws": "other"}))
    assert (row.fault, row.rank, row.tolerance) == ("rng", 2, 1e-4)
    assert compared_ranks(same, ranks({"generators": {"torch": "x", "python": "p7"}})).fault == "rng"
    assert compared_ranks(same, ranks({"lr": (0.5,)})).fault == "scheduler"
    assert compared_ranks(same, ranks({"values": {}})).fault == "values"
    assert compared_ranks(same, ranks({"state": {**GOOD.state, "scheduler": "s8"}})).fault == "scheduler"


def test_what_differs_between_ranks_cannot_be_compared_on_another_topology() -> None:
    apart = ranks(
        {"draws": "a", "generators": {"torch": "a", "python": "p7"}, "values": {"mine": 0}},
        {"draws": "b", "generators": {"torch": "b", "python": "p7"}, "values": {"mine": 1}},
    )
    one = ranks({"draws": "c", "generators": {"torch": "c", "python": "p7"}, "values": {"mine": 2}})
    assert compared_ranks(apart, one).fault is None
    assert rank_local(apart) == ("draws", "generators 'torch'", "values 'mine'")
    assert rank_local(ranks({}, {})) == ()


def test_digests_of_sharded_and_placed_values_are_not_compared_on_another_topology() -> None:
    expected = ranks({"state": {**GOOD.state, "data": "d4"}}, {"state": {**GOOD.state, "model.w": "other shard", "data": "d4"}})
    found = ranks({"state": {"model.w": "whole", "scheduler": "s7", "progress.world_size": "1", "data": "d1"}})
    assert compared_ranks(expected, found).fault is None
