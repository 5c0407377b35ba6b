"""The demo's report tells the outcome in every form: table, JSON, picture, exit status."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dcp_engine.demo.compare import Comparison, Crash
from dcp_engine.demo.picture import draw_losses
from dcp_engine.demo.records import LegRecords, SaveRecord, StartRecord, StepRecord
from dcp_engine.demo.report import Outcome, print_outcome, write_json
from dcp_engine.demo.schedule import DemoConfig, Drop, Leg
from dcp_engine.testing.compare import Row

REFERENCE = Leg(name="reference", title="never stops", num_ranks=4, resumed_from=None, last_step=2, bitwise=True)
KILLED = Leg(name="killed", title="killed in a save", num_ranks=4, resumed_from=None, last_step=2, save_every=1, die_at=2, bitwise=True)
START = StartRecord(world_size=4, layout="FSDP2+TP 2x2", resumed_from=None, num_parameters=10, corpus_bytes=99, load_secs=0.0)
STEPS = tuple(StepRecord(step=step, loss=5.0 - step, grad_norm=1.0, lr=(0.1,), batch=(1,), draws="r") for step in (1, 2))
SAVE = SaveRecord(step=1, path="/run/step-00000001", save_secs=0.25, stall_secs=0.03, raw_bytes=3_000_000, stored_bytes=2_000_000)
CRASH = Crash(
    rank=3,
    num_tensors=10,
    num_handed_over=5,
    exit_status=1,
    leftovers=((".tmp-step-00000002-00/model-00003.shard", 4096), (".tmp-step-00000002-00/model-00001.shard", 9000)),
    complete_steps=(1,),
)


def row(step: int, *, leg: str = "killed", difference: float = 0.0, fault: str | None = None) -> Row:
    return Row(
        leg=leg,
        layout="FSDP2+TP 2x2",
        step=step,
        loss=5.0 - step,
        reference_loss=5.0 - step,
        loss_difference=difference,
        grad_norm_difference=0.0,
        tolerance=0.0,
        fault=fault,
        reason="",
    )


def outcome(tmp_path: Path, comparison: Comparison, *, drop: Drop | None = None) -> Outcome:
    return Outcome(
        config=DemoConfig(steps=8, save_every=2, drop=drop),
        out=tmp_path,
        legs=((REFERENCE, LegRecords(START, STEPS, ())), (KILLED, LegRecords(START, STEPS, (SAVE,)))),
        crash=CRASH,
        comparison=comparison,
        picture=tmp_path / "losses.png",
        wall_secs=12.0,
    )


GOOD = Comparison(rows=(row(1), row(2)), fault=None, problems=())
BAD = Comparison(rows=(row(1), row(2, difference=0.5, fault="rng")), fault="rng", problems=("rng: step 2 differs",))


def printed(result: Outcome) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_outcome(console, result)
    return console.export_text()


def test_table_holds_step_layout_losses_and_figures_of_the_saves(tmp_path: Path) -> None:
    text = printed(outcome(tmp_path, GOOD))
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "killed", "FSDP2+TP", "2x2", "4.00000", "4.00000", "0", "0"] in lines
    assert ["1", "killed", "250", "ms", "30", "ms", "3.00", "MB", "2.00", "MB", "1.50"] in lines
    assert "The proof holds (12 s)." in text
    assert "model-00003.shard with 4096 bytes" in text
    assert "/run/step-00000001" in text
    assert "--drop rng" in text


def test_an_attempt_that_the_other_ranks_removed_is_told_as_that(tmp_path: Path) -> None:
    result = outcome(tmp_path, GOOD)
    assert result.crash is not None
    text = " ".join(printed(replace(result, crash=replace(result.crash, leftovers=()))).split())
    assert "The other ranks learned of it and removed the attempt; complete were steps 1." in text


def test_failure_is_named_and_fits_a_narrow_terminal(tmp_path: Path) -> None:
    comparison = replace(BAD, rows=(*BAD.rows, row(2, leg="same-4", difference=0.5, fault="scheduler")))
    text = printed(outcome(tmp_path, comparison, drop=Drop.RNG))
    lines = [line.split() for line in text.splitlines()]
    assert ["2", "same-4", "FSDP2+TP", "2x2", "3.00000", "3.00000", "5e-01", "0", "scheduler"] in lines
    assert "The proof fails: rng" in text
    assert "rng: step 2 differs" in text
    assert "rng was left out of the checkpoints on purpose" in text
    assert "The proof holds" not in text


def test_json_says_the_same(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", outcome(tmp_path, BAD, drop=Drop.RNG))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["holds"], report["fault"], report["problems"]) == (False, "rng", ["rng: step 2 differs"])
    assert report["config"]["drop"] == "rng"
    assert [(entry["step"], entry["loss_difference"], entry["fault"]) for entry in report["rows"]] == [(1, 0.0, None), (2, 0.5, "rng")]
    assert report["saves"][0]["ratio"] == 1.5
    assert report["legs"][0]["steps"][1]["loss"] == 3.0
    assert report["crash"]["complete_steps"] == [1]


def test_numbers_that_json_cannot_hold_become_names(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", outcome(tmp_path, replace(GOOD, rows=(row(1, difference=math.nan), row(2, difference=math.inf)))))
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert [entry["loss_difference"] for entry in report["rows"]] == ["nan", "inf"]


@pytest.mark.parametrize("loss", [4.5, math.nan])
def test_picture_is_drawn_whatever_the_losses_are(tmp_path: Path, loss: float) -> None:
    killed = LegRecords(START, (STEPS[0], replace(STEPS[1], loss=loss)), (SAVE,))
    draw_losses(tmp_path / "losses.png", [(REFERENCE, LegRecords(START, STEPS, ())), (KILLED, killed)], drop=Drop.DATA)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
