"""Plans as columns: the boxes of many tensors in a few arrays, and DCP's records of them made only when somebody looks.

Our planners fill them, our storage reads them, and between ranks they travel compressed. One record a box takes a hundred times as long to
pickle. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = [
    "MAX_COLUMN_DIMS",
    "KeyTable",
    "PackedColumns",
    "PlanColumns",
    "PlanItems",
    "RowMemory",
    "compress",
    "decompress",
    "pack_integers",
    "unpack_integers",
]

Int64s = NDArray[np.int64]

MAX_COLUMN_DIMS = 8
"""Rows have one length, that of the most dimensions: with more than these they would be mostly padding."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """What is stored under each key.

    Attributes:
        names: keys, ``[num_keys]``, each once.
        palette: the element types in use; the first is None, for objects.
        kinds: index into ``palette`` of each key, u8 ``[num_keys]``.
        num_dims: of each key's tensor, u8 ``[num_keys]``; 0 for objects.
        shapes: ``[num_keys, width]``, in elements; 1 beyond ``num_dims``. ``width`` is the most dimensions of any key.
    """

    names: list[str]
    palette: tuple[torch.dtype | None, ...]
    kinds: NDArray[np.uint8]
    num_dims: NDArray[np.uint8]
    shapes: Int64s

    def same_as(self, other: KeyTable) -> bool:
        """Whether both say the same of the same keys in the same order."""
        return self is other or (
            self.palette == other.palette
            and np.array_equal(self.kinds, other.kinds)
            and np.array_equal(self.num_dims, other.num_dims)
            and np.array_equal(self.shapes, other.shapes)
            and self.names == other.names
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlanColumns:
    """Boxes of tensors, and objects. Arrays are not to be written to.

    Attributes:
        keys: what they are boxes of.
        entries: index of each box's key, ``[num_boxes]``. An object is one box without dimensions.
        offsets: ``[num_boxes, width]``, in elements; 0 beyond the dimensions of the key.
        sizes: ``[num_boxes, width]``, in elements; 1 beyond the dimensions of the key.
    """

    keys: KeyTable
    entries: Int64s
    offsets: Int64s
    sizes: Int64s

    def __len__(self) -> int:
        return len(self.entries)

    def same_as(self, other: PlanColumns) -> bool:
        """Whether both list the same boxes in the same order."""
        return (
            np.array_equal(self.entries, other.entries)
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.sizes, other.sizes)
            and self.keys.same_as(other.keys)
        )

    def items(self, rows: Iterable[int] | None = None) -> list[WriteItem]:
        """DCP's records of some rows, or of all; new ones at every call."""
        keys, chosen = self.keys, slice(None) if rows is None else np.fromiter(rows, dtype=np.int64)
        columns = (self.entries[chosen], self.offsets[chosen], self.sizes[chosen])
        shapes: dict[int, torch.Size] = {}
        items = []
        for entry, offsets, sizes in zip(*(column.tolist() for column in columns), strict=True):
            dtype = keys.palette[keys.kinds[entry]]
            if dtype is None:
                items.append(WriteItem(index=MetadataIndex(keys.names[entry]), type=WriteItemType.BYTE_IO))
                continue
            dims = int(keys.num_dims[entry])
            size = shapes.get(entry)
            if size is None:
                size = shapes[entry] = torch.Size(keys.shapes[entry, :dims].tolist())
            start = torch.Size(offsets[:dims])
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=start, sizes=torch.Size(sizes[:dims])),
                properties=TensorProperties(dtype=dtype),  # one each: whoever looks may change those of single items
                size=size,
            )
            items.append(WriteItem(index=MetadataIndex(keys.names[entry], start), type=WriteItemType.SHARD, tensor_data=data))
        return items

    def described(self) -> dict[str, STORAGE_TYPES]:
        """The ``state_dict_metadata`` of a checkpoint that holds just these boxes. A key without boxes is there, without chunks."""
        keys = self.keys
        state: dict[str, STORAGE_TYPES] = {}
        chunks: list[list[ChunkStorageMetadata]] = []
        dims = keys.num_dims.tolist()
        for name, kind, num_dims, shape in zip(keys.names, keys.kinds.tolist(), dims, keys.shapes.tolist(), strict=True):
            dtype = keys.palette[kind]
            chunks.append([])
            state[name] = (
                BytesStorageMetadata()
                if dtype is None
                else TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape[:num_dims]), chunks[-1])
            )
        for entry, offsets, sizes in zip(self.entries.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True):
            num = dims[entry]
            chunks[entry].append(ChunkStorageMetadata(offsets=torch.Size(offsets[:num]), sizes=torch.Size(sizes[:num])))
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        return (PackedColumns.unpack, (PackedColumns.of(self),))


@dataclass(frozen=True, slots=True, eq=False)
class RowMemory:
    """Where the values of a plan's rows lie in this process's memory, told by a planner's ``row_memory``, without a call for any of them.

    Attributes:
        addresses: where the row-major bytes of each box begin, ``[num_boxes]``; 0 for a row that ``resolve_data`` has to be asked for.
        owners: keeps that memory alive.
    """

    addresses: Int64s
    owners: Sequence[object]


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Columns on their way. Ranks with equal states send equal ``keys`` and ``layout``, which need to be decoded only once.

    Attributes:
        palette: as of :class:`KeyTable`.
        counts: number of keys, of boxes, and of dimensions.
        keys: the rest of the key table, compressed.
        layout: keys and sizes of the boxes, compressed.
        offsets: offsets of the boxes, compressed.
    """

    palette: tuple[torch.dtype | None, ...]
    counts: tuple[int, int, int]
    keys: bytes
    layout: bytes
    offsets: bytes

    @classmethod
    def of(cls, columns: PlanColumns) -> PackedColumns:
        """Compress columns."""
        keys = columns.keys
        lengths = np.fromiter(map(len, keys.names), dtype=np.int64, count=len(keys.names))
        # Lengths count characters, so that the names can be cut apart as text.
        table = (_planes(lengths), keys.kinds.tobytes(), keys.num_dims.tobytes(), _planes(keys.shapes.T))
        return cls(
            keys.palette,
            (len(keys.names), len(columns), keys.shapes.shape[1]),
            compress(b"".join((*table, "".join(keys.names).encode("utf-8", "surrogatepass")))),
            compress(_planes(columns.entries) + _planes(columns.sizes.T)),
            compress(_planes(columns.offsets.T)),
        )

    def unpack(self, known: MutableMapping[Any, Any] | None = None) -> PlanColumns:
        """The columns; parts that are in ``known`` already are taken from there, so that equal parts are the same objects."""
        known = {} if known is None else known
        _, num_rows, width = self.counts
        keys = known.get(where := (self.palette, self.counts[::2], self.keys))
        if keys is None:
            keys = known[where] = self._unpack_keys()
        layout = known.get(place := (num_rows, width, self.layout))
        if layout is None:
            data = decompress(self.layout)
            layout = known[place] = _unplanes(data, num_rows), _unplanes(data[8 * num_rows :], num_rows * width).reshape(width, num_rows).T
        offsets = _unplanes(decompress(self.offsets), num_rows * width).reshape(width, num_rows).T
        return PlanColumns(keys, layout[0], offsets, layout[1])

    def _unpack_keys(self) -> KeyTable:
        num_keys, _, width = self.counts
        data = decompress(self.keys)
        at = 8 * num_keys
        stops = np.cumsum(_unplanes(data, num_keys)).tolist()
        small = np.frombuffer(data, dtype=np.uint8, count=2 * num_keys, offset=at)
        shapes = _unplanes(data[at + 2 * num_keys :], num_keys * width).reshape(width, num_keys).T
        text = data[at + 2 * num_keys + 8 * num_keys * width :].decode("utf-8", "surrogatepass")
        names = [text[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        return KeyTable(names, self.palette, small[:num_keys], small[num_keys:], shapes)


class PlanItems(Sequence[WriteItem]):
    """The items of a plan, made when somebody looks; until then only the columns travel.

    Once looked at they are a list like any other: whatever is done to an item counts, and the items themselves travel.

    Thread-safety: none while nobody has looked yet.
    """

    def __init__(self, columns: PlanColumns | PackedColumns) -> None:
        self._columns = columns
        self._made: list[WriteItem] | None = None

    @property
    def looked_at(self) -> bool:
        """Whether they are a list by now."""
        return self._made is not None

    def columns(self, known: MutableMapping[Any, Any] | None = None) -> PlanColumns | None:
        """The columns, None where the items may have become something else. ``known`` is for :meth:`PackedColumns.unpack`."""
        if self._made is None and isinstance(self._columns, PackedColumns):
            self._columns = self._columns.unpack(known)
        return self._columns if self._made is None and isinstance(self._columns, PlanColumns) else None

    def _items(self) -> list[WriteItem]:
        if self._made is None:
            columns = self.columns()
            assert columns is not None
            self._made = columns.items()
        return self._made

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        return self._items()[index]

    def __len__(self) -> int:
        if self._made is not None:
            return len(self._made)
        return self._columns.counts[1] if isinstance(self._columns, PackedColumns) else len(self._columns)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PlanItems):
            mine, theirs = self.columns(), other.columns()
            if mine is not None and theirs is not None:
                return mine.same_as(theirs)
            return self._items() == other._items()
        return self._items() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} items>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._made is not None:
            return (list, (self._made,))
        return (PlanItems, (self._columns if isinstance(self._columns, PackedColumns) else PackedColumns.of(self._columns),))


def pack_integers(values: NDArray[Any]) -> bytes | int:
    """A column of 64-bit integers for the way; their number where all are 0."""
    return compress(_planes(values)) if values.any() else values.size


def unpack_integers(packed: bytes | int, dtype: type[Any]) -> NDArray[Any]:
    """The inverse of :func:`pack_integers`."""
    if isinstance(packed, int):
        return np.zeros(packed, dtype=dtype)
    data = decompress(packed)
    return _unplanes(data, len(data) // 8).view(dtype)


def _planes(values: NDArray[Any]) -> bytes:
    """64-bit integers, all lowest bytes first: next to each other they are nearly the same, and compress."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, 8).T.tobytes()


def _unplanes(data: bytes, count: int) -> Int64s:
    planes = np.frombuffer(data, dtype=np.uint8, count=8 * count).reshape(8, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(np.int64)


def compress(data: bytes) -> bytes:
    """Make bytes small for the way to another rank."""
    return zstandard.ZstdCompressor(level=1).compress(data)


def decompress(data: bytes) -> bytes:
    """The inverse of :func:`compress`, for bytes of our own ranks: a hostile frame could ask for any amount of memory."""
    return zstandard.ZstdDecompressor().decompress(data)
