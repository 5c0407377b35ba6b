"""The driver's exit status, and what it does after a job that failed or broke the proof; the jobs themselves are played."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dcp_engine.demo import runner
from dcp_engine.demo.records import RecordWriter, SaveRecord, StartRecord, StepRecord
from dcp_engine.demo.runner import run_demo
from dcp_engine.demo.schedule import DemoConfig
from dcp_engine.errors import InvalidOptionError

CONFIG = DemoConfig(steps=8, save_every=2)
Change = Callable[[str, StepRecord], StepRecord]


class PlayedJob:
    """What ``launch`` returns, for a job that has ended already."""

    def __init__(self, status: int) -> None:
        self._status = status

    def __enter__(self) -> PlayedJob:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def exit_status(self) -> int:
        return self._status


class Stage:
    """Plays the jobs: writes the records of a good one, changed at will; keeps the steps that it published."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, change: Change = lambda name, record: record, failing: str = "") -> None:
        self.played: list[str] = []
        self.published: list[int] = []
        self._change = change
        self._failing = failing
        monkeypatch.setattr(runner, "launch", self.launch)
        monkeypatch.setattr("dcp_engine.storage.steps.committed_steps", lambda root: sorted(self.published))

    def launch(self, folder: Path, *, num_ranks: int, arguments: Mapping[str, str | int | bool]) -> PlayedJob:
        self.played.append(folder.name)
        if folder.name == self._failing:
            (folder / "torchrun.log").write_text("ValueError: the reason\n")
            return PlayedJob(1)
        resumed_from = max(self.published) if arguments["resume"] else None
        writer = RecordWriter(str(arguments["records"]))
        writer.write(
            StartRecord(world_size=num_ranks, layout="L", resumed_from=resumed_from, num_parameters=1, corpus_bytes=1, load_secs=0.0)
        )
        for step in range((resumed_from or 0) + 1, int(arguments["die-at"] or arguments["last-step"]) + 1):
            record = StepRecord(step=step, loss=9.0 - step, grad_norm=1.0, lr=(0.1,), batch=(1,), draws="r")
            writer.write(self._change(folder.name, record))
            if arguments["save-every"] and step % int(arguments["save-every"]) == 0 and step != arguments["die-at"]:
                self.published.append(step)
                writer.write(SaveRecord(step=step, path=f"p{step}", save_secs=1.0, stall_secs=0.1, raw_bytes=3, stored_bytes=2))
        if arguments["die-at"]:
            Path(str(arguments["witness"])).write_text('{"rank": 3, "num_tensors": 4, "num_handed_over": 2}')
        return PlayedJob(1 if arguments["die-at"] else 0)


def run(out: Path, json_path: Path | None = None) -> tuple[int, str]:
    stream = io.StringIO()
    return run_demo(CONFIG, out, json_path=json_path, console=Console(file=stream, width=120)), stream.getvalue()


def test_good_jobs_are_a_proof_and_the_report_is_written_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = Stage(monkeypatch)
    status, text = run(tmp_path / "out", tmp_path / "report.json")
    assert status == 0
    assert "The proof holds" in text
    assert stage.played == ["reference", "killed", "same-4", "on-2", "on-4"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads((tmp_path / "out/report.json").read_text())
    assert report["holds"] is True
    assert (tmp_path / "out/losses.png").exists()


def test_first_job_that_breaks_the_proof_is_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = Stage(monkeypatch, change=lambda name, record: replace(record, draws="other") if name == "same-4" else record)
    status, text = run(tmp_path / "out")
    assert status == 1
    assert "The proof fails: rng" in text
    assert stage.played == ["reference", "killed", "same-4"]


def test_job_that_fails_ends_the_demo_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = Stage(monkeypatch, failing="on-2")
    status, text = run(tmp_path / "out")
    assert status == 3
    assert "The job 'on-2' failed with exit status 1" in text
    assert "ValueError: the reason" in text
    assert stage.played[-1] == "on-2"


def test_job_that_should_have_been_killed_and_failed_otherwise_is_no_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Stage(monkeypatch, failing="killed")
    status, text = run(tmp_path / "out")
    assert status == 3
    assert "ValueError: the reason" in text


def test_interrupt_has_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*args: object, **kwargs: object) -> PlayedJob:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "launch", interrupted)
    status, text = run(tmp_path / "out")
    assert status == 130
    assert "Interrupted" in text


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InvalidOptionError, match="not empty"):
        run(tmp_path)
