"""A job is ended with all that it started, and the log of the rank that failed first is the one that is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dcp_engine.demo.launch import Launched, tail_of_failure


def write(path: Path, text: str, *, mtime_secs: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (mtime_secs, mtime_secs))


def test_first_rank_to_fail_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "torchrun.log", "launcher\n")
    for rank, mtime_secs in ((0, 200), (2, 100), (3, 300)):
        write(tmp_path / f"ranks/run/attempt_0/{rank}/error.json", "{}", mtime_secs=mtime_secs)
        write(tmp_path / f"ranks/run/attempt_0/{rank}/stderr.log", f"rank {rank}\n" * 50)
    log, tail = tail_of_failure(tmp_path, num_lines=2)
    assert log == tmp_path / "ranks/run/attempt_0/2/stderr.log"
    assert tail == "rank 2\nrank 2"


def test_launcher_is_shown_when_no_rank_left_word(tmp_path: Path) -> None:
    write(tmp_path / "torchrun.log", "a\nb\nc\n")
    assert tail_of_failure(tmp_path, num_lines=2) == (tmp_path / "torchrun.log", "b\nc")


def test_job_is_ended_on_the_way_out() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Launched(process) as job:
        assert job.exit_status() is None
    assert process.returncode == -15


def test_job_that_does_not_listen_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        Launched(process, stop_secs=0.2).stop()
        assert process.returncode == -9
