"""What the program writes into the README, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks
from benchmarks.history import Run
from benchmarks.options import ROW_NAMES
from benchmarks.preflight import readme_problem
from benchmarks.readme import fill, markers, section
from benchmarks.results import CaseResult, Claim, RowResult, SystemResult

BEGIN, END = markers("F1")
MACHINE = {
    "cpu": "X",
    "cores": 2,
    "torch": "2.13.0",
    "memory_bytes": 16_000_000_000,
    "kernel": "Linux 6",
    "python": "3.12.1",
    "file_systems": {"disk": "ext4"},
    "load_average": [0.25, 0, 0],
}


def run(day: int, value: float) -> Run:
    figures: dict[str, dict[str, float | None]] = {"F1": {"times DCP": value}}
    return Run(date=f"2026-01-0{day}T10:00:00Z", code="abc", machine=MACHINE, options={"threads": 2}, figures=figures)


def test_results_replace_what_was_between_a_rows_markers_and_nothing_else() -> None:
    other = "\n".join(markers("F2"))
    text = f"head\n*What limits it.* The disk.\n{BEGIN}\nold\n{END}\ntail\n{other}\n"
    once = fill(text, "F1", "new\n")
    assert once == f"head\n*What limits it.* The disk.\n{BEGIN}\n\nnew\n\n{END}\ntail\n{other}\n"
    assert fill(once, "F1", "new\n") == once


@pytest.mark.parametrize("text", ["no markers", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}", f"{BEGIN} {END} {END}"])
def test_a_document_without_one_pair_of_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        fill(text, "F1", "new")
    assert "benchmarks/README.md" in readme_problem(text, ["F1"])


def test_the_readme_has_a_place_for_every_row_and_words_on_what_limits_it() -> None:
    text = (Path(benchmarks.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert readme_problem(text, ROW_NAMES) == ""
    assert text.count("*What limits it.*") == len(ROW_NAMES)


def test_a_section_shows_the_last_three_runs_side_by_side_and_the_newest_in_full() -> None:
    case = CaseResult(name="save", nbytes=10, systems=[SystemResult(name="ours", role="ours", secs={0: 1.0, 1: 2.0, 2: 3.0})])
    claim = Claim("times DCP", 2.0, 2.5, low=1.5, high=3.5, detail="DCP, 2 threads")
    row = RowResult(name="F1", title="t", cases=[case], claims=[claim], notes=["a note"], elapsed_secs=61.2)
    lines = section(row, [run(1, 9.0), run(2, 2.0), run(3, 1.0), run(4, 2.5)], "pictures/").splitlines()
    assert lines[0] == (
        "Newest run: 2026-01-04T10:00:00Z, commit abc, X, 2 cores, 16 GB, Linux 6, Python 3.12.1, torch 2.13.0, ext4 (disk); "
        "2 threads, 61 s, load 0.2 at the start."
    )
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells == ["times DCP (DCP, 2 threads)", ">= 2", "2, 1, 2.5", "1.5 to 3.5", "holds in 2 runs of 3"]
    assert "![F1](pictures/F1.png)" in lines
    assert "- a note" in lines
