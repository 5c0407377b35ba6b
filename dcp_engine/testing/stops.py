"""Where a run is stopped and how, and which legs follow from that. Pure: no I/O and no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dcp_engine.errors import InvalidOptionError

__all__ = ["AFTER_STEP", "BEFORE_PUBLISH", "IN_SAVE", "SAVE_POINTS", "End", "Layout", "LegPlan", "StopAt", "plan_legs"]

End = Literal["stop", "exception", "sigkill", "sigterm"]

AFTER_STEP: Final = "after_step"
"""The point at which ``RunContext.record`` returns."""
IN_SAVE: Final = "in_save"
"""The first file that is opened for writing below the root from a step on."""
BEFORE_PUBLISH: Final = "before_publish"
"""The first rename below the root from a step on: all files of the save are written, and none has its name yet."""
SAVE_POINTS: Final = (IN_SAVE, BEFORE_PUBLISH)

_ENDS: Final = ("stop", "exception", "sigkill", "sigterm")


@dataclass(frozen=True, slots=True)
class StopAt:
    """One stop.

    Attributes:
        step: number of the step, as ``RunContext.record`` gets it.
        point: place in that step: ``"after_step"``; a name that the run passes to ``RunContext.point``, ``"after_backward"`` for instance;
            ``"in_save"`` or ``"before_publish"``: inside the first save that begins in this step or later.
        end: ``"stop"``: the run is told to leave, as ``RunContext.steps`` does; ``"exception"``: one is raised at the point; ``"sigkill"``:
            the process is killed there; ``"sigterm"``: it gets the signal, and goes on or dies as its handler has it.
        ranks: to which it happens; None: to all. When some were killed, the others have a while to end, as under torchrun.
        unfinished_save: step from which on saves in other threads come no further than to their first file, so that the stop finds them
            unfinished. None: saves are left alone.
        resumes_at: step of the checkpoint that the next leg must start from; 0: it must start afresh, since the stop comes before the first
            save; None: any step, but no fresh start.

    Raises:
        InvalidOptionError: these do not go together; says which do.
    """

    step: int
    point: str = AFTER_STEP
    end: End = "stop"
    ranks: tuple[int, ...] | None = None
    unfinished_save: int | None = None
    resumes_at: int | None = None

    def __post_init__(self) -> None:
        for name in ("step", "unfinished_save", "resumes_at"):
            value, least = getattr(self, name), 0 if name == "resumes_at" else 1
            if not (value is None and name != "step") and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidOptionError(f"{name} of a stop is no step", expected=f"an int of {least} or more", found=repr(value))
        if self.end not in _ENDS:
            raise InvalidOptionError("a run cannot be ended so", expected=f"one of {list(_ENDS)}", found=repr(self.end))
        if not isinstance(self.point, str) or not self.point:
            raise InvalidOptionError("the point of a stop is no name", expected="'after_step', 'in_save' or a name", found=repr(self.point))
        if self.end == "stop" and self.point != AFTER_STEP:
            raise InvalidOptionError(
                "a run is told to leave after a step, not inside one",
                expected=f"point {AFTER_STEP!r}, or another end than 'stop'",
                found=f"point {self.point!r}",
            )
        if self.end == "exception" and self.point in SAVE_POINTS:
            raise InvalidOptionError(
                "an exception inside a save would be the save's own failure",
                expected="end 'sigkill' or 'sigterm' at this point",
                found=f"point {self.point!r}",
            )
        if self.ranks is not None and (not self.ranks or any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in self.ranks)):
            raise InvalidOptionError("ranks of a stop are none", expected="None or a tuple of ranks", found=repr(self.ranks))

    def targets(self, world_size: int) -> tuple[int, ...]:
        """The ranks to which it happens."""
        return tuple(range(world_size)) if self.ranks is None else self.ranks

    def __str__(self) -> str:
        where = f"step {self.step}" if self.point == AFTER_STEP else f"step {self.step} {self.point}"
        whom = "" if self.ranks is None else f" of rank {', '.join(map(str, self.ranks))}"
        return f"{self.end} at {where}{whom}" + (f", save of {self.unfinished_save} unfinished" if self.unfinished_save else "")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one leg is laid out over processes.

    Attributes:
        world_size: ranks, each a process of its own on this machine.
        name: for the run, which may lay its model out by it; two layouts are the same topology if all of this is equal.
        init_group: whether the default process group is made (gloo) before the run begins. False: the environment of torchrun is set, and
            the run makes the group or does without one.

    Raises:
        InvalidOptionError: there is no such number of ranks.
    """

    world_size: int
    name: str = ""
    init_group: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise InvalidOptionError("a layout has no such number of ranks", expected="an int of 1 or more", found=repr(self.world_size))

    def __str__(self) -> str:
        return self.name or f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegPlan:
    """One part of the run under test, from a start to a stop or to the end.

    Attributes:
        name: of it and of its folder.
        layout: of its ranks.
        stops: what stops it; empty: it runs to the end.
        resumes: whether a leg was there before it.
        resumes_at: step that it must start from, 0 for a fresh start; None: any but a fresh start.
        bitwise: neither its topology nor that of any leg before it is another than the straight run's.
    """

    name: str
    layout: Layout
    stops: tuple[StopAt, ...] = ()
    resumes: bool = False
    resumes_at: int | None = None
    bitwise: bool = True

    @property
    def title(self) -> str:
        """How it ends, in words."""
        return "; ".join(map(str, self.stops)) or "runs to its end"


def plan_legs(stop_at: Sequence[int | StopAt | Sequence[StopAt]], layouts: Sequence[int | Layout]) -> tuple[LegPlan, ...]:
    """The legs of the run under test.

    Args:
        stop_at: for each leg but the last a step (a clean stop after it), a stop, or several stops of different ranks.
        layouts: of each leg, or one for all of them; a number stands for so many ranks.

    Raises:
        InvalidOptionError: there is no stop, the layouts are not as many as the legs, or a leg has no such rank.
    """
    stops = [_stops_of(entry) for entry in stop_at]
    places = [Layout(layout) if not isinstance(layout, Layout) else layout for layout in layouts]
    if not stops:
        raise InvalidOptionError("the run is stopped nowhere", expected="stop_at with one stop or more", found="an empty list")
    if len(places) == 1:
        places *= len(stops) + 1
    if len(places) != len(stops) + 1:
        raise InvalidOptionError(
            "the layouts are not those of the legs", expected=f"1, or {len(stops) + 1}: one more than stops", found=f"{len(places)}"
        )
    legs: list[LegPlan] = []
    for number, layout in enumerate(places):
        mine = stops[number] if number < len(stops) else ()
        before = stops[number - 1] if number else ()
        if any(rank >= layout.world_size for stop in mine for rank in stop.ranks or ()):
            raise InvalidOptionError(f"leg {number + 1} has no such rank", expected=f"below {layout.world_size}", found=str(mine[0].ranks))
        legs.append(
            LegPlan(
                name=f"leg-{number + 1}",
                layout=layout,
                stops=mine,
                resumes=number > 0,
                resumes_at=next((stop.resumes_at for stop in before if stop.resumes_at is not None), None),
                bitwise=all(one == places[0] for one in places[: number + 1]),
            )
        )
    return tuple(legs)


def _stops_of(entry: int | StopAt | Sequence[StopAt]) -> tuple[StopAt, ...]:
    if isinstance(entry, StopAt):
        return (entry,)
    if isinstance(entry, Sequence) and entry and all(isinstance(one, StopAt) for one in entry):
        return tuple(entry)
    if isinstance(entry, int):
        return (StopAt(entry),)
    raise InvalidOptionError("this is no stop", expected="a step, a StopAt, or a list of StopAt for one leg", found=repr(entry)[:300])
