"""Levels: what each demands, what a finding takes away, and how a report reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcp_engine.checkpointer.checks import Finding, Severity, check_probe, merged
from dcp_engine.checkpointer.probe import ProbeResult
from dcp_engine.checkpointer.report import RestoreLevel, RestoreReport, decide_level

ALL = ("model", "optimizer", "scheduler", "scaler", "progress", "rng", "data", "ema", "extra")


def finding(component: str, severity: Severity = "error", *, kind: str = "not_taken_up", rank: int | None = None) -> Finding:
    return Finding(kind=kind, component=component, text=f"{component} is another", severity=severity, rank=rank)


TOPOLOGY = finding("topology", "note", kind="topology")


def test_levels_are_ordered() -> None:
    assert [level.name for level in sorted(RestoreLevel)] == ["NONE", "PARAMETERS", "OPTIMIZER", "PROGRESS", "RANDOMNESS", "TRAJECTORY"]


def test_whole_state_without_findings_is_bitwise() -> None:
    verdict = decide_level(restored=ALL, findings=())
    assert (verdict.level, verdict.quality, verdict.why_not_more) == (RestoreLevel.TRAJECTORY, "bitwise", ())


def test_schedulers_scaler_and_averages_need_not_be() -> None:
    assert decide_level(restored=("model", "optimizer", "progress", "rng", "data"), findings=()).quality == "bitwise"


def test_other_topology_is_reproducible() -> None:
    verdict = decide_level(restored=ALL, findings=(TOPOLOGY,))
    assert (verdict.level, verdict.quality) == (RestoreLevel.TRAJECTORY, "reproducible")
    assert verdict.why_not_more == ("topology: topology is another",)


@pytest.mark.parametrize(
    ("component", "level", "text"),
    [
        ("model", RestoreLevel.NONE, "model: the state has none"),
        ("optimizer", RestoreLevel.PARAMETERS, "optimizer: the state has none"),
        ("progress", RestoreLevel.OPTIMIZER, "progress: the state has none"),
        ("rng", RestoreLevel.PROGRESS, "rng: the state leaves the random number generators out"),
        ("data", RestoreLevel.RANDOMNESS, "data: the state has none: nothing says which batch comes next"),
    ],
)
def test_state_without_a_component_goes_no_further_than_below_it(component: str, level: RestoreLevel, text: str) -> None:
    verdict = decide_level(restored=[name for name in ALL if name != component], findings=())
    assert (verdict.level, verdict.quality, verdict.why_not_more) == (level, "recoverable", (text,))


@pytest.mark.parametrize(
    ("component", "level"),
    [
        ("model", RestoreLevel.NONE),
        ("probe", RestoreLevel.NONE),
        ("optimizer", RestoreLevel.PARAMETERS),
        ("scheduler", RestoreLevel.OPTIMIZER),
        ("scaler", RestoreLevel.OPTIMIZER),
        ("progress", RestoreLevel.OPTIMIZER),
        ("rng", RestoreLevel.PROGRESS),
        ("data", RestoreLevel.RANDOMNESS),
        ("grads", RestoreLevel.RANDOMNESS),
        ("ema", RestoreLevel.RANDOMNESS),
        ("extra", RestoreLevel.RANDOMNESS),
    ],
)
def test_error_of_a_component_takes_its_level_away(component: str, level: RestoreLevel) -> None:
    verdict = decide_level(restored=ALL, findings=(finding(component, rank=1),))
    assert (verdict.level, verdict.quality) == (level, "recoverable")
    assert verdict.why_not_more == (f"{component}: {component} is another (rank 1)",)


def test_every_reason_is_given_lowest_level_first() -> None:
    verdict = decide_level(restored=("model", "progress", "rng"), findings=(finding("rng"), TOPOLOGY))
    assert verdict.level == RestoreLevel.PARAMETERS
    assert verdict.why_not_more == (
        "optimizer: the state has none",
        "rng: rng is another",
        "data: the state has none: nothing says which batch comes next",
        "topology: topology is another",
    )


def test_component_that_a_finding_speaks_of_is_not_said_to_be_absent() -> None:
    verdict = decide_level(restored=("model",), findings=(finding("optimizer"),))
    assert verdict.why_not_more[0] == "optimizer: optimizer is another"
    noted = decide_level(restored=("model",), findings=(finding("optimizer", "note"),))
    assert noted.why_not_more[0] == "optimizer: the state has none"


def test_warning_leaves_the_level_and_takes_the_quality() -> None:
    verdict = decide_level(restored=ALL, findings=(finding("optimizer", "warning"),))
    assert (verdict.level, verdict.quality) == (RestoreLevel.TRAJECTORY, "recoverable")
    assert verdict.why_not_more == ("optimizer: optimizer is another",)
    assert decide_level(restored=ALL, findings=(finding("rng", "note"),)).quality == "bitwise"


def test_what_was_left_out_on_purpose_takes_its_level_away() -> None:
    left = [finding(name, "note", kind="left_out") for name in ALL if name not in ("model", "optimizer")]
    verdict = decide_level(restored=("model", "optimizer"), findings=left)
    assert (verdict.level, verdict.quality) == (RestoreLevel.OPTIMIZER, "recoverable")
    assert sorted(verdict.why_not_more) == sorted(f"{name}: {name} is another" for name in ALL if name not in ("model", "optimizer"))


# -- the probe ------------------------------------------------------------------------------------------------------------

EQUAL = ProbeResult(equal_bits=True, max_relative_difference=0.0, tolerance=1e-4, ok=True, text="equal")


@pytest.mark.parametrize(
    ("result", "level", "quality"),
    [
        (EQUAL, RestoreLevel.TRAJECTORY, "bitwise"),
        (replace(EQUAL, equal_bits=False, max_relative_difference=1e-6, ok=True), RestoreLevel.TRAJECTORY, "bitwise"),
        (replace(EQUAL, equal_bits=False, max_relative_difference=1e-6, ok=False), RestoreLevel.TRAJECTORY, "reproducible"),
        (replace(EQUAL, equal_bits=False, max_relative_difference=1e-2, ok=False), RestoreLevel.NONE, "recoverable"),
        (replace(EQUAL, equal_bits=False, max_relative_difference=float("inf"), ok=False), RestoreLevel.NONE, "recoverable"),
    ],
)
def test_what_the_probe_says_counts(result: ProbeResult, level: RestoreLevel, quality: str) -> None:
    verdict = decide_level(restored=ALL, findings=check_probe(result, was_recorded=True))
    assert (verdict.level, verdict.quality) == (level, quality)


def test_probe_that_was_not_run_again_is_told() -> None:
    (note,) = check_probe(None, was_recorded=True)
    assert (note.kind, note.severity) == ("probe", "note")
    assert check_probe(None, was_recorded=False) == ()


# -- all ranks ------------------------------------------------------------------------------------------------------------


def test_finding_of_all_ranks_is_of_none() -> None:
    one, other = finding("rng"), finding("model")
    assert merged([[one], [one, other], [one]]) == (replace(other, rank=1), replace(one, rank=None))
    assert merged([[one, one], [], [one]]) == (replace(one, rank=0), replace(one, rank=2))
    assert merged([]) == ()


# -- reading it -----------------------------------------------------------------------------------------------------------


def test_report_reads_in_the_order_in_which_a_person_should_look() -> None:
    report = RestoreReport(
        step=15,
        path="/run/step-00000015",
        level=RestoreLevel.RANDOMNESS,
        quality="recoverable",
        why_not_more=("data: data is another",),
        findings=merged([[TOPOLOGY, finding("data"), finding("model", "note")], [TOPOLOGY, finding("data")]]),
        passed_over=((20, "digest of block 3 differs"),),
        phases={"decide": 0.25, "read": 1.5, "check": 0.25},
        probe=EQUAL,
        saved_world_size=4,
        world_size=2,
    )
    assert report.total_secs == 2.0
    assert str(report).split("\n") == [
        "step 15 restored from /run/step-00000015 on 2 ranks, saved by 4 ranks",
        "passed over step 20: digest of block 3 differs",
        "level randomness, recoverable",
        "not more because data: data is another",
        "note: model: model is another (rank 0)",
        "error: data: data is another",
        "note: topology: topology is another",
        "probe: equal",
        "2.000 s: decide 0.250, read 1.500, check 0.250",
    ]


def test_plain_report_says_no_more_than_there_is() -> None:
    report = RestoreReport(step=1, path="p", level=RestoreLevel.TRAJECTORY, quality="bitwise", phases={"read": 0.5}, saved_world_size=1)
    assert report.lines() == ["step 1 restored from p on 1 rank", "level trajectory, bitwise", "0.500 s: read 0.500"]
