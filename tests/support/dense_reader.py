"""A storage reader that is nothing but dense tensors in memory: loads through a planner's own methods, as DCP calls them on every rank."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_engine.objects import encode_object
from dcp_engine.types import EncodedObject

__all__ = ["DenseReader", "load_on_ranks"]

Box = tuple[Sequence[int], Sequence[int]]


class DenseReader:
    """Holds whole values; tells a planner that they are stored in chunks.

    Args:
        values: key -> whole tensor, or object.
        tilings: key -> boxes (offsets, sizes) in which the tensor is said to be stored. Default: one box.
        planner_data: of the metadata.
        encoded: objects are in the engine's encoding, not pickled.
        metadata_type: class of the metadata.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        tilings: Mapping[str, Sequence[Box]] | None = None,
        *,
        planner_data: Any = None,
        encoded: bool = True,
        metadata_type: type[Metadata] = Metadata,
    ) -> None:
        self.values = dict(values)
        self.encoded = encoded
        self.num_reads: dict[str, int] = {}
        state: dict[str, Any] = {}
        for key, value in self.values.items():
            if not isinstance(value, torch.Tensor):
                state[key] = BytesStorageMetadata()
                continue
            boxes = (tilings or {}).get(key, [((0,) * value.ndim, tuple(value.shape))])
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
            state[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)
        self.metadata = metadata_type(state_dict_metadata=state, planner_data=planner_data)

    def read(self, plan: LoadPlan, planner: LoadPlanner, *, num_threads: int = 1) -> None:
        """Do what a plan says."""
        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(self._read_item, item, planner) for item in plan.items]:
                done.result()

    def _read_item(self, item: ReadItem, planner: LoadPlanner) -> None:
        key = item.storage_index.fqn
        self.num_reads[key] = self.num_reads.get(key, 0) + 1
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, self._bytes(key))
            return
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        assert item.storage_index.index is not None
        chunk = stored.chunks[item.storage_index.index]
        assert item.storage_index.offset == chunk.offsets
        found = self.values[key]
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            found = found.narrow(dim, start, size)
        for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            found = found.narrow(dim, start, size)
        target = planner.resolve_tensor(item)
        assert target.shape == found.shape
        assert target.dtype == found.dtype
        target.detach().copy_(found)
        planner.commit_tensor(item, target)

    def _bytes(self, key: str) -> io.BytesIO:
        if self.encoded:
            return EncodedObject(encode_object(self.values[key], key=key))
        stream = io.BytesIO()
        torch.save(self.values[key], stream)
        stream.seek(0)
        return stream


def load_on_ranks(reader: DenseReader, states: Sequence[dict[str, Any]], planners: Sequence[LoadPlanner], *, num_threads: int = 1) -> None:
    """One load on all ranks, in DCP's order of calls. Plans travel by pickle, as they do in DCP."""
    plans = []
    for rank, (state, planner) in enumerate(zip(states, planners, strict=True)):
        planner.set_up_planner(state, reader.metadata, rank == 0)
        plans.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
    plans = pickle.loads(pickle.dumps(planners[0].create_global_plan(plans)))
    for plan, planner in zip(plans, planners, strict=True):
        reader.read(planner.finish_plan(plan), planner, num_threads=num_threads)
