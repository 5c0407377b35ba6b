"""What a root asks of its storage: the protocol between ``RunRoot`` and the two kinds of storage."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

from dcp_engine.errors import InvalidOptionError, StorageError
from dcp_engine.storage.attempts import MANIFEST_NAME, MARKER_NAME
from dcp_engine.storage.backends import Directory
from dcp_engine.storage.entry_names import is_step_attempt, is_trash, strangers
from dcp_engine.storage.epochs import EPOCHS_NAME, EpochRecord
from dcp_engine.storage.holds import Hold
from dcp_engine.storage.steps import parse_step_name

__all__ = ["CHECKPOINT_NAMES", "Retirement", "RootStore", "refuse_checkpoint", "refuse_enclosed", "refuse_strangers"]

CHECKPOINT_NAMES: Final = (MARKER_NAME, MANIFEST_NAME, ".metadata")
"""Files of which a checkpoint has one, of ours or of DCP's own format."""


class Retirement(Enum):
    """What became of a step that was to be retired."""

    DONE = "it is gone, and nobody was reading it"
    UNGUARDED = "it is gone; whether anybody was reading it cannot be told there"
    IN_USE = "it is there: somebody reads it"
    CHANGED = "it is not there, or another one has its name"


class RootStore(Protocol):
    """The calls of a root on its storage. Which steps and epochs they are made for is decided above it; errors are the engine's."""

    def prepare(self) -> None:
        """Makes the root ready for epochs. ``InvalidOptionError`` if it can be none, ``StorageError`` kinds if it cannot be written to."""
        ...

    def create_epoch(self, record: EpochRecord) -> bool:
        """Creates an epoch's file. False if there is one of that number, of anybody else's."""
        ...

    def revoke(self, check: Callable[[], None]) -> None:
        """Takes all attempts at steps that are there away from their writers. ``check`` is called between the look and the first change."""
        ...

    def check_entry(self, step: int) -> None:
        """Refuses a step's name that leads out of the root. ``CheckpointNotFoundError``. What is not there at all is not refused."""
        ...

    def hold(self, step: int) -> Hold:
        """Keeps a step from being retired, where the storage can."""
        ...

    def retire(self, step: int, nonce: str) -> Retirement:
        """Retires the checkpoint of a step if it is that one and nobody reads it."""
        ...

    def clean(self, older_than_secs: float, *, keep_whole: bool) -> tuple[str, ...]:
        """Removes what was retired or revoked. Returns the names of what is gone.

        Args:
            older_than_secs: only what has been so for that long, by the clock of the storage.
            keep_whole: leave what is still a whole checkpoint: it may be all that is left.
        """
        ...

    def free_bytes(self) -> int | None:
        """What can be written there before it is full; None where the storage does not tell. ``StorageError`` kinds."""
        ...

    def put_latest(self, content: bytes) -> None:
        """Replaces LATEST in one step, durably."""
        ...


def refuse_checkpoint(path: str, names: list[str]) -> None:
    """Refuses a directory that is itself a checkpoint, of ours or of DCP's own format. Raises ``InvalidOptionError``."""
    found = [name for name in CHECKPOINT_NAMES if name in names]
    if found:
        raise InvalidOptionError(
            "this is a checkpoint, not a root that holds some",
            path=path,
            expected="a directory whose checkpoints are called like 'step-00000100', or a new one",
            found=repr(found[0]),
            remedy="pass the directory above it",
        )


def refuse_strangers(root: Directory) -> None:
    """Refuses what is not the root of a run, nor may become one, which it may where it is not there, or empty.

    Raises:
        InvalidOptionError: it is a file, itself a checkpoint, or somebody else's directory: see
            :func:`~dcp_engine.storage.entry_names.strangers`.
        StorageError: it cannot be read.
    """
    try:
        names = root.names()
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return
        if error.errno == errno.ENOTDIR:
            raise InvalidOptionError("this cannot be a root", path=root.path, expected="a directory", found="a file") from error
        raise
    refuse_checkpoint(root.path, names)
    found = strangers(names)
    if found:
        raise InvalidOptionError(
            "this is somebody else's directory, and not the root of a run",
            path=root.path,
            expected="a directory of steps like 'step-00000100', an empty one, or a new one",
            found=", ".join(map(repr, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else ""),
            remedy="pass a directory of its own for the run, as in a new one below this",
        )


def refuse_enclosed(path: str, has: Callable[[str, str], bool]) -> None:
    """Refuses a root that would go with what another root removes: one in a step, in an attempt at one, in trash, or among epochs.

    Args:
        path: absolute path or URL.
        has: whether a directory, the first argument, holds a file of a name, the second one. Asked of those above it with a step's name.

    Raises:
        InvalidOptionError: naming that directory.
    """
    place = path
    while place.strip("/"):
        name = posixpath.basename(place)
        is_step = place != path and parse_step_name(name) is not None and any(has(place, file) for file in CHECKPOINT_NAMES)
        if is_step or is_step_attempt(name) or is_trash(name) or name == EPOCHS_NAME:
            raise InvalidOptionError(
                "the root lies in what another root removes",
                path=path,
                expected="a directory outside of checkpoints",
                found=repr(place),
                remedy="take another directory; if there are steps in this one, move them away first",
            )
        place = posixpath.dirname(place)
