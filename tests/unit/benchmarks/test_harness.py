"""The harness runs systems in turn, and one that fails costs no other its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.harness import Case, MismatchError, System, in_fresh_process, measure
from benchmarks.options import Options, parse
from benchmarks.results import CaseResult, Claim

OPTIONS = parse(["--quick", "--no-memory", "--memory", ""])


class OneRow:
    NAME = "F1"
    TITLE = "a row"

    def cases(self, options: Options) -> Iterator[Case]:
        yield from ()

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        return []

    def notes(self, options: Options) -> list[str]:
        return []


def run(case: Case) -> CaseResult:
    return measure(OneRow(), case, OPTIONS, lambda line: None)


def test_rounds_are_interleaved_and_everybody_comes_first_in_turn() -> None:
    calls: list[str] = []
    systems = [System(name=name, role="peer", run=lambda name=name: calls.append(name)) for name in "abc"]  # type: ignore[misc]
    result = run(Case(name="c", systems=systems, rounds=3))
    assert "".join(calls) == "abcbcacab"
    assert [sorted(system.secs) for system in result.systems] == [[0, 1, 2]] * 3


def test_before_run_check_and_after_follow_each_other_and_prepare_comes_once() -> None:
    calls: list[str] = []

    def step(name: str) -> None:
        calls.append(name)

    def check() -> dict[str, float]:
        step("check")
        return {"stored_bytes": 7.0}

    system = System(
        name="a",
        role="peer",
        prepare=lambda: step("prepare"),
        before=lambda: step("before"),
        run=lambda: step("run"),
        check=check,
        after=lambda: step("after"),
    )
    (found,) = run(Case(name="c", systems=[system], rounds=2)).systems
    assert calls == ["prepare", *["before", "run", "check", "after"] * 2]
    assert found.facts == {"stored_bytes": {0: 7.0, 1: 7.0}}


def test_a_system_that_loads_wrong_bytes_has_no_figure_and_is_cleaned_up_after() -> None:
    cleaned: list[str] = []

    def wrong() -> dict[str, float]:
        raise MismatchError("weight is not what was saved")

    systems = [
        System(name="bad", role="ours", check=wrong, after=lambda: cleaned.append("bad")),
        System(name="good", role="peer"),
    ]
    bad, good = run(Case(name="c", systems=systems, rounds=3)).systems
    assert bad.failure == "MismatchError: weight is not what was saved"
    assert (bad.secs, len(good.secs), cleaned) == ({}, 3, ["bad"])


def test_a_peer_that_is_not_installed_says_so_and_the_rest_runs() -> None:
    systems = [System(name="absent", role="peer", unavailable="not installed: pip install absent"), System(name="there", role="ours")]
    absent, there = run(Case(name="c", systems=systems, rounds=2)).systems
    assert (absent.failure, absent.secs, len(there.secs)) == ("not installed: pip install absent", {}, 2)


def test_slow_systems_may_run_fewer_rounds() -> None:
    systems = [System(name="slow", role="dcp", max_rounds=1), System(name="fast", role="ours")]
    slow, fast = run(Case(name="c", systems=systems, rounds=3)).systems
    assert (sorted(slow.secs), sorted(fast.secs)) == ([0], [0, 1, 2])


def test_a_system_may_tell_its_own_time() -> None:
    system = System(name="a", role="ours", run=lambda: {"secs": 42.0, "chunks": 5.0})
    (found,) = run(Case(name="c", systems=[system], rounds=1)).systems
    assert (found.secs, found.facts) == ({0: 42.0}, {"chunks": {0: 5.0}})


def test_without_seconds_only_what_enters_a_ratio_runs_three_times() -> None:
    systems = [
        System(name="ours", role="ours"),
        System(name="dcp", role="dcp"),
        System(name="not durable", role="dcp", comparable=False),
        System(name="peer", role="peer"),
        System(name="compared peer", role="peer"),
    ]
    found = run(Case(name="c", systems=systems, rounds=50, budget_secs=0.0, compared=frozenset({"compared peer"}))).systems
    assert [len(system.secs) for system in found] == [3, 3, 1, 1, 3]


def test_rounds_that_were_asked_for_are_given_whatever_they_take() -> None:
    case = Case(name="c", systems=[System(name="a", role="peer")], rounds=2, budget_secs=0.0)
    (found,) = measure(OneRow(), case, replace(OPTIONS, rounds=4), lambda line: None).systems
    assert len(found.secs) == 4


def test_a_fresh_process_returns_values_and_reports_errors() -> None:
    assert in_fresh_process(divmod, 17, 5) == (3, 2)
    with pytest.raises(ChildProcessError, match="ZeroDivisionError"):
        in_fresh_process(divmod, 1, 0)
