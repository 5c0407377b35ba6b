"""Values that every rank has its own of: their names, and which rank takes which when there are more or fewer ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dcp_engine.errors import InvalidOptionError, KeyMismatchError
from dcp_engine.train_state.report import Resized

__all__ = ["NOTHING", "PerRank", "choose", "name_of_rank", "rank_of_name", "ranks_to_read"]

OnResize = Callable[[Mapping[int, Any], int, int], Any]

NOTHING: Final = object()
"""Chosen where there is no value for a rank: it keeps what it has."""

_NAME = re.compile(r"rank-(\d{5,})\Z")


class PerRank:
    """A value that each rank keeps for itself: under one key the ranks' values would be taken for replicas, and all but one lost.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict`` (a data loader, say), whose state is stored; or any value that the
            format holds, which is stored as it is and replaced, in :attr:`value`, by a load.
        on_resize: for a load on another number of ranks: called with a dict of what each rank saved (a state, where the value has one) by
            rank, this rank and the world size; returns what this rank takes up. None: rank r takes what rank r saved; where there was no
            rank r it keeps what it has, and the report says so.

    Thread-safety: none.
    """

    def __init__(self, value: Any, *, on_resize: OnResize | None = None) -> None:
        if on_resize is not None and not callable(on_resize):
            raise InvalidOptionError("on_resize is not callable", found=repr(on_resize))
        self.value = value
        self.on_resize = on_resize
        self._is_stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))

    def state(self) -> Any:
        """What is stored for this rank."""
        return self.value.state_dict() if self._is_stateful else self.value

    def restore(self, state: Any) -> None:
        """Take up what :meth:`state` gave, here or on another rank."""
        if self._is_stateful:
            self.value.load_state_dict(state)
        else:
            self.value = state


def name_of_rank(rank: int) -> str:
    """The last element of the key under which a rank's value is stored."""
    return f"rank-{rank:05d}"


def rank_of_name(name: str) -> int | None:
    """The rank, or None for another name."""
    match = _NAME.match(name)
    return int(match.group(1)) if match and name_of_rank(int(match.group(1))) == name else None


def ranks_to_read(saved: Iterable[int], *, rank: int, world_size: int, wants_all: bool) -> tuple[int, ...]:
    """The saved ranks whose values a rank reads, ascending.

    On as many ranks each reads its own. On another number each reads all where a function needs them; else every ``world_size``-th from
    its own on, so that all are read by somebody: a value that nobody asks for is an unexpected key, and those that are dropped get named.
    """
    ordered = sorted(saved)
    if ordered == list(range(world_size)):
        return (rank,)
    return tuple(ordered) if wants_all else tuple(one for one in ordered if one % world_size == rank)


def choose(
    values: Mapping[int, Any], *, key: str, rank: int, world_size: int, saved_world_size: int, on_resize: OnResize | None
) -> tuple[Any, Resized | None]:
    """The value that a rank takes, and what is to be reported where there were more or fewer ranks.

    Args:
        values: by saved rank, those that :func:`ranks_to_read` named.
        key: of the value, for messages.
        rank: of the caller.
        world_size: ranks now.
        saved_world_size: ranks that saved.
        on_resize: of the :class:`PerRank`.

    Returns:
        The value or :data:`NOTHING`; None on as many ranks as saved.

    Raises:
        KeyMismatchError: there are as many ranks, and this one's value is missing.
    """
    if saved_world_size == world_size:
        if rank not in values:
            raise KeyMismatchError("this rank's value is missing", missing=(f"{key}.{name_of_rank(rank)}",), rank=rank)
        return values[rank], None
    dropped: tuple[int, ...] = ()
    if on_resize is not None:
        took, value = "by function", on_resize(values, rank, world_size)
    else:
        dropped = tuple(sorted(one for one in values if one >= world_size))
        fits = rank in values and rank < saved_world_size
        took, value = ("by rank", values[rank]) if fits else ("nothing", NOTHING)
    return value, Resized(key=key, saved_world_size=saved_world_size, world_size=world_size, took=took, dropped=dropped)
