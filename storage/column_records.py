"""What ``dcp_records`` does with a plan or a ``Metadata`` of ours, on its columns: no record of DCP's is made for a box."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dcp_engine.components import ComponentMap
from dcp_engine.plan_columns import PlanColumns
from dcp_engine.storage import dtypes
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.planner_values import RowValues
from dcp_engine.storage.records import ChunkSource
from dcp_engine.storage.shard_table import ShardTable
from dcp_engine.storage.table_columns import Boxes

__all__ = ["check_column_tensors", "column_sources", "empty_column_entries", "is_delivered"]

_Int64s = NDArray[np.int64]


def check_column_tensors(columns: PlanColumns) -> None:
    """Refuse dtypes that cannot be stored; columns hold neither other layouts nor too many dimensions.

    Raises:
        UnsupportedTensorError: naming the first such tensor's key.
    """
    keys = columns.keys
    used, first = np.unique(keys.kinds, return_index=True)
    for kind, key in sorted(zip(used.tolist(), first.tolist(), strict=True), key=lambda pair: pair[1]):
        dtype = keys.palette[kind]
        if dtype is not None:
            dtypes.of_tensor_dtype(dtype, tensor=keys.names[key])


def column_sources(columns: PlanColumns, values: RowValues, components: ComponentMap) -> dict[str, list[ChunkSource]]:
    """As ``dcp_records.sources_of_plan``, for the rows of a plan."""
    keys = columns.keys
    infos = [None if dtype is None else dtypes.of_tensor_dtype(dtype) for dtype in keys.palette]
    itemsizes = np.array([0 if info is None else info.itemsize for info in infos], dtype=np.int64)[keys.kinds]
    num_bytes = (columns.sizes.prod(axis=1) * itemsizes[columns.entries]).tolist()
    kinds, dims, shapes = keys.kinds.tolist(), keys.num_dims.tolist(), keys.shapes.tolist()
    of_component: dict[str, list[ChunkSource]] = {}
    rows = zip(columns.entries.tolist(), columns.offsets.tolist(), columns.sizes.tolist(), num_bytes, strict=True)
    for row, (entry, offsets, sizes, nbytes) in enumerate(rows):
        name, info, num = keys.names[entry], infos[kinds[entry]], dims[entry]
        if info is None:
            source = _object_source(name, *values.object(row))
        else:
            extents = tuple(sizes[:num])
            load = partial(values.tensor, row, extents, info.torch_dtype)
            source = ChunkSource(name, info, tuple(shapes[entry][:num]), tuple(offsets[:num]), extents, nbytes, load)
        of_component.setdefault(components.of(name), []).append(source)
    return of_component


def _object_source(name: str, array: NDArray[np.uint8], info: dtypes.DtypeInfo) -> ChunkSource:
    extent = (array.size,)
    return ChunkSource(name, info, extent, (0,), extent, array.size, lambda: array)


def empty_column_entries(columns: PlanColumns, ties: Mapping[str, str]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """As ``dcp_records.empty_entries``."""
    keys = columns.keys
    for entry in np.flatnonzero((keys.shapes == 0).any(axis=1)).tolist():
        name, dtype = keys.names[entry], keys.palette[keys.kinds[entry]]
        if name not in ties and dtype is not None:
            shape = tuple(keys.shapes[entry, : keys.num_dims[entry]].tolist())
            yield name, dtypes.of_tensor_dtype(dtype, tensor=name).code, shape


def is_delivered(columns: PlanColumns, ties: Mapping[str, str], manifest: Manifest) -> bool:
    """Whether the files hold just what was planned.

    Returns:
        False also where it takes a closer look to know.
    """
    keys, table = columns.keys, manifest.table
    ids = np.array([-1 if name in ties else manifest.ids.get(name, -2) for name in keys.names], dtype=np.int64)
    own, offsets, sizes = ids[columns.entries], columns.offsets, columns.sizes
    stored = own != -1
    if not (sizes > 0).all():
        stored &= (sizes > 0).all(axis=1)
    if not stored.all():
        own, offsets, sizes = own[stored], offsets[stored], sizes[stored]
    if len(own) != len(table.chunk_entries):
        return False
    used = np.unique(columns.entries[stored])
    of_key = ids[used]
    is_object = np.isin(table.entry_dtypes, (dtypes.OBJECT.code, dtypes.OPAQUE.code))
    dims = np.where(is_object, 0, table.entry_dims)
    if (of_key == -2).any() or ((keys.kinds[used] == 0) != is_object[of_key]).any() or (keys.num_dims[used] != dims[of_key]).any():
        return False
    if (own[1:] < own[:-1]).any():
        order = np.argsort(own, kind="stable")
        own, offsets, sizes = own[order], offsets[order], sizes[order]
    for boxes in table.boxes():
        some = table.entry_dims[own] == boxes.dims
        rows = own, offsets, sizes
        if not some.all():
            rows = own[some], offsets[some], sizes[some]
        if not _are_same(*rows, boxes, table, is_object):
            return False
    return True


def _are_same(own: _Int64s, offsets: _Int64s, sizes: _Int64s, boxes: Boxes, table: ShardTable, is_object: NDArray[np.bool_]) -> bool:
    """Whether the files hold just these boxes, in any order within an entry.

    Args:
        own: entry in ``table`` of each box that was planned, ascending.
        offsets, sizes: ``[num_boxes, width]`` of each. A plan does not know how long an object is: one chunk is all of it.
        boxes: all chunks of ``table`` whose entries have the dimensions that these have there.
        table: of the files.
        is_object: for each entry.
    """
    if not np.array_equal(own, boxes.owners):
        return False
    planned = offsets[:, : boxes.dims], sizes[:, : boxes.dims]
    written = boxes.of(table.chunk_offsets), boxes.of(table.chunk_sizes)
    tensors = ~is_object[own]
    if not tensors.all():
        own, planned, written = own[tensors], (planned[0][tensors], planned[1][tensors]), (written[0][tensors], written[1][tensors])
    if not len(own) or all(map(np.array_equal, planned, written)):
        return True  # by rank, as a plan lists the boxes of a key as a rule
    orders = [np.lexsort((*side[0].T[::-1], own)) for side in (planned, written)]
    return all(np.array_equal(one[orders[0]], other[orders[1]]) for one, other in zip(planned, written, strict=True))
