"""What wraps the data of a checkpoint: shard headers, the self-checking records of MANIFEST and footers, and the COMPLETE marker.

Everything here is a pure function between values and bytes. Nothing is decompressed before its digest and its declared size were checked.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from typing import Final

import zstandard

from dcp_engine.errors import (
    DigestMismatchError,
    LimitExceededError,
    MalformedCheckpointError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from dcp_engine.storage.codecs.zstd import check_frame, uncompressed_frame
from dcp_engine.storage.limits import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_FILE_NAME_BYTES,
    MAX_MARKER_BYTES,
    MAX_RECORD_STORED_BYTES,
    MAX_STRIPES,
    RECORD_BYTES,
    max_record_raw_bytes,
    min_record_stored_bytes,
)

__all__ = [
    "FOOTER_MAGIC",
    "HEADER_MAGIC",
    "MANIFEST_MAGIC",
    "Marker",
    "Record",
    "check_body",
    "check_header",
    "encode_marker",
    "header_bytes",
    "is_nonce",
    "is_shard_name",
    "nonce_bytes",
    "open_body",
    "pack_record",
    "parse_marker",
    "parse_record",
    "shard_name",
    "signed_text",
    "split_shard_name",
]

HEADER_MAGIC: Final = b"DCPESHRD"
FOOTER_MAGIC: Final = b"DCPEFOOT"
MANIFEST_MAGIC: Final = b"DCPEMANI"

_RECORD = struct.Struct("<8sIIQQ32s")
_HEADER = struct.Struct("<8sII16sI")
_SHARD_NAME = re.compile(r"([a-z][a-z0-9_]{0,31})-([0-9]{5,7})(?:\.([1-9][0-9]{0,2}))?\.shard", re.ASCII)
_NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)


def shard_name(component: str, rank: int, stripe: int = 0) -> str:
    """Name of a file that holds a rank's part of a component, or a stripe of it. It begins with the component and a hyphen.

    Raises:
        MalformedCheckpointError: not a valid component name, rank or stripe.
    """
    name = f"{component}-{rank:05d}{f'.{stripe}' if stripe else ''}.shard"
    if not is_shard_name(name) or split_shard_name(name) != (component, rank, stripe):
        raise MalformedCheckpointError(
            "invalid component, rank or stripe",
            expected=f"[a-z][a-z0-9_]{{0,31}}, 0 to 9999999 and 0 to {MAX_STRIPES - 1}",
            found=name,
            rank=rank,
        )
    return name


def split_shard_name(name: str) -> tuple[str, int, int]:
    """Component, rank and stripe of a shard file's name. Only one spelling exists of each.

    Raises:
        MalformedCheckpointError: not the name of a shard file.
    """
    if not is_shard_name(name):
        raise MalformedCheckpointError(
            "not the name of a shard file", expected="<component>-<rank>[.<stripe>].shard", found=repr(name[:300])
        )
    match = _SHARD_NAME.fullmatch(name)
    assert match is not None
    return match[1], int(match[2]), int(match[3] or 0)


def is_shard_name(name: str) -> bool:
    """Whether a name is one that shard files have."""
    match = _SHARD_NAME.fullmatch(name)
    return match is not None and f"{int(match[2]):05d}" == match[2]


def is_nonce(text: str) -> bool:
    """Whether a text is a nonce in lower-case hex."""
    return _NONCE.fullmatch(text) is not None


def nonce_bytes(nonce: str) -> bytes:
    """The 16 bytes of a nonce in lower-case hex.

    Raises:
        MalformedCheckpointError: not 32 lower-case hex digits.
    """
    if not is_nonce(nonce):
        raise MalformedCheckpointError("invalid nonce", expected="32 lower-case hex digits", found=repr(nonce[:100]))
    return bytes.fromhex(nonce)


def header_bytes(name: str, rank: int, nonce: str) -> bytes:
    """The header of a shard file: a function of these three alone, so that a reader can rebuild and compare all of it.

    Args:
        name: the file's own name.
        rank: of the writer.
        nonce: of the attempt, 32 hex digits.
    """
    encoded = name.encode("ascii")
    assert len(encoded) <= MAX_FILE_NAME_BYTES
    start = _HEADER.pack(HEADER_MAGIC, FORMAT_VERSION, rank, nonce_bytes(nonce), len(encoded)) + encoded
    return start.ljust(HEADER_BYTES, b"\0")


def check_header(found: bytes, *, name: str, rank: int, nonce: str, path: str | None = None) -> None:
    """Compare a header read from a file with the one it must have.

    Raises:
        TruncatedFileError: too short.
        UnsupportedVersionError: of a newer format.
        MalformedCheckpointError: another file's header (swapped, of another attempt) or none.
        DigestMismatchError: damaged elsewhere.
    """
    if len(found) != HEADER_BYTES:
        raise TruncatedFileError("shard header is short", file=name, path=path, expected=HEADER_BYTES, found=len(found))
    if found == header_bytes(name, rank, nonce):
        return
    magic, version, found_rank, found_nonce, name_bytes = _HEADER.unpack_from(found)
    if magic != HEADER_MAGIC:
        raise MalformedCheckpointError("not a shard file", file=name, path=path, expected=HEADER_MAGIC, found=magic)
    _check_version(version, file=name, path=path)
    found_name = found[_HEADER.size : _HEADER.size + min(name_bytes, MAX_FILE_NAME_BYTES)]
    identity = (found_name.decode("latin-1"), found_rank, found_nonce.hex())
    if identity != (name, rank, nonce):
        raise MalformedCheckpointError(
            "shard file of another rank, name or attempt",
            file=name,
            path=path,
            expected=f"name {name!r}, rank {rank}, nonce {nonce}",
            found=f"name {identity[0]!r}, rank {identity[1]}, nonce {identity[2]}",
        )
    raise DigestMismatchError("shard header is damaged", file=name, path=path)


def _check_version(version: int, *, file: str | None, path: str | None) -> None:
    if version > FORMAT_VERSION:
        raise UnsupportedVersionError(
            "the checkpoint was written in a newer format",
            file=file,
            path=path,
            expected=f"format version {FORMAT_VERSION} or older",
            found=f"version {version}",
            remedy="upgrade dcp-engine to read it",
        )
    if version != FORMAT_VERSION:
        raise MalformedCheckpointError("no such format version", file=file, path=path, expected=FORMAT_VERSION, found=version)


@dataclass(frozen=True, slots=True)
class Record:
    """The fixed record beside a compressed body.

    Attributes:
        version: format version.
        stored_bytes: length of the compressed body.
        raw_bytes: length of the body.
        sha256: of the compressed body, 32 bytes.
    """

    version: int
    stored_bytes: int
    raw_bytes: int
    sha256: bytes


def pack_record(magic: bytes, body: bytes, num_rows: int = 0) -> tuple[bytes, bytes]:
    """Compress a body and describe it.

    Args:
        magic: of the record.
        body: what is compressed; less well than could be, where a reader would not believe that so little stands for so much.
        num_rows: rows in it that count (see ``limits.ROWS_PER_BYTE``).

    Returns:
        The record and the compressed body. MANIFEST holds them in this order, a shard's footer in the other.

    Raises:
        LimitExceededError: beyond what a reader would accept.
    """
    stored = zstandard.ZstdCompressor(level=3, write_checksum=False, write_content_size=True, write_dict_id=False).compress(body)
    if len(stored) < min_record_stored_bytes(len(body), num_rows):
        stored = uncompressed_frame(body)
    _check_sizes(len(stored), len(body), file=None, path=None)
    record = _RECORD.pack(magic, FORMAT_VERSION, 0, len(stored), len(body), hashlib.sha256(stored).digest())
    return record, stored


def _check_sizes(stored_bytes: int, raw_bytes: int, *, file: str | None, path: str | None) -> None:
    if stored_bytes > MAX_RECORD_STORED_BYTES or raw_bytes > max_record_raw_bytes(stored_bytes):
        raise LimitExceededError(
            "a manifest or footer is larger than the format allows",
            file=file,
            path=path,
            expected=f"at most {max_record_raw_bytes(stored_bytes)} bytes from at most {MAX_RECORD_STORED_BYTES}",
            found=f"{raw_bytes} bytes from {stored_bytes}",
        )


def parse_record(data: bytes, magic: bytes, *, file: str, path: str | None = None) -> Record:
    """Parse the fixed record. Its sizes are within the limits afterwards.

    Args:
        data: exactly ``RECORD_BYTES`` bytes.
        magic: ``MANIFEST_MAGIC`` or ``FOOTER_MAGIC``.
        file: name of the file, for messages.

    Raises:
        TruncatedFileError, MalformedCheckpointError, UnsupportedVersionError, LimitExceededError
    """
    if len(data) != RECORD_BYTES:
        raise TruncatedFileError("a manifest or footer record is short", file=file, path=path, expected=RECORD_BYTES, found=len(data))
    found_magic, version, zero, stored_bytes, raw_bytes, sha256 = _RECORD.unpack(data)
    if found_magic != magic:
        raise MalformedCheckpointError(
            "no manifest or footer record where one must be", file=file, path=path, expected=magic, found=found_magic
        )
    _check_version(version, file=file, path=path)
    if zero:
        raise MalformedCheckpointError("a reserved field is not zero", file=file, path=path, expected=0, found=zero)
    _check_sizes(stored_bytes, raw_bytes, file=file, path=path)
    return Record(version, stored_bytes, raw_bytes, sha256)


def check_body(record: Record, stored: bytes | memoryview, *, file: str, path: str | None = None) -> None:
    """Check the body that a record describes, without decompressing it.

    Raises:
        TruncatedFileError: not of the recorded length.
        DigestMismatchError: not the recorded bytes.
        MalformedCheckpointError: not one zstd frame of the recorded raw length.
    """
    if len(stored) != record.stored_bytes:
        raise TruncatedFileError(
            "a manifest or footer is cut off or too long", file=file, path=path, expected=record.stored_bytes, found=len(stored)
        )
    found = hashlib.sha256(stored).digest()
    if found != record.sha256:
        raise DigestMismatchError("a manifest or footer is damaged", file=file, path=path, expected=record.sha256.hex(), found=found.hex())
    try:
        check_frame(memoryview(stored), record.raw_bytes)
    except MalformedCheckpointError as error:
        raise _undecodable(error, file=file, path=path) from error


def open_body(record: Record, stored: bytes | memoryview, *, file: str, path: str | None = None) -> bytes:
    """Check and decompress the body that a record describes. Raises as :func:`check_body`."""
    check_body(record, stored, file=file, path=path)
    try:
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _undecodable(error, file=file, path=path) from error


def _undecodable(error: Exception, *, file: str, path: str | None) -> MalformedCheckpointError:
    return MalformedCheckpointError("a manifest or footer cannot be decompressed", file=file, path=path, found=str(error))


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of COMPLETE.

    Attributes:
        nonce: of the attempt, 32 hex digits.
        data: directory that holds MANIFEST and the shards, relative to COMPLETE: ``"."`` or the nonce.
        manifest_bytes: length of the file MANIFEST.
        manifest_sha256: SHA-256 of the whole file MANIFEST, 64 hex digits.
        key_id: of the key that signed it, 16 hex digits; empty: it is not signed.
        signature: HMAC-SHA-256 of :func:`signed_text`, 64 hex digits; empty likewise.
    """

    nonce: str
    data: str
    manifest_bytes: int
    manifest_sha256: str
    key_id: str = ""
    signature: str = ""


_MARKER = re.compile(
    rb"dcp-engine checkpoint ([1-9][0-9]{0,8})\n"
    rb"nonce ([0-9a-f]{32})\n"
    rb"data (\.|[0-9a-f]{32})\n"
    rb"manifest-bytes ([1-9][0-9]{0,18})\n"
    rb"manifest-sha256 ([0-9a-f]{64})\n"
    rb"(?:key ([0-9a-f]{16})\nsignature ([0-9a-f]{64})\n)?"
    rb"check ([0-9a-f]{64})\n"
)
_MARKER_START = re.compile(rb"dcp-engine checkpoint ([1-9][0-9]{0,8})\n")


def signed_text(marker: Marker) -> bytes:
    """What a signature is of: COMPLETE up to the line that holds it."""
    lines = [
        f"dcp-engine checkpoint {FORMAT_VERSION}",
        f"nonce {marker.nonce}",
        f"data {marker.data}",
        f"manifest-bytes {marker.manifest_bytes}",
        f"manifest-sha256 {marker.manifest_sha256}",
    ]
    if marker.key_id:
        lines.append(f"key {marker.key_id}")
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def encode_marker(marker: Marker) -> bytes:
    """The bytes of COMPLETE."""
    assert marker.data in (".", marker.nonce)
    assert bool(marker.key_id) == bool(marker.signature)
    text = signed_text(marker) + (f"signature {marker.signature}\n".encode("ascii") if marker.signature else b"")
    return text + b"check " + hashlib.sha256(text).hexdigest().encode("ascii") + b"\n"


def parse_marker(data: bytes, *, path: str | None = None) -> Marker:
    """Parse COMPLETE. There is exactly one spelling of each marker, and this accepts no other.

    Raises:
        UnsupportedVersionError: of a newer format.
        DigestMismatchError: its check line does not hold.
        MalformedCheckpointError: anything else, an empty or cut-off file among it.
    """
    start = _MARKER_START.match(data[:MAX_MARKER_BYTES])
    if start is not None:
        _check_version(int(start[1]), file="COMPLETE", path=path)
    match = _MARKER.fullmatch(data) if len(data) <= MAX_MARKER_BYTES else None
    if match is None:
        raise MalformedCheckpointError(
            "not a completion marker",
            file="COMPLETE",
            path=path,
            expected="six lines, or eight with a signature",
            found=f"{len(data)} bytes beginning with {data[:32]!r}",
        )
    nonce, place, size, sha256, key_id, signature, check = (text.decode("ascii") for text in match.groups(b"")[1:])
    found = hashlib.sha256(data[: match.start(8) - len(b"check ")]).hexdigest()
    if found != check:
        raise DigestMismatchError("the completion marker is damaged", file="COMPLETE", path=path, expected=check, found=found)
    if place not in (".", nonce):
        raise MalformedCheckpointError(
            "the completion marker names another directory", file="COMPLETE", path=path, expected=f"'.' or {nonce!r}", found=repr(place)
        )
    return Marker(nonce, place, int(size), sha256, key_id, signature)
