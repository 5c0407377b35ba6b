"""Ciphers of blocks: against an independent derivation, and bound to checkpoint, file and block."""

from __future__ import annotations

import itertools
import pickle

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dcp_engine.errors import DecryptionError
from dcp_engine.storage.encryption import BlockCipher

KEY = bytes(range(32))
NONCES = ("00112233445566778899aabbccddeeff", "0f1e2d3c4b5a69788796a5b4c3d2e1f0")
NAMES = ("model-00000.shard", "model-00000.1.shard", "model-00001.shard", "optimizer-00000.shard")


def sealed(data: bytes, *, key: bytes = KEY, nonce: str = NONCES[0], name: str = NAMES[0], block: int = 0) -> bytes:
    out = bytearray(len(data) + 16)
    BlockCipher(key, nonce).of_file(name).seal(block, data, memoryview(out))
    return bytes(out)


def opened(stored: bytes, *, key: bytes = KEY, nonce: str = NONCES[0], name: str = NAMES[0], block: int = 0) -> bytes:
    out = bytearray(len(stored) - 16)
    BlockCipher(key, nonce).of_file(name).open(block, memoryview(stored), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40])
@pytest.mark.parametrize("block", [0, 1, 1 << 24])
def test_a_sealed_block_is_what_the_page_says(data: bytes, block: int) -> None:
    nonce, name = bytes.fromhex(NONCES[0]), NAMES[1].encode()
    key = HKDF(algorithm=hashes.SHA256(), length=32, salt=nonce, info=b"dcp-engine aes-256-gcm\0" + name).derive(KEY)
    expected = AESGCM(key).encrypt(block.to_bytes(12, "big"), data, nonce + name + b"\0" + block.to_bytes(8, "little"))
    assert sealed(data, name=NAMES[1], block=block) == expected
    assert opened(expected, name=NAMES[1], block=block) == data


def test_equal_blocks_are_never_sealed_alike() -> None:
    places = list(itertools.product(NONCES, NAMES, range(5)))
    assert len({sealed(bytes(100), nonce=nonce, name=name, block=block) for nonce, name, block in places}) == len(places)


@pytest.mark.parametrize("other", [{"key": KEY[::-1]}, {"nonce": NONCES[1]}, {"name": NAMES[2]}, {"block": 1}])
def test_a_block_opens_in_its_place_alone(other: dict[str, object]) -> None:
    with pytest.raises(DecryptionError):
        opened(sealed(b"abc"), **other)  # type: ignore[arg-type]


def test_a_changed_bit_anywhere_is_found() -> None:
    stored = sealed(b"some bytes")
    for place in range(8 * len(stored)):
        changed = bytearray(stored)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(DecryptionError):
            opened(bytes(changed))


def test_a_cipher_shows_no_key_and_is_not_pickled() -> None:
    cipher = BlockCipher(KEY, NONCES[0])
    assert repr(cipher) == f"<cipher of key {cipher.key_id.hex()}>"
    for value in (cipher, cipher.of_file(NAMES[0])):
        with pytest.raises(TypeError):
            pickle.dumps(value)
