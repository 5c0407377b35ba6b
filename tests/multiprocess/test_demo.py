"""The demo as a user starts it, and each part of the state left out of the checkpoints."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.ranks import RankPool

from dcp_engine.demo.compare import Comparison, compare
from dcp_engine.demo.records import read_records
from dcp_engine.demo.schedule import DemoConfig, Leg
from dcp_engine.demo.training import Job, train

SMALL = ("--steps", "8", "--save-every", "2", "--width", "32", "--layers", "1", "--window-bytes", "32", "--batch", "4")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dcp_engine.cli", "demo", *SMALL, *arguments]


def processes_of(out: Path) -> list[str]:
    """Command lines of the processes that were started to write below ``out``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has ended
                continue
            if str(out) in line:
                found.append(line)
    return found


def run_demo(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    result = subprocess.run(
        command("--out", str(tmp_path / "out"), "--json", str(tmp_path / "report.json"), *arguments),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert (tmp_path / "report.json").exists(), result.stdout + result.stderr
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    return result, report


@pytest.mark.slow
@pytest.mark.timeout(600)  # five jobs of up to four processes, on cores that other tests use, too
def test_run_that_was_killed_equals_the_run_that_never_stopped(tmp_path: Path) -> None:
    result, report = run_demo(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "The proof holds" in result.stdout
    assert (report["holds"], report["fault"], report["problems"]) == (True, None, [])
    assert report["crash"]["rank"] == 3
    assert report["crash"]["complete_steps"] == [2]
    # The ranks that live on remove the attempt when they learn of the death, unless they are ended first.
    assert all(name.startswith(".tmp-step-00000004-") for name, _ in report["crash"]["leftovers"])
    killed = [row for row in report["rows"] if row["leg"] == "killed"]
    assert [row["step"] for row in killed[:4]] == [1, 2, 3, 4]
    assert [(row["leg"], row["step"]) for row in report["rows"] if row["leg"] != "killed"] == [
        *(("same-4", step) for step in (3, 4)),
        *(("on-2", step) for step in (3, 4)),
        *(("on-4", step) for step in (5, 6, 7, 8)),
    ]
    assert all(row["loss_difference"] == row["grad_norm_difference"] == 0 for row in report["rows"] if row["leg"] in ("killed", "same-4"))
    assert [leg["start"]["resumed_from"] for leg in report["legs"]] == [None, None, 2, 2, 4]
    assert [leg["start"]["world_size"] for leg in report["legs"]] == [4, 4, 4, 2, 4]
    assert [save["step"] for save in report["saves"]] == [2, 4, 6, 8]
    assert all(0 < save["stall_secs"] <= save["save_secs"] for save in report["saves"])
    published = sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir() if not path.name.startswith((".tmp-", ".trash-")))
    assert published == ["step-00000002", "step-00000004", "step-00000006", "step-00000008"]
    assert (tmp_path / "out/losses.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out/report.json").read_text()) == report


@pytest.mark.slow
@pytest.mark.timeout(600)  # five jobs of up to four processes, on cores that other tests use, too
def test_lost_rng_fails_the_proof_and_is_named(tmp_path: Path) -> None:
    result, report = run_demo(tmp_path, "--drop", "rng")
    assert result.returncode == 1
    assert "The proof fails: rng" in result.stdout
    assert (report["holds"], report["fault"]) == (False, "rng")
    assert [leg["name"] for leg in report["legs"]] == ["reference", "killed", "same-4"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    # A shell that starts the tests in the background has them ignore SIGINT, and what they start, too.
    heed = functools.partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(command("--out", str(out)), stdout=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=heed) as demo:
        deadline = time.monotonic() + 120
        # The driver, torchrun and four ranks.
        while len(processes_of(out)) < 6:
            assert demo.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert "Interrupted" in output
    # A rank whose launcher had to be killed notices within a quarter of a second.
    deadline = time.monotonic() + 30
    while processes_of(out):
        assert time.monotonic() < deadline, processes_of(out)
        time.sleep(0.1)


def train_and_compare(root: Path, drop: str) -> Comparison:
    """On every rank: trains four steps without a stop, and two and two with a checkpoint between them; compares."""
    import torch.distributed as dist

    config = DemoConfig(steps=4, save_every=1, width=16, layers=1, window_bytes=16, batch=4)
    ranks = dist.get_world_size()
    legs = (
        Leg(name="reference", title="", num_ranks=ranks, resumed_from=None, last_step=4, bitwise=True),
        Leg(name="first", title="", num_ranks=ranks, resumed_from=None, last_step=2, save_every=2, bitwise=True),
        Leg(name="second", title="", num_ranks=ranks, resumed_from=2, last_step=4, bitwise=True),
    )
    for number, leg in enumerate(legs):
        job = Job(
            root=str(root),
            records=str(root / f"{leg.name}.jsonl"),
            witness=str(root / "crash.json"),
            seed=number // 2,
            num_steps=config.steps,
            last_step=leg.last_step,
            save_every=leg.save_every,
            die_at=0,
            resume=leg.resumed_from is not None,
            drop=drop,
            width=config.width,
            layers=config.layers,
            window_bytes=config.window_bytes,
            batch=config.batch,
        )
        train(job)
        dist.barrier()
    reference, *tested = [(leg, read_records(str(root / f"{leg.name}.jsonl"))) for leg in legs]
    return compare(reference[1], tested, None)


@pytest.mark.parametrize("drop", ["", "rng", "optimizer", "scheduler", "data"])
def test_part_that_is_left_out_is_named(ranks: RankPool, tmp_path: Path, drop: str) -> None:
    for comparison in ranks.run(2, train_and_compare, tmp_path, drop):
        assert comparison.fault == (drop or None)
        assert comparison.holds is not bool(drop)
        faults = [(row.leg, row.step) for row in comparison.rows if row.fault]
        # Lost moments are felt one step later: the first loss and gradient need only the weights.
        assert faults == {"": [], "optimizer": [("second", 4)]}.get(drop, [("second", 3), ("second", 4)])
