"""Components at intervals of their own: weights often, everything now and then."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dcp_engine.errors import InvalidOptionError, KeyMismatchError
from dcp_engine.train_state.state import TrainState

__all__ = ["PartOfState", "components_due"]


def components_due(step: int, every: Mapping[str, int], *, components: Collection[str]) -> tuple[str, ...]:
    """The components to save after ``step``: all where an interval of the rest is over, else those whose own is.

    Args:
        step: 1 or more.
        every: component -> interval in steps. ``"*"``: of a full save.
        components: of the state, in their order.

    Raises:
        InvalidOptionError: an interval below 1, or of a component that the state lacks.
    """
    for name, interval in every.items():
        if name != "*" and name not in components:
            raise InvalidOptionError(f"there is no component {name!r} to save at intervals", expected=f"'*' or one of {list(components)}")
        if interval < 1:
            raise InvalidOptionError(f"the interval of {name!r} is below 1", expected="1 or more", found=interval)
    if "*" in every and step % every["*"] == 0:
        return tuple(components)
    return tuple(name for name in components if name in every and step % every[name] == 0)


class PartOfState:
    """Some components of a ``TrainState``, as a ``Stateful``: to save weights between full saves, or to take weights alone.

    To load it from a checkpoint that holds more, the planner has to be told: ``ReshardLoadPlanner(keys=["state.model"])``. A full state is
    not loaded from a checkpoint of a part: keys are missing.

    Args:
        state: the whole.
        components: names of :attr:`TrainState.components`. ``progress`` is no part of its own; name it where it is wanted.

    Raises:
        InvalidOptionError: the state has no such component.

    Thread-safety: none.
    """

    def __init__(self, state: TrainState, components: Collection[str]) -> None:
        unknown = sorted(set(components) - set(state.components))
        if unknown or not components:
            raise InvalidOptionError("the state has no such components", expected=f"some of {list(state.components)}", found=unknown)
        self._state = state
        self._components = tuple(components)

    @property
    def whole(self) -> TrainState:
        """The state that it is a part of."""
        return self._state

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components."""
        return self._components

    def state_dict(self) -> dict[str, Any]:
        """The state of the components."""
        whole = self._state.state_dict()
        return {name: whole[name] for name in self._components}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the components, and leave the others as they are.

        Raises:
            KeyMismatchError: one is missing.
        """
        self._state.load_state_dict(self._completed(state_dict))

    def take(self, state_dict: Mapping[str, Any]) -> None:
        """:meth:`load_state_dict` for a caller that tells what was found itself."""
        self._state.take(self._completed(state_dict))

    def _completed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """With the other components as they are."""
        missing = tuple(sorted(set(self._components) - state_dict.keys()))
        if missing:
            raise KeyMismatchError("components are missing", missing=missing)
        return {**self._state.state_dict(), **{name: state_dict[name] for name in self._components}}
