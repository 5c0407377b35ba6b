"""From the command line to tables, JSON, pictures, the README and the record of runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks.__main__ as program
from benchmarks import engines
from benchmarks.__main__ import main
from benchmarks.engines import version_of
from benchmarks.harness import Case, System
from benchmarks.options import Options
from benchmarks.readme import fill, markers
from benchmarks.results import CaseResult, Claim
from benchmarks.rows import ROWS

STATE_BYTES = 8_000_000
ALWAYS = {
    "dcp-engine raw",
    "dcp-engine raw, unchecked",
    "DCP",
    "torch.save",
    "torch.load mmap",
    "plain pread, 2 threads",
    "memcpy, 2 threads",
}
ABSENT = {"safetensors", "torch-checkpointing", "torchsnapshot"}


class Instant:
    """A row that takes no time; where it fails, its one system does."""

    NAME = "F9"
    TITLE = "instant"

    def __init__(self, failure: str = "") -> None:
        self._failure = failure

    def _run(self) -> dict[str, float]:
        if self._failure:
            raise OSError(self._failure)
        return {"secs": 2.0}

    def cases(self, options: Options) -> Iterator[Case]:
        yield Case(name="c", systems=[System(name="ours", role="ours", run=self._run)], rounds=1, measure_memory=False)

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        ours = results[0].best("ours")
        return [Claim("seconds", 2.5, ours.time.median if ours and ours.time else None, at_most=True)]

    def notes(self, options: Options) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def _loud_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run silences its process."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)


def test_runs_on_record_add_up_in_the_readme_around_what_is_written_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "README.md"
    document.write_text("By hand.\n" + "\n".join(markers("F9")) + "\nBy hand, too.\n", encoding="utf-8")
    monkeypatch.setattr(program, "_HOME", str(tmp_path))
    monkeypatch.setattr(program, "_README", str(document))
    monkeypatch.setitem(ROWS, "F9", Instant())
    arguments = ["--rows", "F9", "--memory", "", "--out", str(tmp_path / "out"), "--disk", str(tmp_path / "disk"), "--readme"]
    earlier = tmp_path / "results" / "2026-01-01T000000Z.json"
    for said in ("holds in 1 run of 1", "holds in 2 runs of 2"):
        assert main(arguments) == 0
        text = document.read_text(encoding="utf-8")
        assert said in text
        assert str(tmp_path) not in text
        assert fill(text, "F9", "") == "By hand.\n{}\n\n\n\n{}\nBy hand, too.\n".format(*markers("F9"))
        assert (tmp_path / "pictures" / "F9.png").exists()
        (recorded,) = [path for path in (tmp_path / "results").iterdir() if path != earlier]
        run = json.loads(recorded.read_text(encoding="utf-8"))
        assert (run["figures"], run["code"]) == ({"F9": {"seconds": 2.0}}, "unknown")
        # The next run of this test may come in the same second.
        earlier.write_text(json.dumps({**run, "date": "2026-01-01T00:00:00Z"}), encoding="utf-8")
        recorded.unlink()


class Impossible(Instant):
    """A row that this machine cannot measure."""

    def cases(self, options: Options) -> Iterator[Case]:
        return iter(())

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        return []

    def notes(self, options: Options) -> list[str]:
        return ["not measured: no device"]


def test_a_row_that_cannot_be_measured_here_keeps_what_the_readme_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "README.md"
    kept = fill("\n".join(markers("F9")), "F9", "measured on another machine")
    document.write_text(kept, encoding="utf-8")
    monkeypatch.setattr(program, "_HOME", str(tmp_path))
    monkeypatch.setattr(program, "_README", str(document))
    monkeypatch.setitem(ROWS, "F9", Impossible())
    assert main(["--rows", "F9", "--memory", "", "--out", str(tmp_path / "out"), "--disk", str(tmp_path / "disk"), "--readme"]) == 0
    assert document.read_text(encoding="utf-8") == kept
    assert not (tmp_path / "results").exists()
    assert "- not measured: no device" in capsys.readouterr().out


def test_an_engine_of_ours_without_a_figure_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ROWS, "F9", Instant("the disk is gone"))
    assert main(["--quick", "--rows", "F9", "--memory", "", "--out", str(tmp_path / "out"), "--disk", str(tmp_path / "disk")]) == 1
    assert "one of our own engines has no figure: OSError: the disk is gone" in capsys.readouterr().err


def test_a_row_runs_without_its_peers_and_leaves_tables_figures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "version_of", lambda name: None if name in ABSENT else version_of(name))
    arguments = ["--quick", "--rows", "F2", "--rounds", "1", "--state-mb", str(STATE_BYTES // 10**6), "--memory", ""]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--disk", str(tmp_path / "disk")]) == 0

    document = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert str(tmp_path) not in json.dumps(document)
    (row,) = document["rows"]
    warm, cold = row["cases"]
    for case in (warm, cold):
        systems = {system["name"]: system for system in case["systems"]}
        assert {name for name, system in systems.items() if len(system["secs"]) == 1} == ALWAYS
        assert {name: system["failure"] for name, system in systems.items() if system["failure"]} == {
            name: f"not installed: pip install {name}" for name in ABSENT
        }
    peaks = {system["name"]: system["peak_bytes"] for system in warm["systems"]}
    assert {name for name, peak in peaks.items() if peak is not None} == ALWAYS
    # torch.load without mmap holds a second state while it copies; plain pread reads into the targets.
    assert peaks["torch.save"] > 0.9 * STATE_BYTES > peaks["plain pread, 2 threads"]
    assert (tmp_path / "out" / "F2.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "disk").iterdir()) == []
    shown = capsys.readouterr().out
    assert "### F2: load" in shown
    assert "not installed: pip install torchsnapshot" in shown
