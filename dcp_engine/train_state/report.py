"""What loading a ``TrainState`` found, beside what it restored."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Moved", "Resized", "TrainStateReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A parameter that is in another group of its optimizer than when it was saved: it trains on with that group's settings.

    Attributes:
        parameter: its name.
        optimizer: label of the optimizer; empty where there is one only.
        saved_group: index of the group that it was in.
        group: index of the group that it is in.
    """

    parameter: str
    optimizer: str
    saved_group: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A per-rank value that was saved by another number of ranks.

    Attributes:
        key: of the value.
        saved_world_size: ranks that saved it.
        world_size: ranks now.
        took: what this rank took: ``"by rank"``, ``"by function"``, or ``"nothing"``: it keeps the value it had.
        dropped: saved ranks whose values no rank took, of those that this rank has read.
    """

    key: str
    saved_world_size: int
    world_size: int
    took: str
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStateReport:
    """The outcome of one ``load_state_dict`` on this rank.

    Attributes:
        components: that were restored, in their order.
        moved: parameters that are in another group than when they were saved.
        unstarted: parameters whose optimizer had no state for them yet; it makes that at their first gradient.
        resized: per-rank values that were saved by another number of ranks.
        disagreements: what of the restored state does not belong to one step, in words.
    """

    components: tuple[str, ...]
    moved: tuple[Moved, ...] = ()
    unstarted: tuple[str, ...] = ()
    resized: tuple[Resized, ...] = ()
    disagreements: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What is worth a look, in words, one line each: all but ``unstarted``, which is no deviation."""
        return [
            *self.disagreements,
            *(f"{one.parameter} moved from group {one.saved_group} to {one.group}{_of(one.optimizer)}" for one in self.moved),
            *(
                f"{one.key} was saved by {one.saved_world_size} ranks and there are {one.world_size}: took {one.took}"
                + (f", dropped those of ranks {list(one.dropped)}" if one.dropped else "")
                for one in self.resized
            ),
        ]


def _of(label: str) -> str:
    return f" of optimizer {label!r}" if label else ""
