"""The command line answers at once, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(f"import sys; sys.argv = ['dcp-engine', *{list(arguments)!r}]; from dcp_engine.cli import main; main()")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    result = run(
        f"import atexit, sys; sys.argv = ['dcp-engine', *{arguments!r}]\n"
        "atexit.register(lambda: print('heavy:', sorted({'torch', 'numpy', 'matplotlib'} & sys.modules.keys())))\n"
        "from dcp_engine.cli import main; main()"
    )
    assert result.returncode == 0
    assert "heavy: []" in result.stdout
    assert "demo" in result.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_one_line(missing: str) -> None:
    result = run(
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name == {missing!r} else find(name, *a)\n"
        "from dcp_engine.cli import main; main()"
    )
    assert result.returncode == 1
    assert result.stderr == "dcp-engine: the command line needs typer and rich; install them with: pip install 'dcp-engine[cli]'\n"


def test_wrong_size_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call("demo", "--out", str(out), "--steps", "7", "--save-every", "2")
    assert result.returncode == 2
    assert "--steps is too small" in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    result = call("demo", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "--out is not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = call("demo", "--out", str(tmp_path / "file"))
    assert result.returncode == 2
    assert "--out cannot be used" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_json_in_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    result = call("demo", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "none/report.json"))
    assert result.returncode == 2
    assert "--json names a file in a folder that does not exist" in result.stderr
    assert not (tmp_path / "out").exists()
