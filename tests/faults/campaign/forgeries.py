"""What somebody changes who repairs all that vouches for it, as far as he has the keys: each breaks one link of the chain."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zstandard
from faults.campaign.damage_subject import ENCRYPTION_KEY, SIGNING_KEY, Subject
from support.damage import forge_block

from dcp_engine.errors import (
    DcpEngineError,
    DecryptionError,
    DigestMismatchError,
    EncryptionKeyError,
    LimitExceededError,
    MalformedCheckpointError,
    MissingFileError,
    SignatureError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from dcp_engine.storage.envelope import (
    FOOTER_MAGIC,
    MANIFEST_MAGIC,
    Marker,
    check_body,
    encode_marker,
    open_body,
    pack_record,
    parse_marker,
    parse_record,
)
from dcp_engine.storage.footer import decode_footer, encode_footer
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.limits import RECORD_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.signing import sign

__all__ = ["Forgery", "checked", "forgeries"]

_OTHER_NONCE = "7" * 32
_NUM_TRIES = 50_000
"""For something else that is as long when it is compressed; a few of them do, nearly always."""
_BOTH = ("verify", "load")


@dataclass(frozen=True, slots=True)
class Forgery:
    """Content of a checkpoint that nobody saved, or that the reader's keys do not fit.

    Attributes:
        name: in words.
        kind: of the subject that it is put to.
        error: how it must be refused.
        file: which the error must name; empty: it is no file's fault.
        contents: what is written where, by the name of the file.
        put: what is done instead, where that is more.
        links: names of directories that are replaced by links to the checkpoint itself.
        keys: what the readers are given; None: the subject's own keys.
        judges: who must refuse it.
    """

    name: str
    kind: str
    error: type[DcpEngineError]
    file: str
    contents: Mapping[str, bytes] = field(default_factory=dict)
    put: Callable[[], None] | None = None
    links: tuple[str, ...] = ()
    keys: Mapping[str, Any] | None = None
    judges: tuple[str, ...] = _BOTH


def forgeries(subject: Subject, kind: str) -> Iterator[Forgery]:
    """All that are put to one kind of subject."""
    if kind == "plain":
        yield from _markers(subject)
        yield from _manifests(subject)
        yield from _shards(subject)
        yield _weakly_signed(subject)
        yield Forgery("a key for blocks in the clear", kind, EncryptionKeyError, "", keys={"encryption_key": ENCRYPTION_KEY})
    elif kind == "signed":
        yield from _signatures(subject)
    elif kind == "encrypted":
        yield from _encrypted(subject)


# -------------------------------------------------------------------------------------------------------------- COMPLETE


def _marker(subject: Subject) -> Marker:
    return parse_marker(subject.contents["COMPLETE"])


def checked(text: bytes) -> bytes:
    """The lines of a small file with a check line that holds."""
    return text + b"check " + hashlib.sha256(text).hexdigest().encode("ascii") + b"\n"


def _markers(subject: Subject) -> Iterator[Forgery]:
    """COMPLETE that says something else, and whose check line holds."""
    marker, content = _marker(subject), subject.contents["COMPLETE"]
    text = content[: content.rindex(b"check ")]

    def of(name: str, old: str, new: str, error: type[DcpEngineError], file: str = "COMPLETE", **more: Any) -> Forgery:
        changed = checked(text.replace(old.encode("ascii"), new.encode("ascii")))
        assert changed != content
        return Forgery(f"COMPLETE {name}", "plain", error, file, {"COMPLETE": changed}, **more)

    size = f"manifest-bytes {marker.manifest_bytes}\n"
    yield of("of a newer format", "checkpoint 1\n", "checkpoint 2\n", UnsupportedVersionError)
    yield of("with another line", size, f"{size}more 1\n", MalformedCheckpointError)
    yield of("that names a directory elsewhere", "data .\n", f"data {_OTHER_NONCE}\n", MalformedCheckpointError)
    yield of("with an impossible size of MANIFEST", size, f"manifest-bytes {10**18}\n", LimitExceededError)
    yield of("of another attempt", marker.nonce, _OTHER_NONCE, MalformedCheckpointError, "MANIFEST")
    yield of("that names a link", "data .\n", f"data {marker.nonce}\n", MissingFileError, marker.nonce, links=(marker.nonce,))


# -------------------------------------------------------------------------------------------------------------- MANIFEST


def _vouched(subject: Subject, manifest: bytes) -> dict[str, bytes]:
    """MANIFEST, and a COMPLETE that vouches for it with the signature that was there."""
    marker = replace(_marker(subject), manifest_bytes=len(manifest), manifest_sha256=hashlib.sha256(manifest).hexdigest())
    return {"MANIFEST": manifest, "COMPLETE": encode_marker(marker)}


def _packed(body: bytes) -> bytes:
    return b"".join(pack_record(MANIFEST_MAGIC, body))


def _body(manifest: bytes) -> bytes:
    return open_body(parse_record(manifest[:RECORD_BYTES], MANIFEST_MAGIC, file="MANIFEST"), manifest[RECORD_BYTES:], file="MANIFEST")


def _other_manifest(subject: Subject) -> bytes:
    """A sound MANIFEST of the same attempt and the same length, which says another time."""
    sound = subject.contents["MANIFEST"]
    manifest = Manifest.decode(sound)
    old = manifest.saved_at
    for number in range(_NUM_TRIES):
        found = replace(manifest, saved_at=f"2{number % 1000:03d}{old[4:14]}{number // 1000:02d}{old[16:]}").encode()
        if len(found) == len(sound) and found != sound:
            return found
    raise AssertionError("no other time is as long when it is compressed")


def _broken_frame(manifest: bytes) -> bytes:
    """The compressed body with a byte changed so that its frame is whole from outside, and cannot be decompressed."""
    stored, raw_bytes = manifest[RECORD_BYTES:], len(_body(manifest))
    for place in range(20, len(stored)):
        changed = stored[:place] + bytes([stored[place] ^ 0xFF]) + stored[place + 1 :]
        body = _recorded(changed, raw_bytes)
        try:
            check_body(parse_record(body[:RECORD_BYTES], MANIFEST_MAGIC, file="MANIFEST"), changed, file="MANIFEST")
            zstandard.ZstdDecompressor().decompress(changed, allow_extra_data=False)
        except DcpEngineError:
            continue
        except zstandard.ZstdError:
            return body
    raise AssertionError("every byte can be changed without harm")


def _recorded(stored: bytes, raw_bytes: int, sha256: bytes | None = None) -> bytes:
    """A stored body behind a record that says what it is told to."""
    template = pack_record(MANIFEST_MAGIC, b"x")[0]
    digest = hashlib.sha256(stored).digest() if sha256 is None else sha256
    return template[:16] + len(stored).to_bytes(8, "little") + raw_bytes.to_bytes(8, "little") + digest + stored


def _manifests(subject: Subject) -> Iterator[Forgery]:
    """MANIFEST that COMPLETE does not name, or that COMPLETE names and its own record does not describe."""
    sound, other = subject.contents["MANIFEST"], _other_manifest(subject)
    sha256 = sound[32:64]
    body = _body(other)

    def of(name: str, error: type[DcpEngineError], contents: Mapping[str, bytes]) -> Forgery:
        return Forgery(f"MANIFEST {name}", "plain", error, "MANIFEST", contents)

    yield of("that COMPLETE does not name", DigestMismatchError, {"MANIFEST": other})
    yield of("whose record has another digest", DigestMismatchError, _vouched(subject, _recorded(other[RECORD_BYTES:], len(body), sha256)))
    yield of("with bytes behind it", TruncatedFileError, _vouched(subject, sound + b"\0" * 8))
    yield of("of another raw length", MalformedCheckpointError, _vouched(subject, _recorded(sound[RECORD_BYTES:], len(body) + 1)))
    yield of("that stands for 64 MiB", LimitExceededError, _vouched(subject, _recorded(zstandard.compress(bytes(64 << 20)), 64 << 20)))
    yield of("that cannot be decompressed", MalformedCheckpointError, _vouched(subject, _broken_frame(sound)))
    yield of("with another magic", MalformedCheckpointError, _vouched(subject, FOOTER_MAGIC + sound[8:]))
    yield of("with a reserved field", MalformedCheckpointError, _vouched(subject, sound[:12] + b"\1" + sound[13:]))
    yield of("of a newer format", UnsupportedVersionError, _vouched(subject, sound[:8] + b"\2" + sound[9:]))
    yield of("of no format", MalformedCheckpointError, _vouched(subject, sound[:8] + b"\0" + sound[9:]))


# ---------------------------------------------------------------------------------------------------------------- shards


def _other_footer(subject: Subject, file: str) -> bytes:
    """A shard file with a sound footer of another attempt, of the same length."""
    content = subject.contents[file]
    record = parse_record(content[-RECORD_BYTES:], FOOTER_MAGIC, file=file)
    begin = len(content) - RECORD_BYTES - record.stored_bytes
    footer = decode_footer(open_body(record, content[begin:-RECORD_BYTES], file=file))
    for number in range(_NUM_TRIES):
        nonce = hashlib.sha256(number.to_bytes(4, "little")).hexdigest()[:32]
        trailer, stored = pack_record(FOOTER_MAGIC, encode_footer(replace(footer, nonce=nonce)))
        if len(stored) == record.stored_bytes:
            return content[:begin] + stored + trailer
    raise AssertionError("no other footer is as long when it is compressed")


def _shards(subject: Subject) -> Iterator[Forgery]:
    """Shard files that fit in themselves, and not into the checkpoint; a block that no codec has made."""
    for file in (name for name in subject.contents if name.endswith(".shard")):
        content = subject.contents[file]
        trailer = len(content) - RECORD_BYTES

        def at(place: int, new: bytes, content: bytes = content) -> bytes:
            return content[:place] + new + content[place + len(new) :]

        def of(name: str, error: type[DcpEngineError], other: bytes, file: str = file) -> Forgery:
            return Forgery(f"a shard file with {name}", "plain", error, file, {file: other})

        yield of("another footer, which vouches for itself", DigestMismatchError, _other_footer(subject, file))
        yield of("a header of no shard file", MalformedCheckpointError, at(0, MANIFEST_MAGIC))
        yield of("a header of another attempt", MalformedCheckpointError, at(16, bytes(16)))
        for what, place in (("header", 8), ("trailer", trailer + 8)):
            yield of(f"a {what} of a newer format", UnsupportedVersionError, at(place, b"\2"))
            yield of(f"a {what} of no format", MalformedCheckpointError, at(place, b"\0"))
    file, stored_bytes = _block_of(subject, "model.regular")
    yield Forgery(
        "a block that cannot be decoded, digests repaired",
        "plain",
        MalformedCheckpointError,
        file,
        put=lambda: forge_block(subject.path, "model.regular", b"\xff" * stored_bytes),
    )


def _block_of(subject: Subject, name: str) -> tuple[str, int]:
    """File of an entry's first block, and its stored bytes."""
    manifest = Manifest.decode(subject.contents["MANIFEST"])
    entry = manifest.entry_id(name)
    assert entry is not None
    chunk = manifest.chunk(int(manifest.entry(entry).chunks[0]))
    return manifest.files[chunk.file].name, int(manifest.table.block_stored_bytes[chunk.first_block])


# ------------------------------------------------------------------------------------------------------------------ keys


def _signatures(subject: Subject) -> Iterator[Forgery]:
    """What the holder of the key has not signed; and what he should not have."""
    marker, changed = _marker(subject), _vouched(subject, _other_manifest(subject))
    unsigned = replace(parse_marker(changed["COMPLETE"]), key_id="", signature="")
    foreign = sign(unsigned, SecretKey(b"o" * 32, "signing_key"))
    renamed = replace(foreign, key_id=marker.key_id)

    def of(name: str, other: Marker) -> Forgery:
        return Forgery(name, "signed", SignatureError, "COMPLETE", {**changed, "COMPLETE": encode_marker(other)})

    yield of("another MANIFEST under the old signature", parse_marker(changed["COMPLETE"]))
    yield of("another MANIFEST without a signature", unsigned)
    yield of("another MANIFEST signed with another key", foreign)
    yield of("another MANIFEST signed with another key under the id of this one", renamed)


def _weakly_signed(subject: Subject) -> Forgery:
    """A checkpoint with xxh3 digests that the holder of the key has signed all the same, as this writer never does."""
    signed = sign(_marker(subject), SecretKey(SIGNING_KEY, "signing_key"))
    contents = {"COMPLETE": encode_marker(signed)}
    return Forgery("a signature over weak digests", "plain", SignatureError, "MANIFEST", contents, keys={"signing_key": SIGNING_KEY})


def _encrypted(subject: Subject) -> Iterator[Forgery]:
    """Blocks that the holder of the key has not encrypted, digests repaired; and readers with another key, or none."""
    generator = np.random.default_rng(0)
    for name in ("optimizer.noise", "model.regular"):  # as it is, and compressed
        file, stored_bytes = _block_of(subject, name)
        content = generator.bytes(stored_bytes)
        yield Forgery(
            f"a block of {name} that was not encrypted with the key",
            "encrypted",
            DecryptionError,
            file,
            put=lambda name=name, content=content: forge_block(subject.path, name, content),
        )
    yield Forgery("no key", "encrypted", EncryptionKeyError, "", keys={}, judges=("load",))
    yield Forgery("another key", "encrypted", EncryptionKeyError, "", keys={"encryption_key": b"o" * 32})
