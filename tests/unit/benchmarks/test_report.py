"""Claims, comparisons and tables made from results."""

from __future__ import annotations

import json

import pytest

from benchmarks.report import case_table, claims_table, summary
from benchmarks.results import CaseResult, Claim, RowResult, SystemResult, as_document
from benchmarks.stats import Spread


def make_case() -> CaseResult:
    return CaseResult(
        name="save to disk",
        nbytes=2_000_000_000,
        systems=[
            SystemResult(name="ours", role="ours", secs={0: 1.0, 1: 2.0, 2: 1.0}, facts={"stored_bytes": {0: 1e9, 1: 1e9}}),
            SystemResult(name="DCP a", role="dcp", secs={0: 3.0, 1: 8.0, 2: 3.0}),
            SystemResult(name="DCP b", role="dcp", secs={0: 2.0, 1: 6.0, 2: 2.0}, peak_bytes=5_000_000),
            SystemResult(name="DCP unsafe", role="dcp", secs={0: 0.5}, comparable=False),
            SystemResult(name="other", role="peer", failure="not installed: pip install other"),
        ],
    )


def test_the_best_configuration_is_the_fastest_that_does_the_same_work() -> None:
    case = make_case()
    best = case.best("dcp")
    assert best is not None
    assert best.name == "DCP b"
    assert case.times_faster(best) == Spread(2.0, 2.0, 3.0, 3)
    assert case.times_faster(best, best) == Spread(1.0, 1.0, 1.0, 3)
    assert case.best("peer") is None
    assert case.times_faster(case.best("peer")) is None
    assert case.named("other") is None


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (Claim("fast enough", 2.0, 2.0), True),
        (Claim("too slow", 2.0, 1.99), False),
        (Claim("small enough", 0.67, 0.67, at_most=True), True),
        (Claim("too large", 0.67, 0.68, at_most=True), False),
        (Claim("unknown", 2.0, None), None),
    ],
)
def test_a_figure_holds_on_its_own_side_of_the_bound(claim: Claim, holds: bool | None) -> None:
    assert claim.holds is holds


def test_a_claim_of_ratios_keeps_their_spread() -> None:
    assert Claim.of_ratio("x", 2.0, Spread(3.0, 1.5, 4.0, 5)) == Claim("x", 2.0, 3.0, low=1.5, high=4.0)
    assert Claim.of_ratio("x", 2.0, None) == Claim("x", 2.0, None)


def test_a_case_is_a_line_for_every_system_and_says_why_one_has_no_figure() -> None:
    lines = case_table(make_case()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["system", "median s", "min to max", "rounds", "GB/s", "x ours", "stored", "peak MB", "remarks"]
    assert cells[2] == ["ours", "1", "1 to 2", "3", "2.00", "1.00", "0.500", "", ""]
    assert cells[4] == ["DCP b", "2", "2 to 6", "3", "1.00", "2.00", "", "5", ""]
    assert cells[6] == ["other", "-", "", "", "", "", "", "", "not installed: pip install other"]
    assert len({len(line) for line in lines}) == 1


def test_claims_say_bound_figure_and_outcome() -> None:
    lines = claims_table([Claim("a", 2.0, 3.0, low=1.0, high=4.0, detail="DCP b"), Claim("b", 0.5, None, at_most=True)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["a (DCP b)", ">= 2", "3", "1 to 4", "holds"]
    assert cells[3] == ["b", "<= 0.5", "-", "", "not measured"]


def test_results_survive_json_with_every_round() -> None:
    row = RowResult(name="F1", title="t", cases=[make_case()], claims=[Claim("a", 2.0, 3.0)], notes=[], elapsed_secs=1.0)
    document = json.loads(json.dumps(as_document([row], {"cores": 2}, {"quick": True})))
    (case,) = document["rows"][0]["cases"]
    assert case["systems"][0]["secs"] == {"0": 1.0, "1": 2.0, "2": 1.0}
    assert (case["systems"][0]["median_secs"], case["systems"][4]["median_secs"]) == (1.0, None)
    assert document["rows"][0]["claims"][0]["holds"] is True
    assert summary([row]) == "1 of 1 figures hold, 0 are short, 0 were not measured"
