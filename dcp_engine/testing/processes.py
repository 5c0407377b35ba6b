"""Fresh processes for the ranks of legs, without the seconds that each would take to import torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcp_engine.errors import ClosedError, LegFailedError

__all__ = ["RankProcesses"]

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dcp_engine.testing.template import main; main()"
_START_SECS = 300.0
_END_SECS = 10.0


class RankProcesses:
    """Starts ranks by forking a process that has imported torch and the engine, and has run nothing. Use it as a context manager, for one
    comparison or for many: ``assert_resume_equal(..., processes=processes)``.

    The ranks have this process's ``sys.path`` and environment as they were when it was made, with one thread for OpenMP.

    Thread-safety: none.
    """

    def __init__(self) -> None:
        self._statuses: dict[int, int] = {}
        self._pending = b""
        environment = {
            "OMP_NUM_THREADS": "1",  # the ranks share the cores
            # Without it gloo looks the host's own name up, which not every machine can.
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        }
        self._template = subprocess.Popen(
            # -P: files in the working directory must not pass for modules.
            [sys.executable, "-P", "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, and the ranks end in order
        )

    def start(self, job: Path, *, log: Path, environment: Mapping[str, str]) -> int:
        """Starts one rank; returns the number of its process, which leads a process group.

        Args:
            job: file with what it is to do.
            log: file for what it prints.
            environment: variables besides those of this object.

        Raises:
            LegFailedError: the process that ranks are forked from has died.
            ClosedError: this was closed before.
        """
        if self._template.stdin is None or self._template.stdin.closed:
            raise ClosedError("the rank processes are closed", remedy="use them inside their with block")
        order = {"job": str(job), "log": str(log), "environment": dict(environment)}
        with suppress(BrokenPipeError):  # told below
            self._template.stdin.write(json.dumps(order).encode() + b"\n")
            self._template.stdin.flush()
        deadline = time.monotonic() + _START_SECS
        while time.monotonic() < deadline:
            for answer in self._answers(1.0):
                if answer.get("job") == order["job"]:
                    return int(answer["pid"])
        raise LegFailedError("the process that ranks are forked from does not answer", found=f"within {_START_SECS:g} s")

    def status(self, pid: int) -> int | None:
        """The exit status of a rank, negative for the signal that it died of; None while it runs."""
        for _ in self._answers(0.0):
            pass
        return self._statuses.get(pid)

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to a rank that still runs, and to what it started."""
        if self.status(pid) is None:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    def close(self) -> None:
        """Ends every rank. Idempotent."""
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        with suppress(BrokenPipeError):
            self._template.stdin.close()
        try:
            self._template.wait(timeout=_END_SECS)
        except subprocess.TimeoutExpired:
            self._template.kill()
            self._template.wait()
        self._template.stdout.close()

    def _answers(self, timeout_secs: float) -> list[dict[str, Any]]:
        """What the template has said since, once there is anything or the time is over. Ends of ranks are noted."""
        assert self._template.stdout is not None
        descriptor = self._template.stdout.fileno()
        found: list[dict[str, Any]] = []
        while select.select([descriptor], [], [], 0.0 if found else timeout_secs)[0]:
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise LegFailedError(
                    "the process that ranks are forked from has died",
                    found=f"exit status {self._template.wait()}",
                    remedy="what it printed is on standard error",
                )
            *lines, self._pending = (self._pending + data).split(b"\n")
            found += [json.loads(line) for line in lines]
            timeout_secs = 0.0
        self._statuses.update({answer["pid"]: answer["status"] for answer in found if "status" in answer})
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
