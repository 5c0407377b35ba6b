"""Signatures of COMPLETE: who holds the key vouches for the whole checkpoint, since its SHA-256 chain begins there."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import Final

from dcp_engine.errors import SignatureError
from dcp_engine.storage.envelope import Marker, signed_text
from dcp_engine.storage.keys import SecretKey, key_id

__all__ = ["REMEDY", "check_signature", "sign"]

REMEDY: Final = "load a checkpoint that a holder of your key has signed, or pass the key that this one was signed with"


def sign(marker: Marker, key: SecretKey) -> Marker:
    """The marker with a signature of the key. Raises ``InvalidOptionError`` where the key cannot be had."""
    material = key.material()
    named = replace(marker, key_id=key_id(material, "signing").hex())
    return replace(named, signature=_signature(named, material))


def check_signature(marker: Marker, key: SecretKey, *, path: str | None = None) -> None:
    """Refuse a marker that the holder of the key has not signed.

    Raises:
        SignatureError: it is not signed, with another key, or not as it is.
        InvalidOptionError: the key cannot be had.
    """
    material = key.material()
    own = key_id(material, "signing").hex()
    if not marker.signature:
        message, expected, found = "the checkpoint is not signed", f"a signature of key {own}", "no signature"
    elif not hmac.compare_digest(marker.key_id, own):
        message, expected, found = "the checkpoint is signed with another key", f"key {own}", f"key {marker.key_id}"
    elif not hmac.compare_digest(marker.signature, _signature(marker, material)):
        message, expected, found = "the checkpoint's signature is forged or damaged", f"what key {own} has signed", "something else"
    else:
        return
    raise SignatureError(message, path=path, file="COMPLETE", expected=expected, found=found, remedy=REMEDY)


def _signature(marker: Marker, material: bytes) -> str:
    return hmac.new(material, signed_text(marker), hashlib.sha256).hexdigest()
