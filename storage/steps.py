"""Names of steps, and which steps of a directory are committed."""

from __future__ import annotations

import errno
import logging
import operator
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_engine.errors import (
    CorruptCheckpointError,
    InvalidOptionError,
    MissingFileError,
    RetiredError,
    StorageError,
    UnsupportedVersionError,
)
from dcp_engine.storage.attempts import read_marker
from dcp_engine.storage.backends import locate, resolve
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.keys import KeySource, SecretKey, secret_key
from dcp_engine.storage.limits import MAX_STEP
from dcp_engine.storage.signing import check_signature

__all__ = ["STEP_NAME", "FoundSteps", "committed_steps", "find_steps", "parse_step_name", "step_name"]

STEP_NAME = "step-%08d"
"""Name of a step's directory. Steps beyond 8 digits take as many as they need."""

_logger = logging.getLogger(__name__)
_PATTERN = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})", re.ASCII)


def step_name(step: int) -> str:
    """Name of a step's directory.

    Raises:
        InvalidOptionError: the step is no whole number, negative or above 2**63 - 1.
    """
    try:
        # Not what ``%d`` makes of it: that takes 1.9 for 1.
        name = "" if isinstance(step, bool) else STEP_NAME % operator.index(step)
    except TypeError:
        name = ""
    if parse_step_name(name) is None:
        raise InvalidOptionError(
            "this cannot be the number of a step", expected=f"a whole number from 0 to {MAX_STEP}", found=repr(step)[:300]
        )
    return name


def parse_step_name(name: str) -> int | None:
    """The step of a directory's name; None for any other name, also one that merely resembles it (``step-7``, ``step-00000007.tmp``)."""
    match = _PATTERN.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= MAX_STEP else None


@dataclass(frozen=True, slots=True)
class FoundSteps:
    """What a look at a directory found, each ascending.

    Attributes:
        committed: steps whose COMPLETE is whole.
        damaged: steps that were committed once: there is a COMPLETE, and it is damaged, or not signed with the key.
    """

    committed: list[int]
    damaged: list[int]


def committed_steps(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    signing_key: KeySource | SecretKey | None = None,
) -> list[int]:
    """The committed steps in a directory, in ascending order.

    A step counts if its directory (no symbolic link) has the exact name and its COMPLETE is whole. One of a newer format version counts:
    it is committed, and passing over it in silence would resume from an older one. The data is not looked at.

    Args:
        root: directory or URL.
        storage_options: keyword arguments of the fsspec file system of a URL, and ``request_timeout_secs``.
        signing_key: what must have signed the COMPLETE of a step that counts: bytes, the path of a file, or a callable; ``None``: any
            counts. That a signed step was copied to the name of another one is not seen here, but by ``RunRoot.latest``.

    Returns:
        empty, where the directory does not exist or is no directory.

    Raises:
        StorageError: the directory, or a COMPLETE in it, cannot be read.
        InvalidOptionError: the path cannot be one, or the key cannot be had.

    Thread-safety: callable from any thread.
    """
    return find_steps(root, storage_options=storage_options, signing_key=signing_key).committed


def find_steps(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    signing_key: KeySource | SecretKey | None = None,
) -> FoundSteps:
    """Like :func:`committed_steps`, with those that are damaged, or not signed with the key."""
    location = locate(root)
    key = secret_key(signing_key, "signing_key")
    if key is not None:
        key = SecretKey(key.material(), "signing_key")  # read once, not for each step
    found = FoundSteps([], [])
    try:
        names = resolve(location, storage_options).names()
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return found
        raise
    for name in names:
        step = parse_step_name(name)
        if step is None:
            continue
        place = location.child(name)
        if not place.remote and not _is_directory(place.path):
            continue
        try:
            marker = read_marker(resolve(place, storage_options))
            if key is not None:
                check_signature(marker, key, path=place.path)
        except UnsupportedVersionError:
            pass  # committed, by a newer release
        except (MissingFileError, RetiredError):
            continue
        except CorruptCheckpointError as error:
            _logger.warning("step %d is not counted: %s", step, error)
            found.damaged.append(step)
            continue
        found.committed.append(step)
    found.committed.sort()
    found.damaged.sort()
    return found


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(system().lstat(path).st_mode)
    except FileNotFoundError:
        return False  # retired meanwhile
    except OSError as error:
        raise storage_failure(error, "look at the step", path=path) from error
