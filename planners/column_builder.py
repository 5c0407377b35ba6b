"""A rank's boxes put into columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dcp_engine.plan_columns import MAX_COLUMN_DIMS, KeyTable, PlanColumns
from dcp_engine.planners.local_shards import LocalTensor

__all__ = ["ColumnBuilder"]


class ColumnBuilder:
    """Takes tensors and objects in the order of their items.

    Nearly all of many tensors are one box that is the whole: only the others' boxes are noted.

    Thread-safety: none.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._kinds: list[int] = []
        self._palette: dict[torch.dtype | None, int] = {None: 0}
        self._shapes: list[Sequence[int]] = []
        self._counts: list[int] = []
        self._rows: list[int] = []
        self._offsets: list[Sequence[int]] = []
        self._sizes: list[Sequence[int]] = []
        self._num_rows = 0

    def add_object(self, key: str) -> None:
        """The next key, an object."""
        self._names.append(key)
        self._kinds.append(0)
        self._shapes.append(())
        self._counts.append(1)
        self._num_rows += 1

    def add_plain(self, keys: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> None:
        """The next keys, tensors of which the whole is the only box."""
        kinds = {dtype: self._kind(dtype) for dtype in dict.fromkeys(dtypes)}
        self._names += keys
        self._kinds += map(kinds.__getitem__, dtypes)
        self._shapes += shapes
        self._counts += itertools.repeat(1, len(keys))
        self._num_rows += len(keys)

    def add_tensor(self, tensor: LocalTensor) -> None:
        """The next key, a tensor of which there is at least one box."""
        self._names.append(tensor.key)
        self._kinds.append(self._kind(tensor.dtype))
        self._shapes.append(tensor.global_shape)
        shards = tensor.shards
        self._counts.append(len(shards))
        if len(shards) > 1 or shards[0].sizes != tensor.global_shape:
            for number, shard in enumerate(shards, start=self._num_rows):
                self._rows.append(number)
                self._offsets.append(shard.offsets)
                self._sizes.append(shard.sizes)
        self._num_rows += len(shards)

    def _kind(self, dtype: torch.dtype) -> int:
        return self._palette.setdefault(dtype, len(self._palette))

    def build(self) -> PlanColumns | None:
        """The columns; None where a tensor has too many dimensions for them."""
        dims = np.fromiter(map(len, self._shapes), dtype=np.int64, count=len(self._shapes))
        width = int(dims.max(initial=0))
        if width > MAX_COLUMN_DIMS:
            return None
        keys = KeyTable(
            self._names,
            tuple(self._palette),
            np.array(self._kinds, dtype=np.uint8),
            dims.astype(np.uint8),
            _padded(self._shapes, dims, width, 1),
        )
        counts = np.array(self._counts, dtype=np.int64)
        entries = np.repeat(np.arange(len(counts)), counts)
        sizes = keys.shapes[entries]
        offsets = np.zeros_like(sizes)
        rows = np.array(self._rows, dtype=np.int64)
        offsets[rows] = _padded(self._offsets, dims[entries[rows]], width, 0)
        sizes[rows] = _padded(self._sizes, dims[entries[rows]], width, 1)
        return PlanColumns(keys, entries, offsets, sizes)


def _padded(rows: list[Sequence[int]], dims: NDArray[np.int64], width: int, filler: int) -> NDArray[np.int64]:
    padded = np.full((len(rows), width), filler, dtype=np.int64)
    total = int(dims.sum())
    padded[np.arange(width) < dims[:, None]] = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=total)
    return padded
