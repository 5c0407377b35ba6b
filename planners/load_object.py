"""The bytes of an object back to the object, never by an unpickler that runs code."""

from __future__ import annotations

import io

import torch

from dcp_engine.errors import UntrustedDataError
from dcp_engine.objects import decode_object
from dcp_engine.types import EncodedObject

__all__ = ["load_object"]


def load_object(key: str, value: io.BytesIO) -> object:
    """Decode what a reader hands to ``load_bytes``: our own encoding, or ``torch.save`` bytes of a foreign writer.

    Args:
        key: the object's key, for errors.
        value: its bytes; an :class:`EncodedObject` where they are ours.

    Raises:
        UntrustedDataError: ``torch.load(weights_only=True)`` does not take the bytes.
        MalformedCheckpointError: bytes of ours that do not decode.

    Thread-safety: safe.
    """
    if isinstance(value, EncodedObject):
        with value.getbuffer() as encoded:
            return decode_object(encoded, key=key)
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile or foreign pickle may fail in any way; all of them mean the same here
        raise UntrustedDataError(
            "the object was written by another writer as a pickle that torch.load(weights_only=True) does not take",
            tensor=key,
            found=str(error).partition("\n")[0],
            remedy="allow its types with torch.serialization.add_safe_globals, or leave it out with keys= if you do not need it",
        ) from error
