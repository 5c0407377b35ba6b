"""Holds two training states against each other, bit for bit, and names what differs. Pure: no I/O, no communication."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_engine.errors import DcpEngineError
from dcp_engine.objects import decode_object

__all__ = ["Difference", "differences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that two states do not share.

    Attributes:
        component: first element of the key: ``model``, ``optimizer``, ``rng``, ...
        key: of the value, dots between its elements, down to the part that differs.
        text: how they differ.
    """

    component: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Difference, ...]:
    """What differs, in the order of ``expected``. Tensors are compared by this rank's bytes, floats by their bits.

    Args:
        expected: a state of ``TrainState.state_dict()``.
        found: another one.
    """
    return tuple(Difference(component=key.partition(".")[0], key=key, text=text) for key, text in _compare("", expected, found))


def _compare(key: str, expected: Any, found: Any) -> Iterator[tuple[str, str]]:
    if expected is found:
        return
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        yield from _compare_mappings(key, expected, found)
    elif type(expected) is not type(found):
        yield key, f"{type(found).__name__} instead of {type(expected).__name__}"
    elif isinstance(expected, torch.Tensor):
        yield from ((key, text) for text in _compare_tensors(expected, found))
    elif isinstance(expected, np.ndarray):
        if expected.dtype != found.dtype or expected.shape != found.shape or expected.tobytes() != found.tobytes():
            yield key, "other numbers"
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            yield key, f"{len(found)} elements instead of {len(expected)}"
        for number, pair in enumerate(zip(expected, found, strict=False)):
            yield from _compare(f"{key}.{number}", *pair)
    elif isinstance(expected, bytes):
        if expected != found:
            yield from _compare_packed(key, expected, found)
    elif not _is_same(expected, found):
        yield key, f"{found!r:.60} instead of {expected!r:.60}"


def _compare_mappings(key: str, expected: Mapping[Any, Any], found: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    start = f"{key}." if key else ""
    for name, value in expected.items():
        if name not in found:
            yield f"{start}{name}", "is missing"
        else:
            yield from _compare(f"{start}{name}", value, found[name])
    yield from ((f"{start}{name}", "was not expected") for name in found if name not in expected)


def _compare_packed(key: str, expected: bytes, found: bytes) -> Iterator[tuple[str, str]]:
    try:
        parts = list(_compare(key, decode_object(expected, key=key), decode_object(found, key=key)))
    except DcpEngineError:  # bytes of the user's own
        parts = []
    yield from parts or [(key, "other bytes")]


def _compare_tensors(expected: torch.Tensor, found: torch.Tensor) -> Iterator[str]:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        yield f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
        return
    one, other = _local_bytes(expected), _local_bytes(found)
    if one.shape != other.shape:
        yield "laid out otherwise over the ranks"
    elif one.device == other.device and one.data_ptr() == other.data_ptr():
        return  # one memory
    elif not torch.equal(one, other.to(one.device)):
        yield "other values"


def _local_bytes(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8)


def _is_same(expected: Any, found: Any) -> bool:
    if isinstance(expected, float):
        return struct.pack("d", expected) == struct.pack("d", found) or (math.isnan(expected) and math.isnan(found))
    return bool(expected == found)
