"""Records come back as they were written, bit for bit, while they are still being written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_engine.testing.records import RecordWriter, StepRecord, read_records

FULL = StepRecord(
    step=1,
    loss=0.1 + 0.2,
    grad_norm=float("inf"),
    lr=(1e-3, 1 / 3),
    scaler={"scale": 8.0, "_growth_tracker": 1},
    batch=(3, 1),
    draws="d",
    generators={"torch": "t"},
    counters={"step": 1},
    values={"x": None, "y": True},
    state={"model.w": "m"},
    at_secs=12.5,
)


def test_records_come_back_with_their_types(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")
    writer = RecordWriter(path)
    for record in (FULL, StepRecord(step=2, batch="digest")):
        writer.write(record)
    assert read_records(path) == (FULL, StepRecord(step=2, batch="digest"))


def test_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    RecordWriter(str(path)).write(FULL)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "lo')
    assert read_records(str(path)) == (FULL,)


def test_file_that_is_not_there_is_empty_and_one_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")
    assert read_records(path) == ()
    RecordWriter(path)
    with pytest.raises(FileExistsError):
        RecordWriter(path)
