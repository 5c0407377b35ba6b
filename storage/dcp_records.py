"""The translation between DCP's records and the format's. Only ``dcp_metadata``, which shows a manifest as DCP's, knows both, too.

Saving: write items -> chunk sources; ``Metadata`` -> the chunks that all ranks must deliver, and the entries that have none.
Loading: read items -> read requests.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from dcp_engine.components import ComponentMap
from dcp_engine.errors import KindMismatchError, PlanError, UnsupportedTensorError, UntrustedDataError
from dcp_engine.garbage import without_gc
from dcp_engine.plan_columns import PlanColumns, PlanItems
from dcp_engine.storage import dtypes
from dcp_engine.storage.column_records import check_column_tensors, column_sources, empty_column_entries, is_delivered
from dcp_engine.storage.dcp_metadata import ManifestIndex
from dcp_engine.storage.limits import MAX_DIMS
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.planner_values import ObjectTarget, RowValues, TensorBytes, TensorTarget, object_bytes
from dcp_engine.storage.read_whole import WholeTargets
from dcp_engine.storage.records import ChunkSource, ReadRequest, Source
from dcp_engine.stored_tensors import ColumnItems, StoredTensors
from dcp_engine.types import EngineMetadata, PlannerData

__all__ = [
    "check_delivered",
    "check_tensors",
    "empty_entries",
    "requests_of_plan",
    "sources_of_plan",
    "split_items",
]

_Box = tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]
"""Key, offsets, sizes. An object is ``(key, None, None)``: a plan does not know its length."""


# ---------------------------------------------------------------------------------------------------------------- saving


def check_delivered(metadata: Metadata, manifest: Manifest) -> None:
    """Hold what all ranks together wrote against what was planned.

    Args:
        metadata: of the global plan.
        manifest: of the files; each of its chunks is there once, since they tile their entries.

    Raises:
        PlanError: a chunk is missing, or one was written that nobody planned.
    """
    columns = _columns_of(metadata)
    if columns is not None and is_delivered(columns, _ties_of(metadata), manifest):
        return
    planned, delivered = _planned_boxes(metadata), _delivered_boxes(manifest)
    if planned != delivered:
        odd = planned ^ delivered
        raise PlanError(
            "the ranks did not write exactly what was planned",
            tensor=min(box[0] for box in odd),
            expected=f"{len(planned)} chunks",
            found=f"{len(planned - delivered)} missing, {len(delivered - planned)} not planned",
            remedy="custom planners must write the items of create_global_plan, and describe just those in its Metadata",
        )


def _planned_boxes(metadata: Metadata) -> set[_Box]:
    """Empty boxes are stored nowhere, aliases of ties under another key."""
    ties = _ties_of(metadata)
    boxes: set[_Box] = set()
    for key, entry in metadata.state_dict_metadata.items():
        if key in ties:
            continue
        if isinstance(entry, BytesStorageMetadata):
            boxes.add((key, None, None))
            continue
        boxes.update((key, tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks if 0 not in chunk.sizes)
    return boxes


def _delivered_boxes(manifest: Manifest) -> set[_Box]:
    return {
        (name, None, None) if code in (dtypes.OBJECT.code, dtypes.OPAQUE.code) else (name, offsets, sizes)
        for name, code, offsets, sizes in manifest.table.chunks()
    }


def _ties_of(metadata: Metadata) -> Mapping[str, str]:
    return metadata.planner_data.ties if isinstance(metadata.planner_data, PlannerData) else {}


def _columns_of(metadata: Metadata) -> PlanColumns | None:
    return metadata.columns if isinstance(metadata, EngineMetadata) else None


def check_tensors(plan: SavePlan) -> None:
    """Refuse tensors that cannot be stored before the plans of all ranks are merged: DCP's own planner fails there on some, without a key.

    Raises:
        UnsupportedTensorError: naming the first one's key, and its dtype, layout or number of dimensions.
    """
    if isinstance(plan.items, PlanItems) and (columns := plan.items.columns()) is not None:
        check_column_tensors(columns)
        return
    known: set[tuple[torch.dtype, torch.layout, int]] = set()
    for item in plan.items:
        data = item.tensor_data
        if data is None or (kind := (data.properties.dtype, data.properties.layout, len(data.size))) in known:
            continue
        dtypes.of_tensor_dtype(kind[0], tensor=item.index.fqn)
        if kind[1] is not torch.strided or kind[2] > MAX_DIMS:
            raise UnsupportedTensorError(
                "a tensor of this form cannot be stored",
                tensor=item.index.fqn,
                expected=f"layout torch.strided, at most {MAX_DIMS} dimensions",
                found=f"layout {kind[1]}, {kind[2]} dimensions",
                remedy="store it as a plain tensor: to_dense() or reshape()",
            )
        known.add(kind)


def sources_of_plan(plan: SavePlan, planner: SavePlanner, components: ComponentMap) -> dict[str, list[Source]]:
    """What a rank has to write, by component, each in the plan's order.

    Objects are encoded here, since their length must be known before their chunk is described; they stay in memory until written.

    Args:
        plan: the final local plan.
        planner: resolves items to data. ``resolve_data`` is called lazily for tensors, at least once an item, from worker threads.
        components: decides the component of a key.

    Raises:
        UnencodableObjectError: an object cannot be represented; the error names the key.
        UnsupportedTensorError: a tensor's dtype cannot be stored.
        PlanError: an item carries no tensor data.
    """
    if isinstance(plan.items, PlanItems) and (columns := plan.items.columns()) is not None:
        with without_gc():
            return column_sources(columns, RowValues(planner, columns), components)
    sources: dict[str, list[Source]] = {}
    with without_gc():
        for item in plan.items:
            source = _object_source(item, planner) if item.type is WriteItemType.BYTE_IO else _tensor_source(item, planner)
            sources.setdefault(components.of(item.index.fqn), []).append(source)
    return sources


def empty_entries(metadata: Metadata) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Name, dtype code and shape of the tensors without elements: they have no chunks, so only the metadata knows of them."""
    ties, columns = _ties_of(metadata), _columns_of(metadata)
    if columns is not None:
        yield from empty_column_entries(columns, ties)
        return
    for key, entry in metadata.state_dict_metadata.items():
        if key not in ties and isinstance(entry, TensorStorageMetadata) and 0 in entry.size:
            yield key, dtypes.of_tensor_dtype(entry.properties.dtype, tensor=key).code, tuple(entry.size)


def _tensor_source(item: WriteItem, planner: SavePlanner) -> ChunkSource:
    data = item.tensor_data
    if data is None:
        raise PlanError("a write item of a tensor carries no tensor data", tensor=item.index.fqn, remedy="use a planner that fills it")
    sizes = tuple(data.chunk.sizes)
    dtype = dtypes.of_tensor_dtype(data.properties.dtype, tensor=item.index.fqn)
    return ChunkSource(
        name=item.index.fqn,
        dtype=dtype,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=sizes,
        nbytes=math.prod(sizes) * dtype.itemsize,
        load=TensorBytes(planner, item, sizes, dtype.torch_dtype),
    )


def _object_source(item: WriteItem, planner: SavePlanner) -> ChunkSource:
    array, info = object_bytes(item, planner)
    extent = (array.size,)
    return ChunkSource(name=item.index.fqn, dtype=info, shape=extent, offsets=(0,), sizes=extent, nbytes=array.size, load=lambda: array)


# --------------------------------------------------------------------------------------------------------------- loading


def split_items(items: Sequence[ReadItem], stored: StoredTensors, index: ManifestIndex) -> tuple[Sequence[ReadItem], WholeTargets | None]:
    """The items that are to be read one by one, and those that our planner gave as columns of this very checkpoint.

    Args:
        items: of the final local plan.
        stored: what the planner was told of the checkpoint.
        index: the checkpoint.
    """
    if isinstance(items, ColumnItems) and items.whole.stored is stored:
        return items.rest, WholeTargets(index.manifest, items.whole)
    return items, None


def requests_of_plan(items: Iterable[ReadItem], planner: LoadPlanner, index: ManifestIndex, *, allow_opaque: bool) -> list[ReadRequest]:
    """What a rank has to read.

    Args:
        items: of the final local plan.
        planner: gives targets (``resolve_tensor``), takes results (``commit_tensor``, ``load_bytes``). It is called from worker threads,
            one call at a time, since a planner promises nothing about threads.
        index: the checkpoint.
        allow_opaque: hand bytes of unknown kind to the planner, which may unpickle them.

    Raises:
        PlanError: an item names a key, chunk or box that the checkpoint does not have.
        UntrustedDataError: an item is opaque and ``allow_opaque`` is off.
    """
    lock = threading.Lock()
    return [_request(item, planner, index, lock, allow_opaque=allow_opaque) for item in items]


def _request(item: ReadItem, planner: LoadPlanner, index: ManifestIndex, lock: threading.Lock, *, allow_opaque: bool) -> ReadRequest:
    manifest = index.manifest
    key = item.storage_index.fqn
    entry = manifest.entry_id(key)
    chunk = None if entry is None else index.find_chunk(entry, item.storage_index)
    if entry is None or chunk is None:
        raise PlanError(
            "the load plan names a chunk that the checkpoint does not have",
            path=index.path,
            tensor=key,
            found=f"offsets {None if item.storage_index.offset is None else tuple(item.storage_index.offset)}",
            remedy="plan from the metadata that this reader returned",
        )
    info = dtypes.of_code(int(manifest.table.entry_dtypes[entry]))
    if item.type is LoadItemType.BYTE_IO:
        if info.torch_dtype is not None:
            raise KindMismatchError("the load plan wants an object where a tensor is stored", path=index.path, tensor=key)
        if info is dtypes.OPAQUE and not allow_opaque:
            raise UntrustedDataError(
                "this object was stored as opaque bytes by a planner of your own, and reading it may run a pickle",
                path=index.path,
                tensor=key,
                remedy="pass ShardReader(..., allow_opaque=True) if you trust whoever wrote this checkpoint",
            )
        nbytes = manifest.chunk(chunk).nbytes
        value = ObjectTarget(item, planner, key, nbytes, lock, encoded=info is dtypes.OBJECT)
        return ReadRequest(name=key, chunk=chunk, offsets=(0,), sizes=(nbytes,), open=value.open, commit=value.commit)
    if info.torch_dtype is None:
        raise KindMismatchError("the load plan wants a tensor where an object is stored", path=index.path, tensor=key)
    target = TensorTarget(item, planner, info.torch_dtype, lock)
    return ReadRequest(
        name=key,
        chunk=chunk,
        offsets=tuple(item.storage_offsets),
        sizes=tuple(item.lengths),
        open=target.open,
        commit=target.commit,
    )
