"""What ``dcp_records`` does with a plan or a ``Metadata`` of ours, on its columns: no record of DCP's is made for a box."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dcp_engine.components import ComponentMap
from dcp_engine.plan_columns import PlanColumns, RowMemory
from dcp_engine.storage import dtypes
from dcp_engine.storage.dtypes import DtypeInfo
from dcp_engine.storage.limits import BLOCK_BYTES, PACK_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.packed_chunks import PackedChunks
from dcp_engine.storage.planner_values import RowValues
from dcp_engine.storage.records import ChunkSource, Source
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


def column_sources(columns: PlanColumns, values: RowValues, components: ComponentMap) -> dict[str, list[Source]]:
    """As ``dcp_records.sources_of_plan``, for the rows of a plan. Small rows whose place in memory the planner tells are packed unseen."""
    keys = columns.keys
    infos = [None if dtype is None else dtypes.of_tensor_dtype(dtype) for dtype in keys.palette]
    itemsizes = np.array([0 if info is None else info.itemsize for info in infos], dtype=np.int64)[keys.kinds]
    num_bytes = columns.sizes.prod(axis=1) * itemsizes[columns.entries]
    names, codes = components.of_all(keys.names)
    of_row = np.array(codes, dtype=np.int64)[columns.entries]
    of_component: dict[str, list[Source]] = {}
    memory = values.memory()
    packs = (
        np.zeros(len(columns), dtype=np.bool_) if memory is None else (memory.addresses != 0) & (num_bytes > 0) & (num_bytes < PACK_BYTES)
    )
    for row, source in _sources_one_by_one(columns, values, infos, np.flatnonzero(~packs), num_bytes):
        of_component.setdefault(names[of_row[row]], []).append(source)
    if memory is not None:
        groups = of_row * len(infos) + keys.kinds[columns.entries]
        for group in np.unique(groups[packs]).tolist():
            component, kind = divmod(group, len(infos))
            info = infos[kind]
            assert info is not None, "objects have no address"
            for rows in _blockfuls(np.flatnonzero(packs & (groups == group)), num_bytes):
                of_component.setdefault(names[component], []).append(_packed(columns, memory, rows, info, num_bytes[rows]))
    return of_component


def _sources_one_by_one(
    columns: PlanColumns, values: RowValues, infos: Sequence[DtypeInfo | None], rows: _Int64s, num_bytes: _Int64s
) -> Iterator[tuple[int, ChunkSource]]:
    keys = columns.keys
    boxes = (columns.entries[rows].tolist(), columns.offsets[rows].tolist(), columns.sizes[rows].tolist(), num_bytes[rows].tolist())
    for row, entry, offsets, sizes, nbytes in zip(rows.tolist(), *boxes, strict=True):
        name, info, num = keys.names[entry], infos[keys.kinds[entry]], int(keys.num_dims[entry])
        if info is None:
            yield row, _object_source(name, *values.object(row))
            continue
        extents = tuple(sizes[:num])
        load = partial(values.tensor, row, extents, info.torch_dtype)
        yield row, ChunkSource(name, info, tuple(keys.shapes[entry, :num].tolist()), tuple(offsets[:num]), extents, nbytes, load)


def _blockfuls(rows: _Int64s, num_bytes: _Int64s) -> Iterator[_Int64s]:
    """Cut rows into runs that fit into a block each."""
    ends = np.cumsum(num_bytes[rows])
    first = 0
    while first < len(rows):
        before = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, before + BLOCK_BYTES, side="right"))
        yield rows[first:stop]
        first = stop


def _packed(columns: PlanColumns, memory: RowMemory, rows: _Int64s, info: DtypeInfo, num_bytes: _Int64s) -> PackedChunks:
    keys, entries = columns.keys, columns.entries[rows]
    return PackedChunks(
        names=[keys.names[entry] for entry in entries.tolist()],
        dtype=info,
        num_dims=keys.num_dims[entries],
        shapes=keys.shapes[entries],
        offsets=columns.offsets[rows],
        sizes=columns.sizes[rows],
        num_bytes=num_bytes,
        addresses=memory.addresses[rows],
        owners=memory.owners,
    )


def _object_source(name: str, array: NDArray[np.uint8], info: DtypeInfo) -> ChunkSource:
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
