"""What a caller hands in to be saved or restored, by key, and how it becomes the state dict of a load."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from dcp_engine.errors import InvalidOptionError
from dcp_engine.train_state import PartOfState, TrainState

__all__ = ["STATE_KEY", "Parts"]

STATE_KEY: Final = "state"
"""Key of a state that is handed in without one."""


class Parts:
    """A state by its top-level keys: ``{"state": state}`` for a ``TrainState``, or anything else that has a state; a mapping as it is.

    Args:
        state: as the caller handed it in.

    Raises:
        InvalidOptionError: it is neither.

    Thread-safety: none.
    """

    def __init__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            strangers = [key for key in state if not isinstance(key, str)]
            if strangers:
                raise InvalidOptionError("a key of the state is no text", expected="str", found=repr(strangers[0])[:300])
            self.values: Mapping[str, Any] = state
        elif isinstance(state, Stateful):
            self.values = {STATE_KEY: state}
        else:
            raise InvalidOptionError(
                "this is no state",
                expected="a TrainState, a dict as dcp.save takes it, or an object with state_dict() and load_state_dict()",
                found=repr(state)[:300],
            )

    @property
    def whole_states(self) -> dict[str, TrainState]:
        """The training states among the values, by key; of parts the whole that they are of."""
        found = {key: value.whole if isinstance(value, PartOfState) else value for key, value in self.values.items()}
        return {key: value for key, value in found.items() if isinstance(value, TrainState)}

    @property
    def train_state(self) -> TrainState | None:
        """The training state, where there is one."""
        return next(iter(self.whole_states.values()), None)

    @property
    def is_partial(self) -> bool:
        """Whether a training state is there only in part: such a checkpoint is none to resume from."""
        return any(
            isinstance(value, PartOfState) and set(value.components) != set(value.whole.components) for value in self.values.values()
        )

    @property
    def components(self) -> dict[str, list[str]]:
        """Key of a training state -> its components that are there."""
        return {key: list(value.components) for key, value in self.values.items() if isinstance(value, PartOfState | TrainState)}

    def components_of(self, state: TrainState) -> list[str]:
        """The components of one of the training states that are there."""
        return next(self.components[key] for key, one in self.whole_states.items() if one is state)

    def narrowed(self, components: Collection[str]) -> Parts:
        """Only these components of the training state, and nothing else.

        Raises:
            InvalidOptionError: there is no training state, or it has no such component.
        """
        states = self.whole_states
        if len(states) != 1:
            raise InvalidOptionError("components are those of one TrainState", expected="a TrainState", found=f"{len(states)} of them")
        ((key, state),) = states.items()
        return Parts({key: PartOfState(state, components)})

    @property
    def keys_to_load(self) -> list[str] | None:
        """What the planner of a load has to be told where the checkpoint holds more than is wanted."""
        if not self.is_partial:
            return None
        parts = [f"{key}.{name}" for key, names in self.components.items() for name in names]
        return parts + [key for key in self.values if key not in self.components]

    def template(self, metadata: Metadata) -> dict[str, Any]:
        """A state dict to load a checkpoint into, which shares the tensors of this state.

        Raises:
            DcpEngineError kinds: of a training state that cannot tell its own.
        """
        for key, state in self.whole_states.items():
            state.prepare(metadata, under=key)
        return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in self.values.items()}

    def take(self, loaded: Mapping[str, Any]) -> None:
        """Take up what was loaded into :meth:`template`.

        Raises:
            DcpEngineError kinds: it does not fit.
        """
        for key, value in self.values.items():
            if isinstance(value, TrainState | PartOfState):
                value.take(loaded[key])  # what it finds is told by the report of the restore, once for all ranks
            elif isinstance(value, Stateful):
                value.load_state_dict(loaded[key])
            elif isinstance(self.values, dict):
                self.values[key] = loaded[key]

    def forget(self) -> None:
        """No load comes any more: the next ``state_dict()`` is one to save."""
        for state in self.whole_states.values():
            state.forget()
