"""Values that are stored as one object: encoded when the state is taken, so that what cannot be stored is refused before anything happens.

A state of somebody else's class may grow, shrink and nest from one step to the next. Flattened into keys it would no longer fit the state
that it is loaded into, and DCP's flatten turns integer keys into text and drops empty dicts.
"""

from __future__ import annotations

from typing import Any

from dcp_engine.errors import KindMismatchError
from dcp_engine.objects import decode_object, encode_object

__all__ = ["pack", "unpack"]


def pack(value: object, *, key: str) -> bytes:
    """The encoding of :mod:`dcp_engine.objects`.

    Raises:
        UnencodableObjectError: a part of the value has no type in the format; names the key and the part.
    """
    return encode_object(value, key=key)


def unpack(value: object, *, key: str) -> Any:
    """What was packed.

    Raises:
        KindMismatchError: something else is stored there.
        MalformedCheckpointError: bytes that :func:`pack` does not give.
    """
    if not isinstance(value, bytes):
        raise KindMismatchError("the stored value is not one of TrainState's", tensor=key, expected="bytes", found=type(value).__name__)
    return decode_object(value, key=key)
