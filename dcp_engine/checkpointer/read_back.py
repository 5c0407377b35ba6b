"""Whether a training state has taken up what was loaded: what it says of itself afterwards, held against what it was given. No I/O.

An object whose ``load_state_dict`` does nothing, or that something reset later in the load, looks restored to everybody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_engine.data import ResumableLoader, ResumableSampler, ResumableStream
from dcp_engine.data.progress import Cursor
from dcp_engine.train_state import Difference, TrainState, differences
from dcp_engine.train_state.labels import nest, part_of
from dcp_engine.train_state.packed import unpack
from dcp_engine.train_state.per_rank import PerRank, rank_of_name

__all__ = ["ReadBack", "read_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """What a restored state says of itself.

    Attributes:
        differences: values that are not those that were loaded.
        not_begun: labels of the optimizers that keep state for their parameters, and have none for any of them.
    """

    differences: tuple[Difference, ...] = ()
    not_begun: tuple[str, ...] = ()


def read_back(state: TrainState, loaded: Mapping[str, Any]) -> ReadBack:
    """Asks a restored state for its values.

    Not held against what was loaded: what this rank did not take by itself (``report.resized`` says what it took), the slots that an
    optimizer had not begun, and gradients; of our samplers and streams how far they are alone. A state inside an accumulation cycle that it
    would not save is not asked.

    Args:
        state: after the load.
        loaded: what it was given; may be a part of its components.
    """
    if not state.may_save() or state.report is None:
        return ReadBack()
    here = state.state_dict()
    resized = {one.key for one in state.report.resized if one.took != "by rank"}
    keys = [name for name in loaded if name != "grads" and name in here]
    expected = {name: _settled(state, name, loaded[name], here[name], resized) for name in keys}
    found = {name: _settled(state, name, here[name], loaded[name], resized) for name in keys}
    idle = tuple(label for label in state.parts("optimizer") if _is_idle(part_of(here["optimizer"], label)))
    return ReadBack(differences=differences(expected, found), not_begun=idle)


def _is_idle(optimizer: Mapping[str, Any]) -> bool:
    return bool(optimizer["state"]) and not any(slots for _, slots in optimizer["membership"].values())


def _settled(state: TrainState, component: str, value: Any, other: Any, resized: set[str]) -> Any:
    """The part of a component's state that both sides must share."""
    if component == "progress":
        return {name: part for name, part in value.items() if name != "world_size"}
    if component == "optimizer":
        labels = state.parts(component)
        parts = {label: _without_blanks(part_of(value, label)) for label in labels}
        return nest(parts)
    if component not in ("data", "ema", "extra", "rng", "scheduler", "scaler"):
        return value
    parts = {}
    for label, part in state.parts(component).items():
        key = f"{component}.{label}" if label else component
        if key in resized or isinstance(_source(part), ResumableSampler):  # of which the facts tell
            continue
        mine, theirs = part_of(value, label), part_of(other, label)
        if isinstance(part, PerRank):
            mine = {name: packed for name, packed in mine.items() if name in theirs and rank_of_name(name) is not None}
            if isinstance(_source(part.value), ResumableSampler | ResumableStream):
                mine = {name: _place(unpack(packed, key=key)) for name, packed in mine.items()}
        elif isinstance(_source(part), ResumableStream):
            mine = _place(unpack(mine, key=key))
        parts[label] = mine
    return nest(parts)


def _without_blanks(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Without the groups that parameters are in, which ``report.moved`` tells of."""
    slots = {name: names for name, (_, names) in optimizer["membership"].items()}
    state = {name: values for name, values in optimizer.get("state", {}).items() if slots.get(name)}
    return {**optimizer, "membership": slots, "state": state}


def _source(part: Any) -> Any:
    return part.source if isinstance(part, ResumableLoader) else part


def _place(state: Mapping[str, Any]) -> dict[str, int]:
    """How far a sampler or a stream is. The rest of its state is of the ranks and workers that it is dealt out to, which may be others."""
    if "lanes" not in state:
        return {name: state[name] for name in ("epoch", "offset", "samples_consumed")}
    cursors = (Cursor(*numbers) for lane in state["lanes"] for numbers in lane)
    return {"samples": state["samples_before"] + sum(cursor.num_drawn for cursor in cursors)}
