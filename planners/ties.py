"""Tied tensors: two keys on one memory, which are saved once if every rank that holds them agrees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dcp_engine.planners.local_shards import LocalTensor

__all__ = ["agreed_ties", "find_ties"]


def find_ties(tensors: Iterable[LocalTensor]) -> dict[str, str]:
    """Alias key -> the first key, in sorted order, that has the same memory on this rank.

    The same memory means the same boxes of the same global shape, and for each the same address, strides, dtype and device. Tensors
    without elements have no memory and are never tied.
    """
    by_address: dict[int, list[LocalTensor]] = {}
    for tensor in tensors:
        if tensor.shards and 0 not in tensor.global_shape:
            by_address.setdefault(tensor.shards[0].tensor.data_ptr(), []).append(tensor)
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
