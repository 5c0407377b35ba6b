"""How a failure to stage on one rank reaches all ranks: as a value that fails in DCP's own planning step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch.distributed as dist

from dcp_engine.errors import DcpEngineError, StagingError

__all__ = ["STAGING_FAILED", "StagingFailure", "failed_state", "failures_in", "state_for_all_ranks", "unexpected", "untold"]

STAGING_FAILED = "staging failed"
"""Key of the only value in the state that a failed staging returns."""


class StagingFailure:
    """Raises its error when a planner, any planner, asks what is to be written.

    A stager that raises leaves the other ranks waiting in DCP's ``gather`` until the group's timeout. A planner's error is gathered, and
    every rank gets it at once; so that is where the error is raised.

    Args:
        error: what went wrong, with its rank in it.
    """

    def __init__(self, error: DcpEngineError) -> None:
        self.error = error

    def __create_write_items__(self, fqn: str, object: Any) -> NoReturn:
        raise self.error

    def __create_chunk_list__(self) -> NoReturn:
        raise self.error

    def __get_tensor_shard__(self, index: Any) -> NoReturn:
        raise self.error


def failed_state(error: DcpEngineError) -> dict[str, Any]:
    """A state that can only fail."""
    return {STAGING_FAILED: StagingFailure(error)}


def state_for_all_ranks(error: DcpEngineError) -> dict[str, Any] | None:
    """A state that can only fail, where this rank is one of several that may wait for it; None without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    error.rank = dist.get_rank() if error.rank is None else error.rank
    return failed_state(error)


def failures_in(state: dict[str, Any]) -> Iterator[DcpEngineError]:
    """The errors in a staged state, for whoever wants them before planning."""
    for value in state.values():
        if isinstance(value, StagingFailure):
            yield value.error


def unexpected(error: Exception) -> StagingError:
    """The typed error for whatever a class in the state, or a device, has raised."""
    return StagingError(
        "the state cannot be staged",
        found=f"{type(error).__name__}: {error}",
        remedy="look at its cause: a class in the state, or the device, has failed",
    )


def untold(error: Exception, key: str | None) -> DcpEngineError:
    """The typed error for what an object in the state raised when it was asked for its own: one of the engine's stays what it is."""
    if not isinstance(error, DcpEngineError):
        return StagingError("an object in the state failed to tell its own", tensor=key, found=f"{type(error).__name__}: {error}")
    error.tensor = key if error.tensor is None else error.tensor
    return error
