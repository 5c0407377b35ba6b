"""A pool of rank processes that lives for the whole session, so that importing torch is paid once and not by every test."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["FINISH", "RankFailure", "RankPool"]

FINISH = b"finish"
"""Sent to a rank that has answered: all have, so it may leave its group."""

_START_SECS = 120.0
_GRACE_SECS = 10.0
"""What the other ranks have to answer once one has failed: its group is gone, so gloo tells them at once."""
_STACKS_SECS = 2.0
_POLL_SECS = 0.1
_TESTS = Path(__file__).resolve().parents[1]


class RankFailure(Exception):
    """One rank or more failed.

    Attributes:
        failures: rank -> its exception, or a text where there is none that could travel (it cannot be pickled, or the process died or hung
            and was killed). Deaths come first, then errors in the order in which they were raised, then hangs: the first is the likely
            cause, the others may be its consequences.
    """

    def __init__(self, message: str, failures: dict[int, BaseException | str]) -> None:
        super().__init__(message)
        self.failures = failures


class RankPool:
    """Up to ``max_ranks`` processes, each of which runs functions as one rank of a fresh gloo group.

    Processes are started when first needed. Every run has a store and a default process group of its own, the pool's working directory and
    environment, the test run's warning filters (a warning is an error), ``torch.manual_seed(0)`` and one torch thread. A thread that dies
    of an exception nobody read fails the run. A rank that dies or hangs is killed, with everything that it started, and replaced before
    the next run, as are the others of that run.

    Not thread-safe: one run at a time.
    """

    def __init__(self, max_ranks: int = 5) -> None:
        self.max_ranks = max_ranks
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            # Without it gloo looks the host's own name up, which not every machine can.
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._cwd = os.getcwd()
        self._ranks: dict[int, _Rank] = {}
        self._runs = itertools.count()
        self._store: Any = None

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout_secs: float = 120,
        group_timeout_secs: float | None = None,
        expendable: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Runs ``function(*args, **kwargs)`` on ranks 0 to ``world_size - 1`` of a fresh group and returns the results, by rank.

        The function learns its rank from ``torch.distributed``. It is sent by the path of its module and its name, arguments and results
        by pickle.

        Args:
            world_size: number of ranks, at most ``max_ranks``.
            function: defined at the top level of a module (a test module, too), or in a class there.
            timeout_secs: after this the ranks that have not answered are killed, with their stacks in the error.
            expendable: ranks that may die: their result is None then, and they alone are replaced.
            group_timeout_secs: timeout of the process group; longer than ``timeout_secs`` unless given, so that a hang shows its stacks.

        Raises:
            RankFailure: a rank raised (``BaseException`` and ``SystemExit`` included), died or hung.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size is {world_size}; this pool has 1 to {self.max_ranks} ranks")
        job = {
            **_address(function),
            "arguments": pickle.dumps((args, kwargs)),
            "run": f"run-{next(self._runs)}",
            "store_port": self._store_port(),
            "world_size": world_size,
            "group_timeout_secs": timeout_secs + 60 if group_timeout_secs is None else group_timeout_secs,
        }
        ranks = [self._rank(number) for number in range(world_size)]
        for rank in ranks:
            rank.wait_until_ready()
        for number, rank in enumerate(ranks):
            rank.send(pickle.dumps({**job, "rank": number}))
        return _Run(self, ranks, timeout_secs, frozenset(expendable)).results()

    def close(self) -> None:
        """Ends every process of the pool. Idempotent."""
        self.discard(self._ranks.values())
        self._store = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def discard(self, ranks: Iterable[_Rank]) -> None:
        """Kills these processes and what they started; the next run gets new ones."""
        for rank in list(ranks):
            rank.kill()
            self._ranks.pop(rank.number, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _rank(self, number: int) -> _Rank:
        if number in self._ranks and self._ranks[number].died() is not None:
            self.discard([self._ranks[number]])
        if number not in self._ranks:
            self._ranks[number] = _Rank(number, self._directory, self._cwd, self._environment)
        return self._ranks[number]

    def _store_port(self) -> int:
        """One store for all runs, in this process, which no rank can take down; runs are told apart by prefix."""
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)


class _Rank:
    """One process: its socket, its output and its end."""

    def __init__(self, number: int, directory: Path, cwd: str, environment: dict[str, str]) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        self._stacks = directory / f"stacks-{number}-{ours.fileno()}-{time.monotonic_ns()}"
        self._output = self._stacks.with_name(self._stacks.name.replace("stacks", "output"))
        start = "import sys; sys.path.insert(0, sys.argv[1]); from support.rank_process import main; main(int(sys.argv[2]), sys.argv[3])"
        with theirs, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                # -P: the working directory, which holds folders named planners and storage, stays off the path.
                [sys.executable, "-P", "-c", start, str(_TESTS), str(theirs.fileno()), str(self._stacks)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment,
                start_new_session=True,  # its process group holds all that it starts, and can be killed as one
            )
        self.connection = Connection(ours.detach())
        self._output_start = 0
        self._ready = False

    def wait_until_ready(self) -> None:
        """Waits for the imports of a new process, which are no part of any run's time."""
        if self._ready:
            return
        try:
            self._ready = self.connection.poll(_START_SECS) and pickle.loads(self.connection.recv_bytes()) == ("ready", None)
        except (EOFError, OSError):
            self._ready = False
        if not self._ready:
            raise RankFailure(f"rank {self.number} did not start: {self.died() or 'no answer'}\n{self.output()}", {})

    def send(self, message: bytes) -> None:
        self._output_start = self._output.stat().st_size
        with contextlib.suppress(OSError):  # it died: the wait for its answer says so, with the reason
            self.connection.send_bytes(message)

    def died(self) -> str | None:
        """How the process ended, or None while it runs. Leaves it unreaped, so that its number stays ours to signal."""
        info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        if info.si_code == os.CLD_EXITED:
            return f"its process ended with exit status {info.si_status}"
        return f"its process was killed by {signal.Signals(info.si_status).name}"

    def end(self) -> str:
        """How the process ended, once its socket is closed."""
        deadline = time.monotonic() + _STACKS_SECS
        while (text := self.died()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECS / 10)
        return text or "its process closed its socket, and lives"

    def stacks(self) -> str:
        """The stacks of all its threads now, unless the process cannot answer (it is stopped, say)."""
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECS
        text = ""
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
            before, text = text, self._stacks.read_text(encoding="utf-8", errors="replace") if self._stacks.exists() else ""
            if text and text == before:
                return text
        return text or "no stacks: the process does not answer signals\n"

    def output(self) -> str:
        """What it printed since the run began."""
        return self._output.read_bytes()[self._output_start :].decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


class _Run:
    """One function on some ranks: collects the answers, and ends what does not answer."""

    def __init__(self, pool: RankPool, ranks: list[_Rank], timeout_secs: float, expendable: frozenset[int] = frozenset()) -> None:
        self._pool = pool
        self._expendable = expendable
        self._ranks = ranks
        self._timeout_secs = timeout_secs
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, BaseException | str] = {}
        self._texts: dict[int, str] = {}
        self._failed_at_secs: dict[int, float] = {}
        self._reusable = False

    def results(self) -> list[Any]:
        try:
            self._reusable = self._collect() and self._finish()
        finally:
            if not self._reusable:  # dead or hung ranks, threads left behind by a failure, or an interrupt of this wait
                self._pool.discard(self._ranks)
        if self._failures:
            self._failures = {number: self._failures[number] for number in sorted(self._failures, key=self._failed_at_secs.__getitem__)}
            raise RankFailure(self._message(), self._failures)
        return [pickle.loads(self._results[rank.number]) for rank in self._ranks]

    def _finish(self) -> bool:
        """All ranks have answered: now each may take its group down, which would have failed those still at work."""
        for rank in self._living():
            rank.send(FINISH)
        return self._collect()

    def _living(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.died() is None or rank.number not in self._expendable]

    def _collect(self) -> bool:
        """One answer of every rank, or its death, or the deadline. False unless every process is fit for another run."""
        start = time.monotonic()
        waiting = {rank.connection: rank for rank in self._living()}
        fit, hurried = True, False
        limit_secs = self._timeout_secs
        while waiting:
            if self._failures and not hurried:
                hurried, limit_secs = True, min(limit_secs, time.monotonic() - start + _GRACE_SECS)
            remaining_secs = start + limit_secs - time.monotonic()
            if remaining_secs <= 0:
                break
            for connection in wait(list(waiting), timeout=min(remaining_secs, _POLL_SECS)):
                assert isinstance(connection, Connection)
                fit &= self._receive(waiting[connection])
                del waiting[connection]
            for rank in [rank for rank in waiting.values() if rank.died() is not None and not rank.connection.poll()]:
                fit &= self._lost(rank, f"{rank.died()}\n")
                del waiting[rank.connection]
        for rank in waiting.values():
            fit &= self._lost(rank, f"no answer after {limit_secs:.0f} s: it hung, and was killed\n{rank.stacks()}", math.inf)
        return fit

    def _receive(self, rank: _Rank) -> bool:
        try:
            kind, value, *rest = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            return self._lost(rank, f"{rank.end()}\n")
        if kind == "ok":
            self._results[rank.number] = value
        elif kind == "error":
            text, clean, self._failed_at_secs[rank.number] = rest
            self._failures[rank.number] = text if value is None else pickle.loads(value)
            self._texts[rank.number] = text
            return bool(clean)
        return True

    def _lost(self, rank: _Rank, text: str, at_secs: float = -math.inf) -> bool:
        if rank.number in self._expendable and rank.died() is not None:
            self._results[rank.number] = pickle.dumps(None)
            return True
        self._failed_at_secs[rank.number] = at_secs
        self._failures[rank.number] = self._texts[rank.number] = text
        return False

    def _message(self) -> str:
        parts = []
        outputs = {rank.number: rank.output() for rank in self._ranks}
        for number in self._failures:
            parts.append(f"rank {number} of {len(self._ranks)}: {self._texts[number]}")
            if outputs[number].strip():
                parts.append(f"output of rank {number}:\n{outputs[number]}")
        return "\n".join(parts)


def _address(function: Callable[..., Any]) -> dict[str, str]:
    """Where another process finds the function."""
    qualname = function.__qualname__
    if "<" in qualname:
        raise ValueError(f"{qualname} is not defined at the top level of a module: another process cannot find it")
    file = inspect.getsourcefile(function)
    assert file is not None
    return {"module": function.__module__, "qualname": qualname, "file": str(Path(file).resolve())}
