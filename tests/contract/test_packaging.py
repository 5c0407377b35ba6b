"""The wheel holds every module under its import name, and works where a user's files have the names of our folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"dcp_engine": "dcp_engine", "planners": "dcp_engine/planners", "storage": "dcp_engine/storage"}

# The stock warning about a missing process group is the only one allowed.
STRICT = ["-W", "error", "-W", "ignore:torch.distributed is disabled:UserWarning"]
USE = """
import json, sys
import torch
import torch.distributed.checkpoint as dcp
import dcp_engine, dcp_engine.planners, dcp_engine.storage
from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter

saved = {"weight": torch.arange(1000.0), "step": 7}
dcp.save(saved, storage_writer=ShardWriter("step-00000001"), planner=BalancedSavePlanner())
loaded = {"weight": torch.zeros(1000), "step": 0}
dcp.load(loaded, storage_reader=ShardReader("step-00000001"), planner=ReshardLoadPlanner())
assert torch.equal(loaded["weight"], saved["weight"]) and loaded["step"] == 7
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "dcp_engine"}))
print(json.dumps(sorted({"storage", "planners"} & set(sys.modules))))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def pip(*arguments: str | Path, cwd: Path) -> str:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves build/ in the source folder and would find an older one there."""
    directory = tmp_path_factory.mktemp("packaging")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, directory / "source" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, directory / "source")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", directory, ".", cwd=directory / "source")
    (found,) = directory.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A directory into which nothing but the wheel is installed."""
    target = wheel.parent / "site"
    pip("install", "--no-deps", "--no-index", "--target", target, wheel, cwd=wheel.parent)
    return target


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory whose own storage.py and planners.py fail when imported."""
    for name in ("storage.py", "planners.py"):
        (tmp_path / name).write_text(f"raise SystemExit('the {name} of the working directory was imported')\n")
    return tmp_path


def test_the_wheel_holds_every_module_under_its_import_name_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{home}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, home in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".c"} or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    # The compiled loops are optional, and there where a compiler is.
    assert held - {f"dcp_engine/storage/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"} == expected


def test_the_metadata_says_what_it_needs_and_under_which_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(info).decode())
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    needed = {requirement for requirement in metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement}
    assert {name.split(">")[0].split("<")[0] for name in needed} == {"torch", "numpy", "fsspec", "msgpack", "zstandard", "xxhash"}
    assert {"torch<3,>=2.11"} <= needed
    assert (metadata["Requires-Python"], metadata["License-Expression"], len(licences)) == ("<3.14,>=3.11", "BSD-3-Clause", 1)


def test_it_saves_and_loads_where_files_have_the_names_of_our_folders(site: Path, directory: Path) -> None:
    output = run(sys.executable, *STRICT, "-c", USE, cwd=directory, PYTHONPATH=str(site))
    files, shadowing = (json.loads(line) for line in output.splitlines()[-2:])
    assert {"dcp_engine", "dcp_engine.planners", "dcp_engine.storage"} <= set(files)
    assert [name for name, file in files.items() if not Path(file).is_relative_to(site)] == []
    assert shadowing == []


def test_the_command_answers_from_there(site: Path, directory: Path) -> None:
    output = run(sys.executable, site / "bin" / "dcp-engine", "--help", cwd=directory, PYTHONPATH=str(site))
    assert "demo" in output
