"""Starts one job through torchrun, watches it, and ends it with all its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Launched", "launch", "tail_of_failure"]


class Launched:
    """A running job. Use it as a context manager: on the way out the job is ended, whatever happened. Not thread-safe.

    Args:
        process: torchrun, which ends its ranks when it is told to end; when it is killed, the ranks notice by themselves.
        stop_secs: how long it may take to end before it is killed.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, stop_secs: float = 5.0) -> None:
        self._process = process
        self._stop_secs = stop_secs

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def exit_status(self) -> int | None:
        """The exit status of torchrun; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ends the job if it still runs, and waits for it."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=self._stop_secs)
        except subprocess.TimeoutExpired:
            pass  # it does not listen: killed below
        finally:
            # Also when a second Ctrl-C ends the waiting.
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()


def launch(folder: Path, *, num_ranks: int, arguments: Mapping[str, str | int | bool]) -> Launched:
    """Starts the training script on ``num_ranks`` ranks.

    Args:
        folder: for the logs of this job: ``torchrun.log`` and, per rank, files below ``ranks``.
        num_ranks: processes.
        arguments: options of the training script; True is a flag that is given, False one that is not.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0"]
    command += ["--nproc-per-node", str(num_ranks), "--log-dir", str(folder / "ranks"), "--redirects", "3"]
    command += ["-m", "dcp_engine.demo.train"]
    for name, value in arguments.items():
        if value is not False:
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    environment = {
        # Without it gloo looks the host's own name up, which not every machine can.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **os.environ,
        # The ranks share the cores.
        "OMP_NUM_THREADS": "1",
        # Files in the working directory must not pass for modules.
        "PYTHONSAFEPATH": "1",
    }
    with open(folder / "torchrun.log", "wb") as log:
        # A session of its own, so that Ctrl-C reaches the driver alone and the job ends in order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    return Launched(process)


def tail_of_failure(folder: Path, *, num_lines: int = 30) -> tuple[Path, str]:
    """The log that tells why a job failed, and its last lines: of the rank that failed first, or of torchrun if none left word.

    torchrun gives every rank an ``error.json`` to write when it raises; the oldest one belongs to the rank that the others only followed.
    """
    errors = sorted(folder.glob("ranks/**/error.json"), key=lambda path: path.stat().st_mtime_ns)
    log = errors[0].with_name("stderr.log") if errors else folder / "torchrun.log"
    if not log.exists():
        log = folder / "torchrun.log"
    with open(log, encoding="utf-8", errors="replace") as file:
        return log, "".join(deque(file, maxlen=num_lines)).rstrip()
