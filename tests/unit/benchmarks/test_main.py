"""One row from the command line to tables, JSON and a picture."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.__main__ import main
from benchmarks.engines import version_of

STATE_BYTES = 8_000_000
ALWAYS = {"dcp-engine raw", "DCP", "torch.save", "torch.load mmap", "plain pread, 2 threads", "memcpy, 2 threads"}
ABSENT = {"safetensors", "torch-checkpointing", "torchsnapshot"}


def test_a_row_runs_without_its_peers_and_leaves_tables_figures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)  # a run silences the process
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
