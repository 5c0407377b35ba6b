"""Ends a process when the one that started it is gone: a launcher that was killed cannot end its ranks itself."""

from __future__ import annotations

import os
import threading
import time

__all__ = ["leave_with_parent"]

_POLL_SECS = 0.25


def leave_with_parent() -> None:
    """Begins to watch, in a thread of its own. Imports nothing that takes long: call it first."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leave-with-parent").start()
