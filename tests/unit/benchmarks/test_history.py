"""Runs on record, and what the last three say about a figure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.history import Run, git_state, load_runs, measured_in, save_run, verdict
from benchmarks.results import Claim, RowResult

MACHINE = {"cpu": "X", "cores": 2, "torch": "2.13.0"}


def run(day: int, value: float | None, *, cores: int = 2, threads: int = 2) -> Run:
    return Run(
        date=f"2026-01-{day:02d}T10:00:00Z",
        code="abc",
        machine={**MACHINE, "cores": cores},
        options={"threads": threads},
        figures={"F1": {"times DCP": value}},
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "not measured"),
        ([2.5], "holds in 1 run of 1"),
        ([2.0, 2.0], "holds in 2 runs of 2"),
        ([2.0, 3.0, 2.5], "**holds**"),
        ([2.5, 1.9, 2.5], "holds in 2 runs of 3"),
        ([1.0, 2.5, 1.5], "holds in 1 run of 3; short by 25%"),
        ([1.0], "holds in 0 runs of 1; short by 50%"),
    ],
)
def test_a_figure_holds_when_it_holds_in_three_runs_and_otherwise_the_median_says_by_how_much_not(values: list[float], said: str) -> None:
    assert verdict(Claim("times DCP", 2.0, None), values) == said


def test_an_upper_bound_is_short_by_what_is_too_much() -> None:
    assert verdict(Claim("size", 0.8, None, at_most=True), [0.8, 0.7, 0.8]) == "**holds**"
    assert verdict(Claim("size", 0.8, None, at_most=True), [0.88, 0.88, 0.8]) == "holds in 1 run of 3; short by 10%"
    assert verdict(Claim("growth", 0.0, None, at_most=True), [0.0, 2.0, 3.0]) == "holds in 1 run of 3; over by 2"


def test_the_last_three_runs_that_measured_a_figure_count() -> None:
    runs = [run(1, 1.0), run(2, 2.0), run(3, None), run(4, 3.0), run(5, 4.0)]
    assert measured_in(runs, "F1", "times DCP") == [2.0, 3.0, 4.0]
    assert measured_in(runs, "F1", "another") == measured_in(runs, "F2", "times DCP") == []


def test_only_runs_on_the_same_kind_of_machine_with_the_same_threads_are_compared() -> None:
    assert run(1, 1.0).is_like(run(2, 9.0))
    assert not run(1, 1.0).is_like(run(2, 1.0, cores=4))
    assert not run(1, 1.0).is_like(run(2, 1.0, threads=4))


def test_runs_come_back_from_a_folder_oldest_first(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert load_runs(str(folder)) == []
    for day in (2, 1):
        assert Path(save_run(run(day, 1.5), str(folder))).name == f"2026-01-0{day}T100000Z.json"
    assert load_runs(str(folder)) == [run(1, 1.5), run(2, 1.5)]
    with pytest.raises(FileExistsError):
        save_run(run(1, 2.0), str(folder))


def test_a_run_keeps_the_figures_of_its_rows() -> None:
    row = RowResult(
        name="F1",
        title="t",
        cases=[],
        claims=[Claim("a", 2.0, 3.0, detail="DCP, 2 threads"), Claim("b", 1.0, None)],
        notes=[],
        elapsed_secs=1,
    )
    made = Run.of([row], date="d", code="c", machine=MACHINE, options={})
    assert made.figures == {"F1": {"a": 3.0, "b": None}}


def test_the_code_is_a_commit_with_or_without_changes_or_unknown(tmp_path: Path) -> None:
    assert git_state(str(tmp_path)) == "unknown"

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git_state(str(tmp_path))
    (tmp_path / "file").write_text("2")
    assert len(clean) == 12
    assert git_state(str(tmp_path)) == f"{clean} + changes"
