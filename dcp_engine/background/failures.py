"""What a failed save means for whoever waits for it: one typed error, with the rank on which it began."""

from __future__ import annotations

import copy
import traceback

from torch.distributed.checkpoint.api import CheckpointException

from dcp_engine.errors import BackgroundSaveError, DcpEngineError

__all__ = ["first_failure", "one_error"]


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Of several ranks' failures that of the lowest rank with an error of the engine's own, since the others are often its consequences,
    else the lowest rank's; with its rank."""
    failures = sorted((rank, wrapped[0]) for rank, wrapped in error.failures.items())
    return next(((rank, failure) for rank, failure in failures if isinstance(failure, DcpEngineError)), failures[0])


def one_error(error: BaseException, *, path: str | None, step: int | None) -> DcpEngineError:
    """The error to raise for what the steps of a save raised.

    Of several ranks' failures it is the first (:func:`first_failure`). The original is its ``__cause__``.
    """
    if isinstance(error, DcpEngineError):
        _forget_frames(error)
        return error
    if isinstance(error, CheckpointException):
        rank, first = first_failure(error)
        if isinstance(first, DcpEngineError):
            found: DcpEngineError = copy.copy(first)
            found.rank = rank if found.rank is None else found.rank
        else:
            found = BackgroundSaveError(
                "a rank failed to save", path=path, step=step, rank=rank, phase=str(error.args[0]), found=f"{type(first).__name__}: {first}"
            )
    else:
        found = BackgroundSaveError(
            "the save was broken off",
            path=path,
            step=step,
            found=f"{type(error).__name__}: {error}",
            remedy="a rank may have died, or the process group was destroyed: look at the other ranks' logs; nothing was published here",
        )
    found.__cause__ = error
    _forget_frames(found)
    return found


def _forget_frames(error: BaseException) -> None:
    """Let go of what the frames of the tracebacks hold, which is the staged state: a handle that is kept would keep it."""
    pending: list[BaseException | None] = [error]
    seen = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        pending += (one.__cause__, one.__context__)
        if isinstance(one, CheckpointException):
            pending += (wrapped[0] for wrapped in one.failures.values())
