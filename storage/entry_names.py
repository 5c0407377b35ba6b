"""Names that the engine gives to what lies beside checkpoints on a file system: attempts, and what is to be removed."""

from __future__ import annotations

import os
import re
import uuid
from typing import Final

from dcp_engine.storage.steps import parse_step_name

__all__ = ["NAME_MAX_BYTES", "attempt_name", "is_step_attempt", "is_trash", "trash_name"]

NAME_MAX_BYTES: Final = 255
"""Longest name that file systems take."""

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


def trash_name() -> str:
    """A new name for what is to be removed."""
    return f".trash-{uuid.uuid4().hex}"


def is_trash(name: str) -> bool:
    """Whether a name is one of :func:`trash_name`."""
    return _TRASH.fullmatch(name) is not None
