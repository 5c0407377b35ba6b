"""What a save notes of a training state, in plain values beside the user's metadata, for the checks after a restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dcp_engine.checkpointer.cut import Fact, facts_of
from dcp_engine.checkpointer.probe import ProbeRecord
from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.train_state import TrainState

__all__ = ["Recorded", "layout_of", "recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one rank says of the state that it saves, or has restored.

    In a checkpoint lies that of rank 0: facts are the same on all ranks that have them.

    Attributes:
        facts: of :func:`~dcp_engine.checkpointer.cut.facts_of`.
        components: of the state, in its order.
        world_size: number of ranks.
        layout: of :func:`layout_of`.
        probe: what the probe gave; None without one.
    """

    facts: Mapping[str, Fact]
    components: tuple[str, ...]
    world_size: int
    layout: tuple[str, ...]
    probe: ProbeRecord | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint's metadata."""
        return {
            "facts": dict(self.facts),
            "components": list(self.components),
            "world_size": self.world_size,
            "layout": list(self.layout),
            "probe": None if self.probe is None else self.probe.as_dict(),
        }

    @classmethod
    def from_dict(cls, value: object) -> Recorded:
        """The inverse of :meth:`as_dict`. Entries that it does not know, of a later release, are passed over.

        Raises:
            MalformedCheckpointError: this is nothing that :meth:`as_dict` gives.
        """
        if isinstance(value, Mapping):
            facts, world_size, probe = value.get("facts"), value.get("world_size"), value.get("probe")
            components, layout = value.get("components"), value.get("layout")
            if (
                isinstance(facts, Mapping)
                and all(isinstance(name, str) and isinstance(fact, int | float | str) for name, fact in facts.items())
                and _are_texts(components)
                and _are_texts(layout)
                and isinstance(world_size, int)
            ):
                return cls(
                    facts=dict(facts),
                    components=tuple(components),
                    world_size=world_size,
                    layout=tuple(layout),
                    probe=None if probe is None else ProbeRecord.from_dict(probe),
                )
        raise MalformedCheckpointError(
            "the facts in the checkpoint's metadata are none", expected="those of a save", found=repr(value)[:300]
        )


def recorded(
    state: TrainState | None, step: int, *, world_size: int, probe: ProbeRecord | None = None, wait_for_device: bool = False
) -> Recorded:
    """What this rank says of a state.

    Args:
        state: None: a state of which nothing is known.
        step: of the checkpoint.
        world_size: number of ranks.
        probe: what the probe gave.
        wait_for_device: as for :func:`~dcp_engine.checkpointer.cut.facts_of`.
    """
    return Recorded(
        facts=facts_of(state, step, wait_for_device=wait_for_device),
        components=() if state is None else state.components,
        world_size=world_size,
        layout=() if state is None else layout_of(state),
        probe=probe,
    )


def layout_of(state: TrainState) -> tuple[str, ...]:
    """How the model lies over the ranks: each way in which a parameter of this rank is placed, once, in words, sorted.

    The same number of ranks can hold a model in other ways, whose sums round otherwise.
    """
    modules: dict[str, nn.Module] = state.parts("model")
    return tuple(sorted({_placed(parameter) for module in modules.values() for parameter in module.parameters()}))


def _placed(parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "whole"
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    return ", ".join(
        f"{place} over {name or 'dim'} of {size}" for place, name, size in zip(parameter.placements, names, sizes, strict=True)
    )


def _are_texts(value: object) -> TypeGuard[list[str] | tuple[str, ...]]:
    return isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
