"""Threads that may be in one of torch's calls when the interpreter ends: what comes back from one then ends the process by SIGABRT.

They are daemons, since what hangs must not keep a process from exiting. So they are waited for, and not for ever: after all that was
registered with ``atexit`` later than this module, so that whoever tells them to end has done so.
"""

from __future__ import annotations

import atexit
import threading

__all__ = ["await_at_exit"]

_waits: list[tuple[threading.Thread, float]] = []


def await_at_exit(thread: threading.Thread, wait_secs: float) -> None:
    """Has the interpreter wait for a thread, before it ends, for so many seconds at most. Thread-safe."""
    _waits[:] = [*(wait for wait in _waits if wait[0].is_alive() or wait[0].ident is None), (thread, wait_secs)]


def _leave() -> None:
    for thread, wait_secs in list(_waits):
        thread.join(wait_secs)


atexit.register(_leave)
