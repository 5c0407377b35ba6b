"""The items of a load plan: which pieces of which stored chunks fill the boxes that a rank wants. A plan that keeps them at home."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_engine.errors import CorruptCheckpointError, PlanError
from dcp_engine.planners.geometry import TilingFault, as_boxes, check_tiling, intersect
from dcp_engine.planners.local_shards import LocalTensor

__all__ = ["LeanLoadPlan", "object_item", "tensor_items", "with_items"]

Int64s = NDArray[np.int64]

_ORIGINS: dict[int, torch.Size] = {}


def _origin(num_dims: int) -> torch.Size:
    """The zero offset, one object per number of dimensions: there may be a hundred thousand items."""
    if num_dims not in _ORIGINS:
        _ORIGINS[num_dims] = torch.Size((0,) * num_dims)
    return _ORIGINS[num_dims]


def object_item(key: str, stored_key: str) -> ReadItem:
    """The read of an object that is not a tensor."""
    zero = _origin(1)  # what DCP's own planner says of an object
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), zero, MetadataIndex(stored_key), zero, zero)


def tensor_items(local: LocalTensor, stored_key: str, stored: TensorStorageMetadata) -> list[ReadItem]:
    """The reads that fill every box of ``local`` once.

    Args:
        local: what this rank wants; shapes already agree with ``stored``.
        stored_key: key in the checkpoint, of the chunks.
        stored: its chunks. Equal boxes count once; others that overlap are a fault of the checkpoint.

    Returns:
        Items with ``dest_index`` (key, box offset, number of the box), ``dest_offsets`` within that box, ``storage_index`` (stored key,
        chunk offset, number of the chunk), ``storage_offsets`` within that chunk.

    Raises:
        CorruptCheckpointError: stored chunks do not cover a wanted box exactly.

    Pure and thread-safe; near linear in boxes and chunks.
    """
    items: list[ReadItem] = []
    rest: list[int] = []
    for number, shard in enumerate(local.shards):
        if 0 in shard.sizes:
            continue
        chunk = _equal_chunk(shard.offsets, shard.sizes, stored.chunks)
        if chunk is None:
            rest.append(number)
            continue
        found = stored.chunks[chunk]
        origin = _origin(len(shard.sizes))
        items.append(
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(local.key, found.offsets, number),
                origin,
                MetadataIndex(stored_key, found.offsets, chunk),
                origin,
                found.sizes,
            )
        )
    return items + _resharded(local, rest, stored_key, stored) if rest else items


def _equal_chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], chunks: Sequence[ChunkStorageMetadata]) -> int | None:
    """Number of the chunk that is the wanted box. The layout that was saved is the one most often loaded: spares it all geometry."""
    for number, chunk in enumerate(chunks):
        if chunk.offsets == offsets and chunk.sizes == sizes:
            return number
    return None


def _resharded(local: LocalTensor, numbers: Sequence[int], stored_key: str, stored: TensorStorageMetadata) -> list[ReadItem]:
    num_dims = len(local.global_shape)
    stored_offsets = _rows([chunk.offsets for chunk in stored.chunks], num_dims, stored_key)
    stored_sizes = _rows([chunk.sizes for chunk in stored.chunks], num_dims, stored_key)
    wanted_offsets = as_boxes([local.shards[number].offsets for number in numbers], num_dims)
    wanted_sizes = as_boxes([local.shards[number].sizes for number in numbers], num_dims)
    distinct = _distinct(stored_offsets, stored_sizes)
    overlaps = intersect(wanted_offsets, wanted_sizes, stored_offsets[distinct], stored_sizes[distinct])
    chunks = distinct[overlaps.stored]
    bounds = np.searchsorted(overlaps.wanted, np.arange(len(numbers) + 1))
    for row in range(len(numbers)):
        some = slice(bounds[row], bounds[row + 1])
        fault = check_tiling(wanted_sizes[row].tolist(), overlaps.offsets[some] - wanted_offsets[row], overlaps.sizes[some])
        if fault is not None:
            raise _not_covered(stored_key, local, numbers[row], fault)
    into_box = overlaps.offsets - wanted_offsets[overlaps.wanted]
    into_chunk = overlaps.offsets - stored_offsets[chunks]
    columns = (overlaps.wanted, into_box, chunks, into_chunk, overlaps.sizes)
    return [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(local.key, local.shards[numbers[row]].offsets, numbers[row]),
            torch.Size(dest_offsets),
            MetadataIndex(stored_key, stored.chunks[chunk].offsets, chunk),
            torch.Size(storage_offsets),
            torch.Size(lengths),
        )
        for row, dest_offsets, chunk, storage_offsets, lengths in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _rows(rows: Sequence[Sequence[int]], num_dims: int, stored_key: str) -> Int64s:
    if set(map(len, rows)) - {num_dims}:
        raise CorruptCheckpointError(
            "a stored chunk has another number of dimensions than its tensor", tensor=stored_key, expected=num_dims
        )
    # Several times faster than asarray, which looks at each torch.Size as a sequence of its own.
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=len(rows) * num_dims).reshape(len(rows), num_dims)


def _distinct(offsets: Int64s, sizes: Int64s) -> Int64s:
    """Numbers of the chunks, the first of each set of equal ones: replicas may all have been recorded."""
    if len(offsets) < 2:
        return np.arange(len(offsets))
    first = np.unique(np.concatenate((offsets, sizes), axis=1), axis=0, return_index=True)[1]
    return np.sort(first)


def _not_covered(stored_key: str, local: LocalTensor, number: int, fault: TilingFault) -> CorruptCheckpointError:
    shard = local.shards[number]
    where = [start + offset for start, offset in zip(shard.offsets, fault.offsets, strict=True)]
    problem = "have a hole" if fault.kind == "hole" else "overlap"
    return CorruptCheckpointError(
        f"the stored chunks of a tensor {problem} within the box that is to be loaded",
        tensor=stored_key,
        expected=f"each of the {math.prod(shard.sizes)} elements of the box at {list(shard.offsets)} of sizes {list(shard.sizes)} once",
        found=f"{'nothing' if fault.kind == 'hole' else 'several chunks'} at {where}, sizes {list(fault.sizes)}",
        remedy="take another checkpoint",
    )


@dataclass
class LeanLoadPlan(LoadPlan):
    """A load plan that leaves its items at home when it travels: no rank but its own needs them.

    DCP gathers all local plans on the coordinator and scatters them back, by pickle. A million read items take minutes there, and nobody
    looks. ``items`` are complete on the rank that made the plan, and empty once it was pickled. Only for our own reader, which agrees.

    Attributes:
        num_left: number of items that the pickled plan left at home.
    """

    num_left: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LeanLoadPlan, ([], self.storage_data, self.planner_data, self.num_left + len(self.items))


def with_items(plan: LoadPlan, items: Sequence[ReadItem]) -> LoadPlan:
    """``plan`` with the items that it left at home, which are ``items``; any other plan as it is.

    Raises:
        PlanError: somebody added items or took some away, which pickling then lost.
    """
    if not isinstance(plan, LeanLoadPlan) or not plan.num_left:
        return plan
    if plan.items or plan.num_left != len(items):
        raise PlanError(
            "the items of a load plan were changed on their way",
            expected=len(items),
            found=plan.num_left + len(plan.items),
            remedy="change items in finish_plan",
        )
    return replace(plan, items=cast("list[ReadItem]", items), num_left=0)
