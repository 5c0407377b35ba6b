"""The coordinator's work: hold the local plans of all ranks against each other, drop replicas, share out the bytes, describe the result.

Pure functions of the local plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_engine.errors import PlanError, ReplicaMismatchError
from dcp_engine.plan_columns import PlanColumns
from dcp_engine.planners.balance import Piece, Unit, assign, cut_dim
from dcp_engine.planners.geometry import TilingFault, as_boxes, check_tiling
from dcp_engine.planners.replicas import ReplicaPolicy
from dcp_engine.planners.save_local import LocalPlanData
from dcp_engine.planners.ties import agreed_ties

__all__ = ["GlobalPlan", "RankPlan", "plan_globally"]

Holder = tuple[int, int]
"""A rank, and the number of the item in its local plan."""
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's local plan. The digests and sizes of ``data`` are aligned with ``items``."""

    items: Sequence[WriteItem]
    data: LocalPlanData


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """What all ranks do.

    Attributes:
        items: by rank, in the order of its local plan.
        metadata: key -> what is stored under it, or the columns that say so; an alias of a tie is described like the key that it is
            stored under.
        ties: alias key -> key.
        order: what was taken for the same and written once, group by group: positions among the items of all ranks, one after the other.
        groups: for each of these positions, where its group begins in ``order``.
        by_policy: replicas differed and a policy chose: the choice is to be made anew whenever contents change.
    """

    items: Sequence[Sequence[WriteItem]]
    metadata: dict[str, STORAGE_TYPES] | PlanColumns
    ties: dict[str, str]
    order: NDArray[np.int64]
    groups: NDArray[np.int64]
    by_policy: bool


class _Entry:
    """All that the ranks hold under one key."""

    __slots__ = ("boxes", "first", "key", "kind", "odd")

    def __init__(self, item: WriteItem, kind: Any) -> None:
        self.key = item.index.fqn
        self.first = item
        self.kind = kind
        """dtype and global shape of a tensor, None for an object: those of the lowest rank that has the key."""
        self.boxes: dict[Box, list[Holder]] = {}
        self.odd: dict[Any, list[Holder]] = {}
        """Holders whose kind is another one, by kind."""


def plan_globally(plans: Sequence[RankPlan], *, policy: ReplicaPolicy, split_bytes: int, keep_empty: bool) -> GlobalPlan:
    """Decide what each rank writes.

    Args:
        plans: local plans, by rank.
        policy: what to do where replicas differ.
        split_bytes: as for :func:`dcp_engine.planners.balance.assign`.
        keep_empty: a tensor without elements is written by one rank, as one empty chunk; otherwise only the metadata has it.

    Raises:
        ReplicaMismatchError: ranks hold different content, shapes, dtypes or kinds under one key, and the policy does not choose.
        PlanError: the boxes of a tensor do not cover it exactly once, or no rank holds any of it.
    """
    entries = _gather(plans)
    _check_held(entries, plans)
    digests = [plan.data.digests for plan in plans]
    ties = _settle_ties(entries, plans)
    for alias in ties:
        del entries[alias]
    by_policy = _settle_replicas(entries, digests, policy)
    for entry in entries.values():
        _check_tiling(entry, num_ranks=len(plans))
    draft = _Draft([[] for _ in plans], [0] * len(plans), {}, [])
    for entry in entries.values():
        draft.add(entry, plans, keep_empty=keep_empty)
    units = [_unit(entry, box, holders, plans) for entry, box, holders in draft.shared]
    for (entry, box, holders), pieces in zip(draft.shared, assign(units, draft.loads, split_bytes=split_bytes), strict=True):
        draft.add_pieces(entry, box, pieces, plans, dict(holders))
    for alias, key in ties.items():
        draft.metadata[alias] = draft.metadata[key]
    items = [[item for _, item in sorted(pairs, key=_number)] for pairs in draft.items]
    return GlobalPlan(items, draft.metadata, ties, *_replicas(draft.shared, plans), by_policy)


def _replicas(shared: Sequence[tuple[_Entry, Box, list[Holder]]], plans: Sequence[RankPlan]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    first = np.concatenate(([0], np.cumsum([len(plan.items) for plan in plans], dtype=np.int64)))
    order = np.array([first[rank] + number for _, _, holders in shared for rank, number in holders], dtype=np.int64)
    counts = np.array([len(holders) for _, _, holders in shared], dtype=np.int64)
    return order, np.repeat(np.cumsum(counts) - counts, counts)


def _number(pair: tuple[int, WriteItem]) -> int:
    return pair[0]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A global plan in the making.

    Attributes:
        items: by rank, each with the number of the local item that it comes from.
        loads: bytes by rank of what only that rank holds.
        metadata: as of :class:`GlobalPlan`, without aliases.
        shared: what several ranks hold, not yet in ``items``.
    """

    items: list[list[tuple[int, WriteItem]]]
    loads: list[int]
    metadata: dict[str, STORAGE_TYPES]
    shared: list[tuple[_Entry, Box, list[Holder]]]

    def add(self, entry: _Entry, plans: Sequence[RankPlan], *, keep_empty: bool) -> None:
        data = entry.first.tensor_data
        if data is None:
            self.metadata[entry.key] = BytesStorageMetadata()
        else:
            described = TensorStorageMetadata(properties=data.properties, size=data.size, chunks=[])
            self.metadata[entry.key] = described
            if 0 in data.size and not keep_empty:
                return
        for box, holders in entry.boxes.items():
            if len(holders) > 1:
                self.shared.append((entry, box, holders))
                continue
            rank, number = holders[0]
            item = plans[rank].items[number]
            self.items[rank].append((number, item))
            if item.tensor_data is None:
                self.loads[rank] += int(plans[rank].data.object_bytes[number])
            else:
                self.loads[rank] += math.prod(box[1]) * item.tensor_data.properties.dtype.itemsize
                described.chunks.append(item.tensor_data.chunk)

    def add_pieces(self, entry: _Entry, box: Box, pieces: Sequence[Piece], plans: Sequence[RankPlan], numbers: Mapping[int, int]) -> None:
        for rank, item in _items_of(entry, box, pieces, plans, numbers):
            self.items[rank].append((numbers[rank], item))
            described = self.metadata[entry.key]
            if item.tensor_data is not None:
                assert isinstance(described, TensorStorageMetadata)
                described.chunks.append(item.tensor_data.chunk)


def _gather(plans: Sequence[RankPlan]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for rank, plan in enumerate(plans):
        if not len(plan.items) == len(plan.data.digests) == len(plan.data.object_bytes):
            raise PlanError(
                "a rank's plan has other items than its planner described",
                rank=rank,
                expected=f"{len(plan.data.digests)} items",
                found=f"{len(plan.items)} items",
                remedy="leave keys out of the state dict, not out of the plan that create_local_plan returned",
            )
        for number, item in enumerate(plan.items):
            data = item.tensor_data
            kind = None if data is None else (data.properties.dtype, data.size)
            entry = entries.get(item.index.fqn)
            if entry is None:
                entry = entries[item.index.fqn] = _Entry(item, kind)
            if entry.kind == kind:
                box = ((), ()) if data is None else (data.chunk.offsets, data.chunk.sizes)
                entry.boxes.setdefault(box, []).append((rank, number))
            else:
                entry.odd.setdefault(kind, []).append((rank, number))
    return entries


def _check_held(entries: Mapping[str, _Entry], plans: Sequence[RankPlan]) -> None:
    """A tensor without any item would be left out of the checkpoint without a word."""
    for rank, plan in enumerate(plans):
        for key in plan.data.unheld:
            if key not in entries:
                raise PlanError(
                    "no rank that takes part in the save holds any part of a tensor",
                    tensor=key,
                    rank=rank,
                    expected="the ranks of the tensor's mesh",
                    found=f"{len(plans)} ranks that are outside of it or hold no element",
                    remedy="save with a process group that has the tensor's ranks, or leave the key out of the state",
                )


def _settle_replicas(entries: Mapping[str, _Entry], digests: Sequence[NDArray[np.uint64]], policy: ReplicaPolicy) -> bool:
    """Leave in every box only holders with the same content. Returns whether a policy had to choose."""
    unequal: dict[str, tuple[tuple[int, ...], ...]] = {}
    kinds: dict[str, list[Any]] = {}
    chosen = False
    for entry in entries.values():
        if entry.odd:
            chosen = True
            if policy.of(entry.key) == "error":
                by_kind = [[rank for holders in entry.boxes.values() for rank, _ in holders]]
                by_kind += [[rank for rank, _ in holders] for holders in entry.odd.values()]
                unequal[entry.key] = _grouped(by_kind)
                kinds[entry.key] = [entry.kind, *entry.odd]
                continue
        for box, holders in entry.boxes.items():
            if len(holders) == 1:
                continue
            by_content: dict[int, list[Holder]] = {}
            for holder in holders:
                by_content.setdefault(int(digests[holder[0]][holder[1]]), []).append(holder)
            if 0 in by_content:
                raise _shared_shard(entry.key, box, sorted({rank for rank, _ in holders}))
            if len(by_content) > 1:
                chosen = True
                if policy.of(entry.key) == "error":
                    unequal[entry.key] = _grouped([[rank for rank, _ in same] for same in by_content.values()])
                    break
            entry.boxes[box] = list(next(iter(by_content.values())))
    if unequal:
        raise _mismatch(unequal, kinds)
    return chosen


def _shared_shard(key: str, box: Box, ranks: Sequence[int]) -> PlanError:
    one = len(ranks) == 1
    return PlanError(
        "a rank holds the same part of a tensor twice"
        if one
        else "several ranks hold the same part of a tensor that they take for sharded",
        tensor=key,
        rank=ranks[0],
        expected=f"one holder of the box at {tuple(box[0])} of sizes {tuple(box[1])}",
        found=None if one else f"ranks {', '.join(map(str, ranks))}",
        remedy="give each box of the tensor once" if one else "save with the process group that the state's device meshes belong to",
    )


def _grouped(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(set(group))) for group in groups))


def _mismatch(unequal: Mapping[str, tuple[tuple[int, ...], ...]], kinds: Mapping[str, Sequence[Any]]) -> ReplicaMismatchError:
    keys = tuple(sorted(unequal))
    first = keys[0]
    others = f" and under {len(keys) - 1} more keys" if len(keys) > 1 else ""
    groups = " | ".join(", ".join(map(str, group)) for group in unequal[first])
    kind = f": {', '.join(_kind_name(kind) for kind in kinds[first])}" if first in kinds else ""
    return ReplicaMismatchError(
        f"ranks hold different values under one key{others}",
        keys=keys,
        ranks=tuple(unequal[key] for key in keys),
        tensor=first,
        expected="the same content on every rank that holds it",
        found=f"ranks with equal content: {groups}{kind}",
        remedy=(
            "give per-rank values keys of their own (with the rank in the name), or choose for keys that may differ with "
            f'BalancedSavePlanner(replica_policy={{{first!r}: "lowest_rank"}})'
        ),
    )


def _kind_name(kind: Any) -> str:
    return "an object" if kind is None else f"{kind[0]} {tuple(kind[1])}"


def _settle_ties(entries: Mapping[str, _Entry], plans: Sequence[RankPlan]) -> dict[str, str]:
    proposals = [{alias: key for alias, key in plan.data.ties.items() if alias in entries and key in entries} for plan in plans]
    named = {name for proposal in proposals for pair in proposal.items() for name in pair}
    holders = {name: {rank for same in entries[name].boxes.values() for rank, _ in same} for name in named}
    return {
        alias: key
        for alias, key in agreed_ties(proposals, holders).items()
        if not entries[alias].odd and not entries[key].odd and entries[alias].boxes.keys() == entries[key].boxes.keys()
    }


def _check_tiling(entry: _Entry, *, num_ranks: int) -> None:
    if entry.kind is None:
        return
    shape = tuple(entry.kind[1])
    boxes = list(entry.boxes)
    if len(boxes) == 1 and tuple(boxes[0][1]) == shape and not any(boxes[0][0]):
        return
    fault = check_tiling(shape, as_boxes([box[0] for box in boxes], len(shape)), as_boxes([box[1] for box in boxes], len(shape)))
    if fault is not None:
        raise _not_tiled(entry, fault, [sorted({rank for rank, _ in entry.boxes[boxes[number]]}) for number in fault.boxes], num_ranks)


def _not_tiled(entry: _Entry, fault: TilingFault, ranks: Sequence[Sequence[int]], num_ranks: int) -> PlanError:
    what = {
        "out_of_bounds": "a rank holds a part outside of the tensor",
        "overlap": "two parts of a tensor that differ in shape share elements",
        "hole": f"none of {num_ranks} ranks holds a part of the tensor",
    }[fault.kind]
    return PlanError(
        what,
        tensor=entry.key,
        rank=ranks[0][0] if ranks else None,
        expected=f"boxes that cover {tuple(entry.kind[1])} exactly once",
        found=f"{fault.kind} at offsets {fault.offsets}, sizes {fault.sizes}"
        + (f", held by ranks {' and by ranks '.join(', '.join(map(str, group)) for group in ranks)}" if ranks else ""),
        remedy="all ranks of the tensor's mesh must take part in the save, with one layout" if fault.kind != "out_of_bounds" else None,
    )


def _unit(entry: _Entry, box: Box, holders: Sequence[Holder], plans: Sequence[RankPlan]) -> Unit:
    ranks = tuple(sorted({rank for rank, _ in holders}))
    if entry.kind is None:
        rank, number = holders[0]
        return Unit(max(1, int(plans[rank].data.object_bytes[number])), ranks)
    num_bytes = math.prod(box[1]) * entry.kind[0].itemsize
    if len(ranks) == 1 or not num_bytes:
        return Unit(num_bytes, ranks)
    return Unit(num_bytes, ranks, box[1][cut_dim(box[1], len(ranks))] if box[1] else 1)


def _items_of(
    entry: _Entry, box: Box, pieces: Sequence[Piece], plans: Sequence[RankPlan], numbers: Mapping[int, int]
) -> Iterator[tuple[int, WriteItem]]:
    if len(pieces) == 1:
        rank = pieces[0].rank
        yield rank, plans[rank].items[numbers[rank]]
        return
    dim = cut_dim(box[1], len(numbers))
    for piece in pieces:
        offsets, sizes = list(box[0]), list(box[1])
        offsets[dim] += piece.begin
        sizes[dim] = piece.end - piece.begin
        item = plans[piece.rank].items[numbers[piece.rank]]
        assert item.tensor_data is not None
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        data = TensorWriteData(chunk=chunk, properties=item.tensor_data.properties, size=item.tensor_data.size)
        yield piece.rank, replace(item, index=MetadataIndex(entry.key, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)
