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
    index = {name: entry for entry, name in enumerate(table.names)}
    ids = np.array([-1 if name in ties else index.get(name, -2) for name in keys.names], dtype=np.int64)
    own = ids[columns.entries]
    rows = np.flatnonzero((own != -1) & (columns.sizes > 0).all(axis=1))
    own = own[rows]
    if len(rows) != len(table.chunk_entries) or (own == -2).any():
        return False
    is_object = np.isin(table.entry_dtypes, (dtypes.OBJECT.code, dtypes.OPAQUE.code))
    dims = np.where(is_object, 0, table.entry_dims).astype(np.int64)
    kinds, num_dims = keys.kinds[columns.entries[rows]], keys.num_dims[columns.entries[rows]]
    if ((kinds == 0) != is_object[own]).any() or (num_dims != dims[own]).any():
        return False
    if not np.array_equal(np.sort(own), np.sort(table.chunk_entries)):
        return False  # whatever is written of other tensors may have more dimensions than there are columns
    width = columns.offsets.shape[1]
    inside = np.arange(width) < dims[table.chunk_entries][:, None]
    wanted = ~np.repeat(is_object[table.chunk_entries], table.entry_dims[table.chunk_entries])
    offsets, sizes = np.zeros((len(rows), width), dtype=np.int64), np.ones((len(rows), width), dtype=np.int64)
    offsets[inside], sizes[inside] = table.chunk_offsets[wanted], table.chunk_sizes[wanted]
    planned, written = _order(own, columns.offsets[rows]), _order(table.chunk_entries, offsets)
    return (
        np.array_equal(own[planned], table.chunk_entries[written])
        and np.array_equal(columns.offsets[rows[planned]], offsets[written])
        and np.array_equal(columns.sizes[rows[planned]], sizes[written])
    )


def _order(entries: _Int64s, offsets: _Int64s) -> _Int64s:
    return np.lexsort((*offsets.T[::-1], entries))
