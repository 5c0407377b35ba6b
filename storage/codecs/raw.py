"""The raw codec: the stored bytes are the bytes."""

from __future__ import annotations

from dcp_engine.errors import MalformedCheckpointError

__all__ = ["decode"]


def decode(stored: memoryview, out: memoryview) -> None:
    """Copy a block to its destination.

    Raises:
        MalformedCheckpointError: the lengths differ.
    """
    if len(stored) != len(out):
        raise MalformedCheckpointError("raw block has another length", expected=len(out), found=len(stored))
    out[:] = stored
