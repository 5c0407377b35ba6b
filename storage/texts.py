"""Small files that check themselves: epochs, LATEST, tombstones. Lines of ASCII, of which each value has one spelling only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Final

from dcp_engine.errors import DigestMismatchError, MalformedCheckpointError, UnsupportedVersionError

__all__ = ["MAX_TEXT_FILE_BYTES", "decode_name", "encode_name", "encode_text", "parse_text"]

MAX_TEXT_FILE_BYTES: Final = 1 << 16
"""Length of such a file: a run's name of the greatest length fits, however its characters are written."""

_VERSION: Final = 1
_FIRST = re.compile(rb"dcp-engine ([a-z]+) ([1-9][0-9]{0,8})\n")
_LINE = re.compile(rb"([a-z]+) ([!-~](?:[ -~]*[!-~])?)\n")
_CHECK = re.compile(rb"check ([0-9a-f]{64})\n")


def encode_text(kind: str, fields: Sequence[tuple[str, str]]) -> bytes:
    """The content of a small file.

    Args:
        kind: what it is, one lower-case word.
        fields: names (lower-case words) and values (printable ASCII, not empty, no space at either end), in the order of the lines.
    """
    text = "".join([f"dcp-engine {kind} {_VERSION}\n", *(f"{name} {value}\n" for name, value in fields)]).encode("ascii")
    return text + b"check " + hashlib.sha256(text).hexdigest().encode("ascii") + b"\n"


def parse_text(data: bytes, kind: str, *, file: str, path: str) -> list[tuple[str, str]]:
    """The fields of a small file. Which ones there must be is for the caller to say.

    Raises:
        UnsupportedVersionError: a newer release wrote it.
        DigestMismatchError: its check line does not hold.
        MalformedCheckpointError: anything else, an empty or cut-off file among it.
    """
    first = _FIRST.match(data)
    if first is None or first[1].decode("ascii") != kind:
        raise _malformed(data, kind, file=file, path=path)
    if int(first[2]) > _VERSION:
        raise UnsupportedVersionError(
            "the file was written in a newer format",
            file=file,
            path=path,
            expected=f"version {_VERSION} or older",
            found=f"version {int(first[2])}",
            remedy="upgrade dcp-engine to read it",
        )
    position, fields = first.end(), []
    while (line := _LINE.match(data, position)) is not None and line[1] != b"check":
        fields.append((line[1].decode("ascii"), line[2].decode("ascii")))
        position = line.end()
    check = _CHECK.fullmatch(data, position)
    if check is None:
        raise _malformed(data, kind, file=file, path=path)
    found = hashlib.sha256(data[:position]).hexdigest()
    if found != check[1].decode("ascii"):
        raise DigestMismatchError("the file is damaged", file=file, path=path, expected=check[1].decode("ascii"), found=found)
    return fields


def encode_name(name: str) -> str:
    """A name of any characters as a value of one line: a JSON string in ASCII."""
    return json.dumps(name)


def decode_name(value: str) -> str | None:
    """The name of :func:`encode_name`; None if it is no such value."""
    try:
        name = json.loads(value)
    except ValueError:
        return None
    return name if isinstance(name, str) and encode_name(name) == value else None


def _malformed(data: bytes, kind: str, *, file: str, path: str) -> MalformedCheckpointError:
    return MalformedCheckpointError(
        f"not a file of the kind {kind!r}",
        file=file,
        path=path,
        expected=f"lines, the first of them 'dcp-engine {kind} {_VERSION}', the last a check line",
        found=f"{len(data)} bytes beginning with {data[:32]!r}",
    )
