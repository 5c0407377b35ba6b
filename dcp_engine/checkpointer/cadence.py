"""When ``maybe_save`` saves, and what: a pure decision, and the memory of a save that was put off."""

from __future__ import annotations

from collections.abc import Mapping

from dcp_engine.errors import InvalidOptionError
from dcp_engine.train_state import TrainState, components_due

__all__ = ["Cadence"]

_ALL = "*"


class Cadence:
    """All ranks decide alike: by the step, and by where the counters stand in their accumulation cycle.

    Args:
        every: component -> interval in steps, ``"*"`` for the whole state. None: nothing is ever due.

    Thread-safety: none.
    """

    def __init__(self, every: Mapping[str, int] | None) -> None:
        self._every = every
        self._put_off: tuple[str, ...] = ()
        self._decided = 0

    @property
    def is_put_off(self) -> bool:
        """Whether a save waits for the end of an accumulation cycle."""
        return bool(self._put_off)

    def forget(self) -> None:
        """What was put off is saved with the rest, by another call."""
        self._put_off = ()

    def due(self, step: int, state: TrainState | None, *, is_saved: bool) -> tuple[str, ...]:
        """The components to save now: all of the state's, some, or none.

        Args:
            step: that training has reached. It may be asked about several times, once a micro-batch.
            state: None: one of which nothing is known, and which is saved as a whole.
            is_saved: it has been saved already.

        Raises:
            InvalidOptionError: no interval was given, or one of a component that the state lacks.
        """
        if self._every is None:
            raise InvalidOptionError(
                "there is no interval to save at",
                expected="Checkpointer(root, save_every=...) or when=...",
                remedy="or call save() where a save is wanted",
            )
        components = (_ALL,) if state is None else state.components
        due = self._put_off
        if step > 0 and step != self._decided and not is_saved:
            now = components_due(step, self._every, components=components)
            due = tuple(name for name in components if name in due or name in now)
        self._decided = step
        self._put_off = ()
        if due and state is not None and state.defers_saves and not state.may_save():
            self._put_off, due = due, ()
        return due
