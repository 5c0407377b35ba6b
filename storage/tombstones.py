"""What COMPLETE says of a checkpoint that was retired where nothing can be renamed: one put retires it, and nothing brings it back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dcp_engine.errors import MalformedCheckpointError, RetiredError
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.texts import encode_text, parse_text

__all__ = ["RETIRED", "Tombstone", "is_tombstone", "parse_tombstone", "retired", "tombstone_bytes"]

RETIRED: Final = "retired"
"""Stands for a tombstone wherever the nonce of a checkpoint is asked for."""

_START: Final = b"dcp-engine retired "
_FILE: Final = "COMPLETE"
_MAX_NONCES: Final = 64
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The content of a tombstone.

    Attributes:
        nonces: of the checkpoint that was retired, or of the attempts that may no longer publish; ascending, 1 to 64.
        time: when, in UTC, by the clock of who wrote it. For people: nothing is decided by it.
    """

    nonces: tuple[str, ...]
    time: str


def tombstone_bytes(nonces: Iterable[str]) -> bytes:
    """The bytes that retire these attempts, the first 64 of them, as of now."""
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return encode_text(RETIRED, [*(("nonce", nonce) for nonce in sorted(set(nonces))[:_MAX_NONCES]), ("time", time)])


def is_tombstone(data: bytes) -> bool:
    """Whether a COMPLETE is meant to be a tombstone, whole or not."""
    return data.startswith(_START)


def parse_tombstone(data: bytes, *, path: str) -> Tombstone:
    """Parses a COMPLETE that is a tombstone.

    Raises:
        UnsupportedVersionError, DigestMismatchError, MalformedCheckpointError
    """
    fields = parse_text(data, RETIRED, file=_FILE, path=path)
    names, values = [name for name, _ in fields], tuple(value for _, value in fields)
    nonces = values[:-1]
    in_order = sorted(set(nonces)) == list(nonces) and 1 <= len(nonces) <= _MAX_NONCES
    if names != ["nonce"] * len(nonces) + ["time"] or not in_order or not all(map(is_nonce, nonces)) or not _TIME.fullmatch(values[-1]):
        raise MalformedCheckpointError("not a tombstone", file=_FILE, path=path, expected="nonces and a time", found=fields)
    return Tombstone(nonces, values[-1])


def retired(tombstone: Tombstone, *, path: str) -> RetiredError:
    """The error for who wants to read what was retired."""
    return RetiredError(
        "the checkpoint was retired",
        path=path,
        file=_FILE,
        found=f"a tombstone of {tombstone.time} for attempt {tombstone.nonces[0]}",
        remedy="take another step",
    )
