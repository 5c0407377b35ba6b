"""Small files that check themselves: one spelling each, and every damaged bit is found."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.errors import DcpEngineError, DigestMismatchError, MalformedCheckpointError, UnsupportedVersionError
from dcp_engine.storage.epochs import EpochRecord, epoch_name, parse_epoch_name
from dcp_engine.storage.latest import LatestHint
from dcp_engine.storage.texts import decode_name, encode_name, encode_text, parse_text
from dcp_engine.storage.tombstones import Tombstone, is_tombstone, parse_tombstone, tombstone_bytes

NONCE = "0123456789abcdef" * 2
EPOCH = EpochRecord(12, NONCE, "a run", "host-7", 4711, "2031-05-01T12:00:00Z")


def checked(text: str) -> bytes:
    return (text + f"check {hashlib.sha256(text.encode()).hexdigest()}\n").encode()


def test_the_files_are_as_the_specification_says() -> None:
    assert EPOCH.encode() == checked(
        f'dcp-engine epoch 1\nepoch 12\nclaim {NONCE}\nrun "a run"\nhost "host-7"\npid 4711\ntime 2031-05-01T12:00:00Z\n'
    )
    assert LatestHint(7, NONCE).encode() == checked(f"dcp-engine latest 1\nstep 7\nnonce {NONCE}\n")
    first, last = "0" * 32, "f" * 32
    time = tombstone_bytes([last, first]).split(b"time ")[1][:20].decode()
    assert tombstone_bytes([last, first]) == checked(f"dcp-engine retired 1\nnonce {first}\nnonce {last}\ntime {time}\n")
    assert parse_tombstone(tombstone_bytes([last, first]), path="p") == Tombstone((first, last), time)


@pytest.mark.parametrize("content", [EPOCH.encode(), LatestHint(7, NONCE).encode(), tombstone_bytes([NONCE])])
def test_every_flipped_bit_and_every_cut_is_found(content: bytes) -> None:
    def parse(data: bytes) -> object:
        if b"epoch" in content:
            return EpochRecord.decode(data, file="f", path="p")
        return LatestHint.decode(data, path="p") if b"latest" in content else parse_tombstone(data, path="p")

    parse(content)
    for bit in range(len(content) * 8):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DigestMismatchError, MalformedCheckpointError, UnsupportedVersionError)):
            parse(bytes(damaged))
    for length in range(len(content)):
        with pytest.raises(MalformedCheckpointError):
            parse(content[:length])
    with pytest.raises(MalformedCheckpointError):
        parse(content + b"\n")


@pytest.mark.parametrize(
    "text",
    [
        "dcp-engine latest 1\n",
        f"dcp-engine latest 1\nstep 7\nnonce {NONCE[1:]}\n",
        f"dcp-engine latest 1\nstep 07\nnonce {NONCE}\n",
        f"dcp-engine latest 1\nstep -1\nnonce {NONCE}\n",
        f"dcp-engine latest 1\nstep {2**63}\nnonce {NONCE}\n",
        f"dcp-engine latest 1\nnonce {NONCE}\nstep 7\n",
        f"dcp-engine latest 1\nstep 7\nnonce {NONCE}\nmore x\n",
        f"dcp-engine latest 01\nstep 7\nnonce {NONCE}\n",
        f"dcp-engine epoch 1\nstep 7\nnonce {NONCE}\n",
        f"dcp-engine latest 1\nstep 7 \nnonce {NONCE}\n",
    ],
)
def test_right_digests_do_not_make_wrong_fields_right(text: str) -> None:
    with pytest.raises(MalformedCheckpointError):
        LatestHint.decode(checked(text), path="p")


@pytest.mark.parametrize(
    "text",
    [
        "dcp-engine retired 1\ntime 2031-05-01T12:00:00Z\n",
        f"dcp-engine retired 1\nnonce {NONCE}\n",
        f"dcp-engine retired 1\nnonce {NONCE}\nnonce {NONCE}\ntime 2031-05-01T12:00:00Z\n",
        f"dcp-engine retired 1\nnonce {'f' * 32}\nnonce {NONCE}\ntime 2031-05-01T12:00:00Z\n",
        f"dcp-engine retired 1\nnonce {NONCE}\ntime yesterday\n",
        "dcp-engine retired 1\nnonce x\ntime 2031-05-01T12:00:00Z\n",
    ],
)
def test_a_tombstone_has_nonces_in_order_and_a_time(text: str) -> None:
    assert is_tombstone(text.encode())
    with pytest.raises(MalformedCheckpointError):
        parse_tombstone(checked(text), path="p")


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_refused_by_our_errors_alone(data: bytes) -> None:
    for content in (
        data,
        b"dcp-engine epoch 1\n" + data,
        checked("dcp-engine epoch 1\n" + data.decode("latin-1").replace("\n", " ") + "\n"),
    ):
        with pytest.raises(DcpEngineError):
            EpochRecord.decode(content, file="f", path="p")


@given(st.text())
def test_names_of_any_characters_take_one_line(name: str) -> None:
    value = encode_name(name)
    assert "\n" not in value
    assert value.isascii()
    assert decode_name(value) == name
    assert parse_text(encode_text("x", [("run", value)]), "x", file="f", path="p") == [("run", value)]


@pytest.mark.parametrize("value", ["", "x", "7", "[]", '"a" ', '"\\u0041"', '"a', "null"])
def test_a_name_has_one_spelling(value: str) -> None:
    assert decode_name(value) is None


@pytest.mark.parametrize(("name", "epoch"), [("00000001", 1), ("99999999", 99_999_999), ("100000000", 10**8), ("9" * 18, 10**18 - 1)])
def test_epochs_have_one_name_each(name: str, epoch: int) -> None:
    assert parse_epoch_name(name) == epoch
    assert epoch_name(epoch) == name


@pytest.mark.parametrize("name", ["", "1", "00000000", "000000001", "00000001 ", "-0000001", "9" * 19, "0000000\uff11", "PROBE"])
def test_names_that_resemble_an_epoch_are_none(name: str) -> None:
    assert parse_epoch_name(name) is None
