"""What a stager tells of its last staging."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

__all__ = ["StagingReport"]


@dataclass(frozen=True, slots=True)
class StagingReport:
    """One staging.

    Attributes:
        waited_secs: waited for a free buffer.
        blocked_secs: from call to return, the waiting included. Copies from a device go on after that.
        num_bytes: of the buffer that the state takes.
        num_tensors: staged, ties counted for each key.
        num_slots: runs of memory that were copied.
        replanned: whether the layout differs from the last one's.
        content: digest of all tensors, None with ``verify_staging="off"``, or where copies from a device have failed; done when copies
            from devices are through.
    """

    waited_secs: float
    blocked_secs: float
    num_bytes: int
    num_tensors: int
    num_slots: int
    replanned: bool
    content: Future[int | None]
