from __future__ import annotations

import hashlib
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.errors import (
    CorruptCheckpointError,
    DigestMismatchError,
    LimitExceededError,
    MalformedCheckpointError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from dcp_engine.storage.envelope import (
    FOOTER_MAGIC,
    MANIFEST_MAGIC,
    Marker,
    check_header,
    encode_marker,
    header_bytes,
    open_body,
    pack_record,
    parse_marker,
    parse_record,
    shard_name,
    split_shard_name,
)

NONCE = "00112233445566778899aabbccddeeff"
NAME = "model-00003.shard"
HEADER = header_bytes(NAME, 3, NONCE)
MARKER = Marker(NONCE, ".", 12345, "ab" * 32)


def test_header_is_the_documented_one() -> None:
    start = b"DCPESHRD" + b"\1\0\0\0" + b"\3\0\0\0" + bytes.fromhex(NONCE) + b"\x11\0\0\0" + b"model-00003.shard"
    assert start + bytes(4096 - len(start)) == HEADER
    check_header(HEADER, name=NAME, rank=3, nonce=NONCE)


@settings(max_examples=200)
@given(st.integers(0, 4096 * 8 - 1))
def test_every_flipped_bit_of_a_header_is_found(bit: int) -> None:
    damaged = bytearray(HEADER)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptCheckpointError, UnsupportedVersionError)) as caught:
        check_header(bytes(damaged), name=NAME, rank=3, nonce=NONCE, path="/checkpoints/7")
    assert (caught.value.file, caught.value.path) == (NAME, "/checkpoints/7")


@pytest.mark.parametrize(
    ("name", "rank", "nonce"), [("model-00004.shard", 4, NONCE), ("optimizer-00003.shard", 3, NONCE), (NAME, 3, "f" * 32)]
)
def test_a_swapped_file_is_told_apart_from_a_damaged_one(name: str, rank: int, nonce: str) -> None:
    with pytest.raises(MalformedCheckpointError, match="another rank, name or attempt") as caught:
        check_header(header_bytes(name, rank, nonce), name=NAME, rank=3, nonce=NONCE)
    assert name in str(caught.value.found)


def test_a_short_header_is_truncated() -> None:
    with pytest.raises(TruncatedFileError):
        check_header(HEADER[:-1], name=NAME, rank=3, nonce=NONCE)


@pytest.mark.parametrize(
    ("component", "rank", "stripe", "name"),
    [
        ("model", 0, 0, "model-00000.shard"),
        ("model", 0, 1, "model-00000.1.shard"),
        ("model__1", 0, 0, "model__1-00000.shard"),
        ("a_1", 99999, 0, "a_1-99999.shard"),
        ("m", 123456, 999, "m-123456.999.shard"),
    ],
)
def test_shard_names_have_one_spelling(component: str, rank: int, stripe: int, name: str) -> None:
    assert shard_name(component, rank, stripe) == name
    assert split_shard_name(name) == (component, rank, stripe)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model",
        "model-0.shard",
        "model-000001.shard",
        "model-00000.0.shard",
        "model-00000.01.shard",
        "model-00000.1000.shard",
        "model-00000..shard",
        "model-00000.1.2.shard",
        "model-00000.-1.shard",
        "model-00000.shard\n",
        "Model-00000.shard",
        "../model-00000.shard",
        "a/b-00000.shard",
        "model-00000.shard/..",
        "-00000.shard",
        "model-\u0660\u0660\u0660\u0660\u0660.shard",
        "m\0del-00000.shard",
        "m" * 33 + "-00000.shard",
        "1m-00000.shard",
    ],
)
def test_other_file_names_are_malformed(name: str) -> None:
    with pytest.raises(MalformedCheckpointError):
        split_shard_name(name)


@pytest.mark.parametrize(("rank", "stripe"), [(-1, 0), (10_000_000, 0), (0, -1), (0, 1000)])
def test_ranks_and_stripes_without_a_name_are_refused(rank: int, stripe: int) -> None:
    with pytest.raises(MalformedCheckpointError):
        shard_name("model", rank, stripe)


def test_record_is_the_documented_one() -> None:
    record, stored = pack_record(MANIFEST_MAGIC, b"body")
    assert len(record) == 64
    assert record[:32] == b"DCPEMANI" + struct.pack("<IIQQ", 1, 0, len(stored), 4)
    assert record[32:] == hashlib.sha256(stored).digest()
    assert zstandard.ZstdDecompressor().decompress(stored) == b"body"
    parsed = parse_record(record, MANIFEST_MAGIC, file="MANIFEST")
    assert open_body(parsed, stored, file="MANIFEST") == b"body"


@settings(max_examples=300)
@given(st.data())
def test_every_flipped_bit_of_record_or_body_is_found(data: st.DataObject) -> None:
    record, stored = pack_record(FOOTER_MAGIC, b"body " * 100)
    whole = bytearray(record + stored)
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptCheckpointError, UnsupportedVersionError)) as caught:
        open_body(parse_record(bytes(whole[:64]), FOOTER_MAGIC, file=NAME), bytes(whole[64:]), file=NAME)
    assert caught.value.file == NAME


def record_of(stored: bytes, raw_bytes: int, *, version: int = 1, stored_bytes: int | None = None) -> bytes:
    length = len(stored) if stored_bytes is None else stored_bytes
    return struct.pack("<8sIIQQ32s", MANIFEST_MAGIC, version, 0, length, raw_bytes, hashlib.sha256(stored).digest())


def test_a_newer_version_says_what_to_do() -> None:
    with pytest.raises(UnsupportedVersionError, match="newer") as caught:
        parse_record(record_of(b"", 0, version=2), MANIFEST_MAGIC, file="MANIFEST")
    assert caught.value.remedy is not None
    assert "upgrade" in caught.value.remedy
    with pytest.raises(MalformedCheckpointError):
        parse_record(record_of(b"", 0, version=0), MANIFEST_MAGIC, file="MANIFEST")


def test_a_body_that_is_too_large_is_refused_before_it_is_decompressed() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    for raw_bytes in (64 << 20, 1 << 62, 2**64 - 1):
        with pytest.raises(LimitExceededError):
            parse_record(record_of(bomb, raw_bytes), MANIFEST_MAGIC, file="MANIFEST")
    with pytest.raises(LimitExceededError):
        parse_record(record_of(bomb, 4, stored_bytes=1 << 40), MANIFEST_MAGIC, file="MANIFEST")


@pytest.mark.parametrize("raw_bytes", [0, 3, 5, 1 << 20])
def test_a_body_of_another_length_than_declared_is_malformed(raw_bytes: int) -> None:
    stored = zstandard.ZstdCompressor().compress(b"body")
    record = parse_record(record_of(stored, raw_bytes), MANIFEST_MAGIC, file="MANIFEST")
    with pytest.raises(MalformedCheckpointError):
        open_body(record, stored, file="MANIFEST")


def test_a_body_with_trailing_bytes_is_malformed() -> None:
    stored = zstandard.ZstdCompressor().compress(b"body") + zstandard.ZstdCompressor().compress(b"")
    record = parse_record(record_of(stored, 4), MANIFEST_MAGIC, file="MANIFEST")
    with pytest.raises(MalformedCheckpointError):
        open_body(record, stored, file="MANIFEST")


def test_marker_is_the_documented_one() -> None:
    text = (
        b"dcp-engine checkpoint 1\n"
        b"nonce 00112233445566778899aabbccddeeff\n"
        b"data .\n"
        b"manifest-bytes 12345\n"
        b"manifest-sha256 " + b"ab" * 32 + b"\n"
    )
    assert encode_marker(MARKER) == text + b"check " + hashlib.sha256(text).hexdigest().encode() + b"\n"
    assert parse_marker(encode_marker(MARKER)) == MARKER
    elsewhere = Marker(NONCE, NONCE, 1, "0" * 64)
    assert parse_marker(encode_marker(elsewhere)) == elsewhere


def test_every_flipped_bit_of_a_marker_is_found() -> None:
    data = encode_marker(MARKER)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptCheckpointError, UnsupportedVersionError)):
            parse_marker(bytes(damaged), path="/checkpoints/7")


def test_every_cut_of_a_marker_is_found() -> None:
    data = encode_marker(MARKER)
    for length in range(len(data)):
        with pytest.raises(MalformedCheckpointError):
            parse_marker(data[:length])


def resigned(text: bytes) -> bytes:
    return text + b"check " + hashlib.sha256(text).hexdigest().encode() + b"\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"data .", b"data .."),
        (b"data .", b"data ../../etc"),
        (b"data .", b"data " + b"f" * 32),
        (b"bytes 12345", b"bytes 012345"),
        (b"bytes 12345", b"bytes -1"),
        (b"bytes 12345", b"bytes 0"),
        (b"bytes 12345", b"bytes " + b"9" * 20),
        (b"nonce 00", b"nonce 0"),
        (b"nonce 00", b"nonce AA"),
        (b"\n", b"\r\n"),
        (b"checkpoint 1", b"checkpoint 01"),
        (b"nonce", b"comment x\nnonce"),
    ],
)
def test_markers_with_a_valid_check_line_are_parsed_strictly_too(old: bytes, new: bytes) -> None:
    text = encode_marker(MARKER).partition(b"check ")[0]
    # "checkpoint" holds "check" but not "check ".
    with pytest.raises(MalformedCheckpointError) as caught:
        parse_marker(resigned(text.replace(old, new)), path="/checkpoints/7")
    assert caught.value.file == "COMPLETE"


@pytest.mark.parametrize("data", [b"", b"\n", bytes(4096), encode_marker(MARKER) * 2, b"x" * 100_000])
def test_other_files_are_no_markers(data: bytes) -> None:
    with pytest.raises(MalformedCheckpointError):
        parse_marker(data)


def test_a_newer_marker_says_so_whatever_else_it_holds() -> None:
    with pytest.raises(UnsupportedVersionError, match="newer"):
        parse_marker(b"dcp-engine checkpoint 2\nanything\n")


def test_a_marker_that_does_not_hold_is_damaged() -> None:
    with pytest.raises(DigestMismatchError):
        parse_marker(encode_marker(MARKER).replace(b"12345", b"12346"))
