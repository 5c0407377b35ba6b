"""What a load did: the record that a planner leaves behind for its caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Cast", "LoadReport"]


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor that was converted on load."""

    key: str
    stored: torch.dtype
    wanted: torch.dtype
    exact: bool
    """Whether every value of the stored dtype is one of the wanted dtype."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank loaded, and what no rank could.

    Thread-safety: immutable.
    """

    loaded: tuple[str, ...]
    """Keys of this rank's state that the checkpoint has, in the state's order."""
    missing: tuple[str, ...]
    """Keys that some rank's state has and the checkpoint lacks, sorted: left as they were. The same on all ranks."""
    unexpected: tuple[str, ...]
    """Keys of the checkpoint (renamed) that no rank's state has, sorted: ignored. The same on all ranks."""
    cast: tuple[Cast, ...]
    """Tensors of this rank that were converted."""
    renamed: tuple[tuple[str, str], ...]
    """(key of the checkpoint, key of the state) of loaded keys that differ."""
    num_tensor_bytes: int
    """Bytes of tensor elements that this rank asked of the reader, in the stored dtype."""
