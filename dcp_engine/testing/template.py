"""The process that ranks are forked from: it has imported what takes seconds to import, and has one thread.

Started by :mod:`dcp_engine.testing.processes`. A line on its standard input is a job: a JSON object with ``job`` and ``log`` (paths) and
``environment``. Lines on its standard output are answers: ``{"job", "pid"}`` of a rank that was started, ``{"pid", "status"}`` of one that
has ended. Each rank leads a process group of its own. At the end of its input all are killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = ["main"]

_POLL_SECS = 0.02
_IMPORTED_ONCE = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "dcp_engine.background",
    "dcp_engine.data",
    "dcp_engine.storage",
    "dcp_engine.train_state",
)


def main() -> None:
    """Serves jobs, and in each forked process does one."""
    for name in _IMPORTED_ONCE:
        import_module(name)
    import torch

    from dcp_engine.testing.rank_process import run_job

    # The first optimizer of a process makes torch import its compiler, which takes another second.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    job = _serve()
    if job is not None:
        run_job(job)


def _serve() -> str | None:
    """Until the input ends: None. In a forked process: the path of its job."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what prints is no answer
    ranks: set[int] = set()
    pending = b""
    while True:
        if select.select([0], [], [], _POLL_SECS)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    os.close(answers)
                    _become_rank(order)
                    return str(order["job"])
                ranks.add(pid)
                _answer(answers, {"job": order["job"], "pid": pid})
        for pid in list(ranks):
            if (status := _ended(pid)) is not None:
                ranks.remove(pid)
                _answer(answers, {"pid": pid, "status": status})
    for pid in ranks:
        _kill_group(pid)
    return None


def _become_rank(order: dict[str, Any]) -> None:
    os.setsid()  # its process group holds all that it starts, and can be killed as one
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    os.environ.update(order["environment"])


def _ended(pid: int) -> int | None:
    """The exit status of a rank that has ended, negative for a signal; None while it runs. What it started is killed."""
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    _kill_group(pid)  # before it is reaped: until then its number is its own
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it is not its leader yet, or has no other members
        os.killpg(pid, signal.SIGKILL)


def _answer(descriptor: int, answer: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the end of the input comes next
        os.write(descriptor, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit("started by dcp_engine.testing alone")
