"""Deaths at true system calls, by strace where it is installed: a second opinion on the layer through which the others are put."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["Gate", "bypassed", "calls_in", "traced"]

Gate = Callable[[int], None]

_CALLS: Final = (
    "open",
    "openat",
    "close",
    "mkdir",
    "mkdirat",
    "rename",
    "renameat",
    "renameat2",
    "pwritev",
    "pwritev2",
    "pwrite64",
    "fsync",
    "unlink",
    "unlinkat",
    "rmdir",
    "getdents64",
    "flock",
)
_LINE = re.compile(r"^(\d+\s+)?(\w+)\(")
_ATTACH_SECS: Final = 10.0
# What the layer's methods become in the kernel, of those that change something.
_CHANGES: Final = {
    "mkdir": ("mkdir", "mkdirat"),
    "rename": ("rename", "renameat"),
    "exchange": ("renameat2",),
    "pwritev": ("pwritev", "pwritev2", "pwrite64"),
    "fsync": ("fsync",),
    "unlink": ("unlink", "unlinkat"),
    "rmdir": ("rmdir",),
}


@contextmanager
def traced(log: str, *, kill: tuple[str, int] | None = None) -> Iterator[Gate]:
    """A gate that has a process traced before it goes on. Where that cannot be, it goes on untraced.

    Args:
        log: file for the calls.
        kill: name and number of the call at whose entry the process gets SIGKILL.
    """
    tracers: list[subprocess.Popen[bytes]] = []

    def gate(pid: int) -> None:
        program = shutil.which("strace")
        if program is None:
            return
        inject = [] if kill is None else ["-e", f"inject={kill[0]}:signal=KILL:when={kill[1]}"]
        command = [program, "-f", "-qq", "-o", log, "-e", f"trace={','.join('?' + name for name in _CALLS)}", *inject, "-p", str(pid)]
        tracers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + _ATTACH_SECS
        while time.monotonic() < deadline and tracers[0].poll() is None and not _is_traced(pid):
            time.sleep(0.002)

    with contextlib.suppress(FileNotFoundError):
        os.unlink(log)
    try:
        yield gate
    finally:
        for tracer in tracers:
            tracer.wait()  # it ends with what it traces


def calls_in(log: str) -> list[Counter[str]]:
    """How often each thread made each call; empty where nothing was traced. A tracer counts for each thread apart."""
    threads: dict[str, Counter[str]] = {}
    with contextlib.suppress(FileNotFoundError), open(log, encoding="utf-8", errors="replace") as file:
        for match in filter(None, map(_LINE.match, file)):
            threads.setdefault(match[1] or "", Counter())[match[2]] += 1
    return list(threads.values())


def bypassed(true_calls: Iterable[Counter[str]], counted: Iterable[str]) -> list[str]:
    """Calls that change something and did not come through the layer, or came through it and were never made."""
    names = Counter(counted)
    total = sum(true_calls, Counter[str]())
    found = {name: sum(total[true] for true in trues) for name, trues in _CHANGES.items()}
    return [f"{name} was called {names[name]} times, and made {found[name]} times" for name in _CHANGES if names[name] != found[name]]


def _is_traced(pid: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
