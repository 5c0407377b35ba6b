"""What a reader demands of a checkpoint that it has opened, before it believes a word of its manifest or reads a block."""

from __future__ import annotations

from dcp_engine.errors import EncryptionKeyError, MalformedCheckpointError, SignatureError
from dcp_engine.storage.digest import SHA256, digest_of_column
from dcp_engine.storage.encryption import BlockCipher
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.publish import OpenCheckpoint
from dcp_engine.storage.signing import REMEDY, check_signature

__all__ = ["cipher_of", "manifest_of"]


def manifest_of(opened: OpenCheckpoint, *, signing_key: SecretKey | None, path: str) -> Manifest:
    """The manifest of a checkpoint.

    Args:
        opened: COMPLETE, and the MANIFEST that it names.
        signing_key: whose holder must have signed it; ``None``: it need not be signed, and a signature is not looked at.
        path: of the checkpoint, for messages.

    Raises:
        SignatureError: it is not signed with the key, or the signature does not reach its blocks. Nothing was parsed then.
        CorruptCheckpointError kinds, UnsupportedVersionError: see :meth:`Manifest.decode`.
        InvalidOptionError: the key cannot be had.
    """
    if signing_key is not None:
        check_signature(opened.marker, signing_key, path=path)
    manifest = Manifest.decode(opened.manifest_bytes, path=path)
    if manifest.nonce != opened.marker.nonce:
        raise MalformedCheckpointError(
            "MANIFEST is of another attempt than COMPLETE", path=path, file="MANIFEST", expected=opened.marker.nonce, found=manifest.nonce
        )
    table = manifest.table
    if opened.marker.signature and len(table.block_codecs) and digest_of_column(table.block_digests) is not SHA256:
        raise SignatureError(
            "the checkpoint is signed, but the digests of its blocks are no protection against forgery",
            path=path,
            file="MANIFEST",
            expected="sha256 digests",
            found="xxh3 digests",
            remedy=REMEDY,
        )
    return manifest


def cipher_of(manifest: Manifest, encryption_key: SecretKey | None, *, path: str) -> BlockCipher | None:
    """What decrypts the blocks; ``None`` if they are not encrypted.

    Raises:
        EncryptionKeyError: no key was given, or another one, or one for blocks that are not encrypted.
        InvalidOptionError: the key cannot be had, or the library is missing.
    """
    wanted = manifest.table.encryption_key_id
    if encryption_key is None:
        if wanted:
            raise EncryptionKeyError(
                "the checkpoint is encrypted",
                path=path,
                step=manifest.step,
                expected=f"encryption key {wanted.hex()}",
                found="no encryption_key",
                remedy="pass that key as encryption_key",
            )
        return None
    cipher = BlockCipher(encryption_key.material(), manifest.nonce)
    if wanted != cipher.key_id and (wanted or len(manifest.table.block_codecs)):
        raise EncryptionKeyError(
            "the checkpoint is encrypted with another key" if wanted else "the checkpoint is not encrypted",
            path=path,
            step=manifest.step,
            expected=f"encryption key {cipher.key_id.hex()}, which was passed",
            found=f"encryption key {wanted.hex()}" if wanted else "blocks in the clear",
            remedy="pass the key that is named" if wanted else "pass no encryption_key, if that is what you expect",
        )
    return cipher if wanted else None
