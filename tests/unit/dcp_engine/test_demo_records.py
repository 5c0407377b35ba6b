"""Records come back as they were written, while they are still being written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_engine.demo.records import LegRecords, RecordWriter, SaveRecord, StartRecord, StepRecord, read_records

START = StartRecord(world_size=4, layout="FSDP2", resumed_from=None, num_parameters=7, corpus_bytes=9, load_secs=0.0)
STEP = StepRecord(step=1, loss=0.1 + 0.2, grad_norm=1 / 3, lr=(1e-3,), batch=(3, 1), draws="b", values={"text": "c"})
SAVE = SaveRecord(step=1, path="p", save_secs=0.5, stall_secs=0.25, raw_bytes=2, stored_bytes=1)


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")
    writer = RecordWriter(path)
    for record in (START, STEP, SAVE):
        writer.write(record)
    assert read_records(path) == LegRecords(START, (STEP,), (SAVE,))


def test_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(str(path))
    writer.write(START)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"kind": "step", "st')
    assert read_records(str(path)) == LegRecords(START, (), ())


def test_file_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert read_records(str(tmp_path / "none")) == LegRecords(None, (), ())


def test_records_of_another_job_are_not_overwritten(tmp_path: Path) -> None:
    path = str(tmp_path / "records.jsonl")
    RecordWriter(path).write(START)
    with pytest.raises(FileExistsError):
        RecordWriter(path)
