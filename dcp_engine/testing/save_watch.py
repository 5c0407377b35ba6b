"""Stops a rank inside a save, whatever library saves: the interpreter tells of every file that is opened and of every rename.

``sys.addaudithook`` is asked before the call is made, in the thread that makes it. What another process of the rank's writes is not seen.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from dcp_engine.errors import StoppedOnPurposeError
from dcp_engine.testing.stops import BEFORE_PUBLISH, IN_SAVE, StopAt

__all__ = ["SaveWatch"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class SaveWatch:
    """Watches what this process writes below a folder.

    Args:
        root: the folder.
        stop: whose ``point`` or ``unfinished_save`` is watched for.
        current_step: the step that training is in.
        reached: called, in the thread that saves, at the stop's point.

    Thread-safety: :meth:`start` by one thread, once; the rest is safe.
    """

    def __init__(self, root: str, stop: StopAt, *, current_step: Callable[[], int], reached: Callable[[], None]) -> None:
        self._root = os.path.realpath(root)
        self._stop = stop
        self._current_step = current_step
        self._reached = reached
        self._first_seen: dict[str, int] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begins to watch. There is no way back: the process is to end soon."""
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES:
                self._writes(path)
        elif event in ("os.rename", "os.link") and self._stop.point == BEFORE_PUBLISH and self._is_late(arguments[0], self._stop.step):
            self._reached()

    def _writes(self, path: object) -> None:
        if self._stop.unfinished_save is not None and self._is_late(path, self._stop.unfinished_save):
            if threading.current_thread() is threading.main_thread():
                raise StoppedOnPurposeError(
                    "a save in the training thread cannot be left unfinished while training goes on",
                    step=self._current_step(),
                    remedy="save in the background, or stop the run inside the save: point='in_save'",
                )
            threading.Event().wait()  # for the end of the process
        if self._stop.point == IN_SAVE and self._is_late(path, self._stop.step):
            self._reached()

    def _is_late(self, path: object, step: int) -> bool:
        """Whether a path lies below the root, in what was begun in this step or later: an earlier save may end."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor
        place = os.path.abspath(os.fsdecode(path))
        if not place.startswith(self._root + os.sep):
            return False
        attempt = place[len(self._root) + 1 :].partition(os.sep)[0]
        with self._lock:
            return self._first_seen.setdefault(attempt, self._current_step()) >= step
