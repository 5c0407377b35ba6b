"""Folders that cannot be measured are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.preflight import space_needed


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the one line says."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == ""
    assert line.startswith("python -m benchmarks: error: ")
    return line.removeprefix("python -m benchmarks: error: ")


@pytest.mark.parametrize("option", ["--disk", "--out"])
def test_a_file_is_no_folder(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    folders = {"--disk": str(tmp_path / "d"), "--out": str(tmp_path / "o"), option: str(file)}
    said = refused(["--quick", "--memory", "", *(word for pair in folders.items() for word in pair)], capsys)
    assert said == f"{option} {file}: cannot be written to (File exists); name a folder that can"


def test_a_file_system_that_takes_no_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["--quick", "--memory", "", "--out", str(tmp_path), "--disk", "/proc/self"], capsys)
    assert said.startswith("--disk /proc/self: cannot be written to (")


def test_a_folder_without_the_space_that_the_rows_need_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "F1", "--memory", "", "--out", str(tmp_path), "--disk", str(tmp_path), "--state-mb", str(10**9)]
    said = refused(arguments, capsys)
    assert "F1 need about 1250000.0 GB" in said
    assert "name another folder, fewer --rows or a smaller --state-mb" in said


def test_rows_run_one_after_the_other_so_the_hungriest_decides() -> None:
    assert space_needed(["F1"], 1_000_000_000, quick=False) == 1_250_000_000
    assert space_needed(["F1", "F2", "F3"], 1_000_000_000, quick=False) == 8_500_000_000
    assert space_needed(["F4"], 1_000_000_000, quick=False) == 3 << 30
    assert space_needed(["F4"], 1_000_000_000, quick=True) == 3 << 26
