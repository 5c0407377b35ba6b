"""Tied tensors: two keys on one memory.

They are saved once if every rank that holds them agrees, and loaded once. Where the checkpoint holds two values, these are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dcp_engine.errors import ReplicaMismatchError
from dcp_engine.planners.local_shards import LocalTensor

__all__ = ["TieCheck", "agreed_ties", "find_ties", "repeated"]


def find_ties(tensors: Iterable[LocalTensor]) -> dict[str, str]:
    """Alias key -> the first key, in sorted order, that has the same memory on this rank.

    The same memory means the same boxes of the same global shape, and for each the same address, strides, dtype and device. Tensors
    without elements have no memory and are never tied.
    """
    held = [tensor for tensor in tensors if tensor.shards and 0 not in tensor.global_shape]
    addresses = [tensor.shards[0].tensor.data_ptr() for tensor in held]
    if len(set(addresses)) == len(addresses):
        return {}
    by_address: dict[int, list[LocalTensor]] = {}
    for tensor, address in zip(held, addresses, strict=True):
        by_address.setdefault(address, []).append(tensor)
    ties = {}
    for sharing in by_address.values():
        if len(sharing) == 1:
            continue
        first: dict[object, str] = {}
        for tensor in sorted(sharing, key=lambda tensor: tensor.key):
            owner = first.setdefault(_memory(tensor), tensor.key)
            if owner != tensor.key:
                ties[tensor.key] = owner
    return ties


def repeated(addresses: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which addresses are there more than once, ``[num_addresses]``."""
    if len(set(addresses.tolist())) == len(addresses):
        return np.zeros(len(addresses), dtype=np.bool_)
    _, numbers, counts = np.unique(addresses, return_inverse=True, return_counts=True)
    return np.asarray(counts[numbers] > 1)


def _memory(tensor: LocalTensor) -> object:
    # A conjugate or negative view has the same address and strides as its base, and other values.
    return (
        tensor.dtype,
        tensor.global_shape,
        tuple(
            (shard.offsets, shard.sizes, data.data_ptr(), data.stride(), data.device, data.is_conj(), data.is_neg())
            for shard in tensor.shards
            for data in (shard.tensor,)
        ),
    )


def agreed_ties(proposals: Sequence[Mapping[str, str]], holders: Mapping[str, Collection[int]]) -> dict[str, str]:
    """The ties that hold on every rank.

    Args:
        proposals: by rank, what :func:`find_ties` gave there.
        holders: for every key in the proposals, the ranks that hold a part of it.

    Returns:
        Alias key -> key: those that each rank with a part of either proposes. No key is both an alias and the target of one: a rank that
        proposes ``a -> x`` names ``x``, not ``a``, as the target of whatever else shares that memory.
    """
    proposers: dict[tuple[str, str], set[int]] = {}
    for rank, proposal in enumerate(proposals):
        for pair in proposal.items():
            proposers.setdefault(pair, set()).add(rank)
    return {alias: key for (alias, key), ranks in proposers.items() if ranks == {*holders[alias], *holders[key]}}


class TieCheck:
    """Holds what the checkpoint has for the later keys of a tie until all pieces of the first key are in place, then compares.

    Args:
        ties: later key -> first key, where the checkpoint holds both apart.
        num_items: number of reads of each key.

    Thread-safety: all methods may be called from any thread.
    """

    def __init__(self, ties: Mapping[str, str], num_items: Mapping[str, int]) -> None:
        self._first = dict(ties)
        self._members = {*ties, *ties.values()}
        self._left: dict[str, int] = {}
        for key in self._members:
            first = ties.get(key, key)
            self._left[first] = self._left.get(first, 0) + num_items[key]
        self._held: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def is_later(self, key: str) -> bool:
        """Whether values of ``key`` must not be written to the state: its memory belongs to the first key of its tie."""
        return key in self._first

    def committed(self, key: str, target: torch.Tensor, value: torch.Tensor) -> None:
        """One read of ``key`` is done: ``value`` is what the checkpoint has for ``target``.

        Raises:
            ReplicaMismatchError: it was the tie's last read, and the checkpoint's values differ.
        """
        if key not in self._members:
            return
        first = self._first.get(key, key)
        with self._lock:
            if key in self._first:
                self._held.setdefault(first, []).append((key, target, value))
            self._left[first] -= 1
            if self._left[first]:
                return
            held = self._held.pop(first, [])
        for later, place, found in held:
            if not torch.equal(_bits(place), _bits(found.to(place.dtype))):
                raise ReplicaMismatchError(
                    f"{first!r} and {later!r} are one tensor in the state, but the checkpoint holds different values for them",
                    keys=(first, later),
                    tensor=later,
                    expected=f"the values of {first!r}",
                    remedy="untie them in the state, or load one of them alone with keys=",
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaN equals itself."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
