"""Blocks encrypted at rest: AES-256-GCM under a key of each file, which follows from the user's key, the attempt and the file's name.

A pair of key and nonce never comes twice: the attempt's 128-bit nonce is drawn for every save, a file is written once in it, and the number
of the block in its file is the nonce of the cipher. ``docs/format.md`` has the derivation.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Any

from dcp_engine.errors import DecryptionError, InvalidOptionError
from dcp_engine.storage.envelope import nonce_bytes
from dcp_engine.storage.keys import KeySource, SecretKey, key_id, secret_key
from dcp_engine.storage.limits import TAG_BYTES

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import Buffer

__all__ = ["BlockCipher", "FileCipher", "encryption_key_of"]

_NONCE = struct.Struct(">IQ")  # 96 bits


def encryption_key_of(source: KeySource | None) -> SecretKey | None:
    """The option ``encryption_key``.

    Raises:
        InvalidOptionError: it is no key, or the library is missing or too old; says how to install it.
    """
    key = secret_key(source, "encryption_key")
    if key is not None:
        _cipher()
    return key


def _cipher() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise _missing("it is not installed") from error
    if not hasattr(AESGCM, "decrypt_into"):
        raise _missing("the one that is installed is too old")
    return AESGCM


def _missing(found: str) -> InvalidOptionError:
    return InvalidOptionError(
        "encryption_key needs the library cryptography",
        expected="cryptography 47 or newer",
        found=found,
        remedy="pip install 'dcp-engine[crypto]'",
    )


class BlockCipher:
    """The cipher of one checkpoint. Shows no key, and cannot be pickled.

    Args:
        material: the user's key.
        nonce: of the attempt, 32 hex digits.

    Attributes:
        key_id: tells the user's key from others.

    Thread-safety: immutable.
    """

    __slots__ = ("_aead", "_prk", "_salt", "key_id")

    def __init__(self, material: bytes, nonce: str) -> None:
        self._aead = _cipher()
        self._salt = nonce_bytes(nonce)
        self._prk = hmac.new(self._salt, material, hashlib.sha256).digest()  # HKDF's extraction, RFC 5869
        self.key_id = key_id(material, "encryption")

    def of_file(self, name: str) -> FileCipher:
        """The cipher of one file."""
        info = b"dcp-engine aes-256-gcm\0" + name.encode("ascii")
        # HKDF's expansion to one hash.
        return FileCipher(self._aead(hmac.new(self._prk, info + b"\1", hashlib.sha256).digest()), self._salt + name.encode("ascii") + b"\0")

    def __repr__(self) -> str:
        return f"<cipher of key {self.key_id.hex()}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a cipher holds keys, and is made anew where it is needed")


class FileCipher:
    """The cipher of the blocks of one file.

    Thread-safety: immutable; any thread may seal and open. Both release the GIL.
    """

    __slots__ = ("_aead", "_context")

    def __init__(self, aead: Any, context: bytes) -> None:
        self._aead = aead
        self._context = context

    def seal(self, block: int, encoded: Buffer, out: memoryview) -> None:
        """Encrypt a block.

        Args:
            block: its number in the file.
            encoded: its bytes as the codec has made them.
            out: ``TAG_BYTES`` longer, elsewhere.
        """
        self._aead.encrypt_into(_NONCE.pack(0, block), encoded, self._bound(block), out)

    def open(self, block: int, stored: memoryview, out: memoryview) -> None:
        """Decrypt a block.

        Args:
            block: its number in the file.
            stored: its bytes as they are stored, at least ``TAG_BYTES``.
            out: ``TAG_BYTES`` shorter, elsewhere. Undefined after an error.

        Raises:
            DecryptionError: they are not what was encrypted with this key, for this checkpoint, file and block.
        """
        from cryptography.exceptions import InvalidTag

        assert len(out) == len(stored) - TAG_BYTES
        try:
            self._aead.decrypt_into(_NONCE.pack(0, block), stored, self._bound(block), out)
        except InvalidTag as error:
            raise DecryptionError(
                "an encrypted block is not the one that was encrypted",
                expected="what this key has encrypted for this checkpoint, file and block",
                found="another authentication tag",
            ) from error

    def _bound(self, block: int) -> bytes:
        return self._context + block.to_bytes(8, "little")
