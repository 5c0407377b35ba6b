"""Whether the state that a planner holds is still that of the save which asks: a planner that is shared by saves at one time mixes them."""

from __future__ import annotations

import threading

from dcp_engine.errors import UsageError

__all__ = ["SaveTurns"]


class SaveTurns:
    """Numbers the saves of one planner. DCP makes all calls of one save, but for ``resolve_data``, in one thread: that tells them apart.

    Thread-safety: safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = 0
        self._of_thread = threading.local()

    def begin(self) -> None:
        """The calling thread begins a save."""
        with self._lock:
            self._newest += 1
            self._of_thread.number = self._newest

    def require_newest(self) -> None:
        """Nobody has begun another save since the calling thread began its own.

        Raises:
            UsageError: somebody has; what the planner holds is not this save's state any more.
        """
        if getattr(self._of_thread, "number", self._newest) != self._newest:
            raise UsageError(
                "the planner was given the state of another save while this one was under way",
                expected="one save at a time for each planner",
                remedy="give each save its own planner, or wait for the save before, as BackgroundSaver does",
            )
