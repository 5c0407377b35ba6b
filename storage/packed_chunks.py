"""Many small chunks of one element type as columns: gathered into one buffer, written as one part of a block, recorded at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dcp_engine.storage.scattered import gather

if TYPE_CHECKING:
    from dcp_engine.storage.dtypes import DtypeInfo
    from dcp_engine.storage.table import TableBuilder

__all__ = ["PackedChunks"]

_Box = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunks:
    """Chunks that follow one another in one block: what many ``ChunkSource`` would say one by one.

    Attributes:
        names: key of each entry, ``[num_chunks]``.
        dtype: element type of all.
        num_dims: of each entry, u8 ``[num_chunks]``.
        shapes: global shape of each entry, ``[num_chunks, width]``, in elements; anything beyond ``num_dims``.
        offsets: where each box begins, likewise.
        sizes: extent of each box, likewise.
        num_bytes: of each box, ``[num_chunks]``: at least 1, less than ``PACK_BYTES`` each and at most ``BLOCK_BYTES`` together.
        addresses: where its bytes lie in this process's memory, one after the other, ``[num_chunks]``.
        owners: keeps that memory alive.
    """

    names: list[str]
    dtype: DtypeInfo
    num_dims: NDArray[np.uint8]
    shapes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    addresses: NDArray[np.int64]
    owners: Sequence[object]

    @property
    def name(self) -> str:
        """Key of the first, for messages."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes together."""
        return int(self.num_bytes.sum())

    def load(self) -> NDArray[np.uint8]:
        """A copy of the bytes of all boxes, back to back. Idempotent and thread-safe; the memory must not change meanwhile."""
        return gather(self.addresses, self.num_bytes)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each box begins among the bytes of all."""
        return np.cumsum(self.num_bytes) - self.num_bytes

    def flat(self, column: NDArray[np.int64]) -> NDArray[np.int64]:
        """One of ``shapes``, ``offsets`` and ``sizes``: the numbers of one entry after those of the one before."""
        return column[np.arange(column.shape[1]) < self.num_dims[:, None]]

    def one_by_one(self, block: int, block_offset: int) -> Iterator[tuple[str, int, _Box, _Box, _Box, int, int]]:
        """The arguments of ``TableBuilder.add_chunk`` for each."""
        boxes = (self.shapes.tolist(), self.offsets.tolist(), self.sizes.tolist())
        places = (block_offset + self.starts).tolist()
        for name, dims, shape, offsets, sizes, place in zip(self.names, self.num_dims.tolist(), *boxes, places, strict=True):
            yield name, self.dtype.code, tuple(shape[:dims]), tuple(offsets[:dims]), tuple(sizes[:dims]), block, place

    def record(self, table: TableBuilder, block: int, block_offset: int) -> None:
        """Say where they were stored: from ``block_offset`` of a block on."""
        table.add_chunks(self, block, block_offset)
