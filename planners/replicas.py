"""Whether what several ranks hold under one key is really the same: cheap digests of content, and what to do where they differ."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from dcp_engine.errors import InvalidOptionError

__all__ = ["ContentDigests", "ReplicaPolicy", "device_digest", "host_digest"]

Choice = Literal["error", "lowest_rank"]

_HOST_BIT = 1
"""Digests made on the host and on a device are different functions: the lowest bit keeps them apart."""
_COPY_BYTES = 1 << 26
"""Most that is copied at once of a tensor that is not contiguous."""
_DEVICE_ELEMENTS = 1 << 22
"""Elements of one slice of a device digest: bounds its temporaries to 64 MiB."""
_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Element size -> the integers that are summed. At most 32 bits: of a 64-bit one the weight could not tell where its highest bit is set."""


class ReplicaPolicy:
    """What to do where replicas differ, by key.

    Args:
        patterns: glob pattern of keys (``fnmatch`` rules, case-sensitive) -> ``"error"`` or ``"lowest_rank"``; the first match in order
            wins, keys that match none are errors. ``None``: no patterns.

    Raises:
        InvalidOptionError: a choice is neither of the two.

    Thread-safety: immutable after construction. Picklable.
    """

    def __init__(self, patterns: Mapping[str, Choice] | None = None) -> None:
        self._patterns = tuple((patterns or {}).items())
        for pattern, choice in self._patterns:
            if not isinstance(pattern, str) or choice not in ("error", "lowest_rank"):
                raise InvalidOptionError(
                    f"replica_policy[{pattern!r}] is not a policy",
                    expected='a glob pattern -> "error" or "lowest_rank"',
                    found=repr(choice),
                )

    def of(self, key: str) -> Choice:
        """The choice for ``key``."""
        for pattern, choice in self._patterns:
            if fnmatch.fnmatchcase(key, pattern):
                return choice
        return "error"


class ContentDigests:
    """Digests of many values in numbered slots; those of device tensors are fetched together, in one transfer a device.

    Args:
        num_slots: number of slots. A slot that gets nothing has the digest 0, which no content has.

    Thread-safety: none.
    """

    def __init__(self, num_slots: int) -> None:
        self._values = np.zeros(num_slots, dtype=np.uint64)
        self._pending: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}

    def add(self, slot: int, content: torch.Tensor | bytes) -> None:
        """Digest a strided tensor on any device, or bytes."""
        if not isinstance(content, torch.Tensor):
            self._values[slot] = xxhash.xxh3_64_intdigest(content) | _HOST_BIT
        elif content.device.type == "cpu":
            self._values[slot] = host_digest(content)
        else:
            self._pending.setdefault(content.device, []).append((slot, device_digest(content)))

    def add_all(self, slot: int, contents: Iterable[torch.Tensor]) -> None:
        """Digest tensors into this slot and those after it."""
        for number, content in enumerate(contents, start=slot):
            self.add(number, content)

    def finish(self) -> NDArray[np.uint64]:
        """All digests, ``[num_slots]``. Waits for the devices."""
        for pending in self._pending.values():
            fetched = torch.stack([value for _, value in pending]).cpu().numpy().astype(np.int64).view(np.uint64)
            # The lowest bit says "device"; the second keeps the digest from being 0.
            self._values[[slot for slot, _ in pending]] = (fetched & np.uint64(_MASK - _HOST_BIT)) | np.uint64(2)
        self._pending.clear()
        return self._values


def host_digest(tensor: torch.Tensor) -> int:
    """xxh3-64 of a CPU tensor's row-major bytes, whatever its strides, with the host bit set."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():  # a fast way for the many small ones
        return int(xxhash.xxh3_64_intdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)) | _HOST_BIT
    parts = _parts(tensor)
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(_bytes(part))
    return int(digest.intdigest()) | _HOST_BIT


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor in pieces that may be copied: itself where its bytes are in place already, else slices of its leading dimension."""
    nbytes = tensor.numel() * tensor.element_size()
    in_place = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if in_place or nbytes <= _COPY_BYTES:
        return [tensor]
    if tensor.shape[0] == 1:
        return _parts(tensor[0])
    rows = max(1, _COPY_BYTES * tensor.shape[0] // nbytes)
    return [part for rows_of in torch.split(tensor, rows) for part in _parts(rows_of)]


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of a tensor's bits, computed where the tensor is: an int64 scalar on its device, nothing is waited for.

    The row-major elements are taken as integers of at most 32 bits; each slice gives the sum of its integers times odd weights that depend
    on the place, modulo 2**64. It tells replicas that have diverged; it does not resist an adversary.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.full((), math.prod(tensor.shape), dtype=torch.int64, device=tensor.device)
    weights: torch.Tensor | None = None
    for part in torch.split(words, _DEVICE_ELEMENTS):
        if weights is None:
            weights = torch.arange(part.numel(), dtype=torch.int64, device=tensor.device).mul_(_MIX).mul_(2).add_(1)
            weights ^= (weights >> 29) & ~1  # they stay odd, and are no longer an arithmetic progression
        total = total * _MIX + (part.to(torch.int64) * weights[: part.numel()]).sum()
    return total ^ (total >> 32)
