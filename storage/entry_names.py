"""Names that the engine gives to what lies beside checkpoints on a file system: attempts, and what is to be removed."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable
from typing import Final

from dcp_engine.storage.steps import parse_step_name

__all__ = ["NAME_MAX_BYTES", "attempt_name", "is_step_attempt", "is_trash", "strangers", "trash_name"]

NAME_MAX_BYTES: Final = 255
"""Longest name that file systems take."""

_OF_A_RUN: Final = frozenset({".epochs", "LATEST"})
_OF_THE_SYSTEM: Final = frozenset({"lost+found"})
"""What a fresh file system has in its root."""

_ATTEMPT = re.compile(r"\.tmp-(step-[0-9]+)-[0-9a-f]{32}", re.ASCII)
_TRASH = re.compile(r"\.trash-[0-9a-f]{32}", re.ASCII)


def attempt_name(name: str, nonce: str) -> str:
    """Name of an attempt at a checkpoint: ``.tmp-<name>-<nonce>``, the name cut where the file system would not take it."""
    room = NAME_MAX_BYTES - len(f".tmp--{nonce}")
    cut = name
    while len(os.fsencode(cut)) > room:
        cut = cut[:-1]
    return f".tmp-{cut}-{nonce}"


def is_step_attempt(name: str) -> bool:
    """Whether a name is one that an attempt at a step has, not merely resembles."""
    match = _ATTEMPT.fullmatch(name)
    return match is not None and parse_step_name(match[1]) is not None


def strangers(names: Iterable[str]) -> list[str]:
    """What makes a directory of these names somebody else's: all that is visible, where nothing tells of a run. Empty: it is none.

    Beside the steps of a run there may be anything: its logs, its configuration.
    """
    names = list(names)
    if any(parse_step_name(name) is not None or is_step_attempt(name) or is_trash(name) or name in _OF_A_RUN for name in names):
        return []
    return sorted(name for name in names if not name.startswith(".") and name not in _OF_THE_SYSTEM)


def trash_name() -> str:
    """A new name for what is to be removed."""
    return f".trash-{uuid.uuid4().hex}"


def is_trash(name: str) -> bool:
    """Whether a name is one of :func:`trash_name`."""
    return _TRASH.fullmatch(name) is not None
