"""What must hold after any fault: no descriptor or thread is left, steps are whole, and an error says what failed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from faults.campaign.faulty_calls import ERRNOS, Fault
from faults.campaign.ranks_in_turn import merged, same_state, state_of
from support.engine import load

from dcp_engine import verify_checkpoint
from dcp_engine.errors import DcpEngineError

__all__ = ["BrokenError", "check_told", "must_be_told", "nothing_left", "snapshot", "whole"]

_FILES = frozenset({"MANIFEST", "COMPLETE", *(f"{part}-0000{rank}.shard" for part in ("model", "optimizer", "state") for rank in (0, 1))})


class BrokenError(Exception):
    """A promise does not hold; the text says which."""


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Raises :class:`BrokenError` where a block leaves descriptors or threads behind."""
    before = (set(os.listdir("/proc/self/fd")), threading.active_count())
    yield
    fds = set(os.listdir("/proc/self/fd"))
    if len(fds) > len(before[0]):
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds - before[0] if os.path.lexists(f"/proc/self/fd/{fd}")]
        raise BrokenError(f"descriptors are left open: {names}")
    if threading.active_count() > before[1]:
        raise BrokenError(f"threads are left: {threading.enumerate()}")


def snapshot(path: Path) -> dict[str, bytes] | None:
    """Content of every file of a step, or None where there is none."""
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else None


def whole(path: Path, step: int, world_size: int) -> bool:
    """Whether a path holds exactly the step that was saved with this number, by verifying and by loading."""
    if verify_checkpoint(path, threads=1).faults:
        return False
    template = merged([state_of(step, rank, filled=False) for rank in range(world_size)])
    return same_state(load(template, path), merged([state_of(step, rank) for rank in range(world_size)]))


def check_told(error: BaseException, fault: Fault) -> None:
    """Raises :class:`BrokenError` unless an error is ours and says what failed."""
    if not isinstance(error, DcpEngineError):
        raise BrokenError(f"an error that is not of the engine: {error!r}")
    if error.path is None:
        raise BrokenError(f"the error does not say where: {error}")
    if fault.kind in ERRNOS and os.strerror(ERRNOS[fault.kind]) not in str(error) and getattr(error, "errno", None) != ERRNOS[fault.kind]:
        raise BrokenError(f"the error does not give the reason: {error}")
    if fault.kind == "EINTR":
        raise BrokenError(f"an interrupted call was not repeated: {error}")
    if fault.kind == "short":
        raise BrokenError(f"a short transfer was not continued: {error}")
    name = os.path.basename(fault.call.name)
    of_file = fault.call.method in ("pwritev", "preadv", "fsync", "fstat", "open") and name in _FILES and fault.lasts == "once"
    if of_file and error.file is None:
        raise BrokenError(f"the error does not name the file {name}: {error}")


def must_be_told(fault: Fault) -> bool:
    """Whether a save that goes through in spite of a fault may rest on bytes or names that are not durable."""
    call = fault.call
    if fault.kind not in ERRNOS or call.method not in ("pwritev", "fsync", "close"):
        return False
    # A close of COMPLETE may be that of a reader; those of directories and of files that were only read tell nothing about bytes.
    return call.method != "close" or (os.path.basename(call.name) in _FILES - {"COMPLETE"} and call.name.startswith(".tmp-"))
