"""The alarm that rings where steps advance and the tensors that are saved do not."""

from __future__ import annotations

import warnings
from collections import deque
from concurrent.futures import Future

__all__ = ["UnchangedAlarm", "UnchangedStateWarning"]

_TO_CALLER = 3
"""Frames from the warning to whoever called the saver."""


class UnchangedStateWarning(UserWarning):
    """Two checkpoints of different steps hold the same tensors: training may not be training what is saved."""


class UnchangedAlarm:
    """Compares the digests of one staged state after the other, as they come: those of states on devices only when they have been copied.

    Thread-safety: none; the futures may be completed by any thread.
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[int, Future[int | None]]] = deque()
        self._last: tuple[int, int] | None = None

    def add(self, step: int | None, content: Future[int | None]) -> None:
        """A state was staged.

        Args:
            step: of training; a state whose step is unknown is not compared.
            content: digest of its tensors; None where there is none.
        """
        if step is not None:
            self._coming.append((step, content))

    def ring(self) -> None:
        """Warn of each state that came since the last call and is the one before it. Waits for none."""
        while self._coming and self._coming[0][1].done():
            step, future = self._coming.popleft()
            content = future.result()
            if content is None:
                continue
            last, self._last = self._last, (step, content)
            if last is not None and last[1] == content and step > last[0]:
                warnings.warn(
                    f"the tensors staged for step {step} are those of step {last[0]}: is the optimizer stepping the model that is saved?",
                    UnchangedStateWarning,
                    stacklevel=_TO_CALLER,
                )
