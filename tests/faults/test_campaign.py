"""The driver of the fault campaign: it names what it does not know, loses no result, and never calls a run good that was not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from faults.campaign import __main__ as driver
from faults.campaign import parts, report
from faults.campaign.outcome import Outcome
from faults.campaign.parts import Result

DOCUMENT = """# Title

<!-- table of the campaign: begin -->

| part | promise |
| --- | --- |
| crash | kept as it was |
| errors | gives way |

<!-- table of the campaign: end -->

<!-- table of peer: begin -->
old
<!-- table of peer: end -->
"""


def outcome(part: str, *, points: int = 3, bad: tuple[str, ...] = ()) -> Outcome:
    return Outcome(part=part, points=points, seed=7, facts={"EIO": 2, "ENOSPC": 1}, bad=bad, secs=1.5)


def result(part: str, *, points: int = 3, bad: tuple[str, ...] = (), extra: str = "") -> Result:
    return Result(part=part, title="faults", promise="nothing | breaks", outcome=outcome(part, points=points, bad=bad), extra=extra)


FAILED = Result(part="ranks", title="", promise="", failure="Traceback: KeyError")


def test_parts_come_in_the_order_of_the_table() -> None:
    assert parts.chosen("power, crash", ("crash", "power", "errors")) == ("crash", "power")
    assert parts.chosen(None, ("crash", "power")) == ("crash", "power")


@pytest.mark.parametrize("text", ["crush", "crash,crush", "", "crash,"])
def test_an_unknown_part_is_refused_with_the_valid_names(text: str) -> None:
    with pytest.raises(ValueError, match="there are crash, power"):
        parts.chosen(text, ("crash", "power"))


def test_the_command_line_refuses_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        driver.main(["--parts", "crush"])
    assert caught.value.code == 2
    assert "'crush'; there are" in capsys.readouterr().err


def test_a_run_without_faults_a_failed_part_and_a_broken_promise_are_not_good() -> None:
    assert result("crash").good
    assert not result("crash", points=0).good
    assert not result("crash", bad=("the old step was gone",)).good
    assert not FAILED.good


def test_the_summary_tells_counts_seeds_and_everything_that_is_wrong() -> None:
    text = report.summary([result("crash", points=12_345), result("errors", bad=("a leak",)), FAILED])
    lines = text.splitlines()
    assert lines[0].split() == ["part", "faults", "broken", "seed", "secs", "what", "was", "done"]
    assert lines[1].split() == ["crash", "12,345", "0", "7", "2", "faults"]
    assert lines[2].split() == ["errors", "3", "1", "7", "2", "faults"]
    assert "errors: BROKEN (seed 7): a leak" in lines
    assert "Traceback: KeyError" in lines


def test_recording_replaces_the_rows_that_ran_and_keeps_the_others() -> None:
    text = report.record(DOCUMENT, [result("errors"), FAILED, result("peer", extra="| a |")], full=True, date="2026-01-31")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2] == "| crash | kept as it was |"
    assert rows[3] == f"| errors | nothing \\| breaks | 3 | EIO 2, ENOSPC 1 | 7 | full | none | 2026-01-31 | {report.versions()} |"
    assert rows[4].startswith("| peer |")
    assert "gives way" not in text
    assert "| a |" in text
    assert "old" not in text
    assert "ranks" not in text
    again = report.record(text, [result("errors")], full=True, date="2026-01-31")
    assert [line for line in again.splitlines() if line.startswith("| errors")] == [rows[3]]


@pytest.mark.parametrize("mark", ["<!-- table of the campaign: begin -->", "<!-- table of peer: end -->"])
def test_a_document_without_a_mark_is_refused_and_not_overwritten(mark: str) -> None:
    with pytest.raises(ValueError, match="table of"):
        report.record(DOCUMENT.replace(mark, ""), [result("peer", extra="x")], full=False, date="2026-01-31")


def planted(monkeypatch: pytest.MonkeyPatch, **names: object) -> None:
    """A part named ``crash`` that lives in this process alone."""
    module = ModuleType("faults.campaign.crash")
    for name, value in {"TITLE": "faults", "PROMISE": "a promise", **names}.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "faults.campaign.crash", module)


def test_a_part_that_raises_is_a_failure_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(**_: object) -> Outcome:
        raise KeyError("planted")

    planted(monkeypatch, run=run)
    found = parts._run("crash", False, 0, 1)
    assert found.outcome is None
    assert "KeyError: 'planted'" in found.failure


def test_a_part_gets_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def run(**options: object) -> Outcome:
        asked.append(options)
        return outcome("crash")

    planted(monkeypatch, run=run, extra=lambda found: f"{found.points} points")
    found = parts._run("crash", True, 5, 2)
    assert asked == [{"full": True, "seed": 5, "workers": 2}]
    assert found.extra == "3 points"
    assert found.good


def test_a_part_whose_process_is_killed_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "faults" / "campaign"  # the folders of tests are namespace packages, of which this is one more place
    place.mkdir(parents=True)
    kill = "import os, signal\nTITLE = PROMISE = ''\ndef run(**options):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    (place / "crash.py").write_text(kill)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = parts.run_apart("crash", full=False, seed=0, workers=1)
    assert found.outcome is None
    assert not found.good
    assert "BrokenProcessPool" in found.failure


@pytest.mark.parametrize(("results", "status"), [([result("crash")], 0), ([result("crash", bad=("x",))], 1), ([FAILED], 1)])
def test_the_exit_status_and_the_json_tell_what_happened(
    results: list[Result], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "reliability.md"
    document.write_text(DOCUMENT)
    monkeypatch.setattr(driver, "_OUT", tmp_path / "out")
    monkeypatch.setattr(driver, "_DOCUMENT", document)
    monkeypatch.setattr(driver, "available", lambda: ("crash",))
    monkeypatch.setattr(driver, "run_apart", lambda name, **_: results[0])
    assert driver.main(["--record", "--seed", "7"]) == status
    assert "part" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [part["part"] for part in found["parts"]] == [results[0].part]
    kept = "| crash | kept as it was |" in document.read_text()
    assert kept == (results[0].outcome is None)


def test_the_committed_document_has_a_place_for_every_table() -> None:
    text = driver._DOCUMENT.read_text(encoding="utf-8")
    filled = report.record(text, [result("peer", extra="| a |")], full=False, date="2026-01-31")
    assert "| a |" in filled
