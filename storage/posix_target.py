"""What lies where a checkpoint is to be published on a file system, and whether it may give way."""

from __future__ import annotations

import os
import stat

from dcp_engine.errors import CheckpointExistsError, CorruptCheckpointError, DcpEngineError, InvalidOptionError, UnsupportedVersionError
from dcp_engine.storage.attempts import INCOMPLETE, check_replaceable, is_own_file, listing, nonce_at
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.directories import file_kind, is_mount_point
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.tombstones import RETIRED

__all__ = ["describe", "inspect_target", "nonce_or_error"]


def inspect_target(path: str, *, overwrite: bool) -> str | None:
    """What a commit will replace; see ``AttemptRef.replaces``.

    Args:
        path: absolute, of the checkpoint that is to be.
        overwrite: the user asked to replace a checkpoint.

    Raises:
        CheckpointExistsError: there is something that must not be replaced. InvalidOptionError: nothing can ever be published there.
        StorageError kinds: it cannot be told.
    """
    try:
        mode = system().lstat(path).st_mode
        names = sorted(system().listdir(path)) if stat.S_ISDIR(mode) else []
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_failure(error, "look at what is there already", path=path) from error
    if not stat.S_ISDIR(mode):
        raise CheckpointExistsError("the name is taken", path=path, found=file_kind(mode), remedy="save to another name")
    if is_mount_point(path):
        raise InvalidOptionError(
            "a mount point cannot become a checkpoint: no rename can replace it", path=path, remedy="save to a directory in it"
        )
    if not names:
        return None
    try:
        strangers = [name for name in names if not _is_own_entry(path, name)]
    except OSError as error:
        raise storage_failure(error, "look at what is there already", path=path) from error
    try:
        there = nonce_at(LocalDirectory(path)) or INCOMPLETE
    except (CorruptCheckpointError, UnsupportedVersionError):
        there = INCOMPLETE  # damaged, or too new: in the way all the same, replaced if the caller asked for that
    check_replaceable(path, names, strangers, overwrite=overwrite or there == RETIRED)
    return there


def nonce_or_error(path: str) -> str | DcpEngineError | None:
    """Nonce of the checkpoint in a directory as :func:`~dcp_engine.storage.attempts.nonce_at`, or why it cannot be told."""
    try:
        return nonce_at(LocalDirectory(path))
    except DcpEngineError as error:
        return error


def describe(path: str) -> str:
    """What is at a path, in words."""
    try:
        mode = system().lstat(path).st_mode
        return listing(sorted(system().listdir(path))) if stat.S_ISDIR(mode) else file_kind(mode)
    except OSError as error:
        return f"nothing that can be looked at ({error.strerror})"


def _is_own_entry(path: str, name: str) -> bool:
    """Whether an entry is part of a checkpoint: a file of it, or the directory of one that was copied from an object store."""
    place = os.path.join(path, name)
    mode = system().lstat(place).st_mode
    if stat.S_ISDIR(mode) and is_nonce(name):
        return all(_is_own_entry(place, inner) and not is_nonce(inner) for inner in system().listdir(place))
    return stat.S_ISREG(mode) and is_own_file(name)
