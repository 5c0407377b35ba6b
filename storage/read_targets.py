"""Maps the bytes of a block to the memory of a request: in one run where both sides are contiguous, else box by box."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcp_engine.errors import PlanError
from dcp_engine.storage.ranges import Box, FlatBox, collapse, intersect, range_to_boxes
from dcp_engine.storage.records import ReadRequest

__all__ = ["Wanted", "open_target"]


def open_target(request: ReadRequest, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Open a request's array and check its form.

    Raises:
        PlanError: another shape or dtype than planned; numpy would broadcast or convert without a word.
    """
    array = request.open()
    if array.shape != request.sizes or array.dtype != dtype:
        raise PlanError(
            "the target of a read does not have the planned form",
            tensor=request.name,
            expected=f"sizes {request.sizes}, {dtype}",
            found=f"sizes {array.shape}, {array.dtype}",
        )
    return array


class Wanted:
    """One request that is not empty, where its chunk lies, and its target once the first block needs it.

    Attributes:
        request: the request.
        chunk_sizes: extents of the chunk, in elements.
        first_block: block that holds the chunk's first byte (global index).
        block_offset: where the chunk begins in the raw bytes of that block, in bytes.
        is_whole: the request is the whole chunk.
        in_one_block: the chunk lies within one block, perhaps beside others.
        num_left: blocks with wanted bytes that are still to come. Counted by whoever reads them, under a lock.

    Thread-safety: ``run`` and ``scatter`` may be called from any thread, for disjoint ranges.
    """

    __slots__ = ("_lock", "_target", "block_offset", "chunk_sizes", "first_block", "in_one_block", "is_whole", "num_left", "request")

    def __init__(
        self,
        request: ReadRequest,
        chunk_sizes: tuple[int, ...],
        first_block: int,
        block_offset: int,
        *,
        is_whole: bool,
        in_one_block: bool,
        num_left: int,
    ) -> None:
        self.request = request
        self.chunk_sizes = chunk_sizes
        self.first_block = first_block
        self.block_offset = block_offset
        self.is_whole = is_whole
        self.in_one_block = in_one_block
        self.num_left = num_left
        self._lock = threading.Lock()
        self._target: tuple[NDArray[Any], FlatBox] | None = None

    def run(self, dtype: np.dtype[Any], start: int, stop: int) -> tuple[int, memoryview] | None:
        """Find the memory for the chunk's elements ``[start, stop)`` if those wanted form one run there and here.

        Args:
            dtype: carrier of the elements.
            start: first element, in row-major order of the chunk.
            stop: element after the last one.

        Returns:
            How many elements after ``start`` the run begins, and its memory as bytes; ``None`` where there is more than one run.
        """
        array, flat = self._opened(dtype)
        if len(flat.sizes) == 1:
            first = max(start, flat.offsets[0])
            part = array[first - flat.offsets[0] : stop - flat.offsets[0]]
            return (first - start, _bytes_of(part)) if part.flags.c_contiguous else None
        pieces = list(self._pieces(flat, start, stop))
        if len(pieces) != 1:
            return None
        box, common = pieces[0]
        part = array[_slices(common, flat.offsets)]
        if not part.flags.c_contiguous or not _is_run(common.sizes, box.sizes):
            return None
        return _index_of(common.offsets, flat.chunk_sizes) - start, _bytes_of(part)

    def scatter(self, dtype: np.dtype[Any], elements: NDArray[Any], start: int) -> None:
        """Copy what is wanted of ``elements``, which are the chunk's from element ``start`` on, into the target."""
        array, flat = self._opened(dtype)
        stop = start + len(elements)
        if len(flat.sizes) == 1:
            first = max(start, flat.offsets[0])
            last = min(stop, flat.offsets[0] + flat.sizes[0])
            array[first - flat.offsets[0] : last - flat.offsets[0]] = elements[first - start : last - start]
            return
        for box, common in self._pieces(flat, start, stop):
            begin = _index_of(box.offsets, flat.chunk_sizes) - start
            values = elements[begin : begin + math.prod(box.sizes)].reshape(box.sizes)
            array[_slices(common, flat.offsets)] = values[_slices(common, box.offsets)]

    def drop(self) -> None:
        """Forget the target: it may be a staging buffer."""
        self._target = None

    def _opened(self, dtype: np.dtype[Any]) -> tuple[NDArray[Any], FlatBox]:
        with self._lock:
            if self._target is None:
                array = open_target(self.request, dtype)
                if self.is_whole and array.flags.c_contiguous:
                    flat = FlatBox((array.size,), (0,), (array.size,), (array.itemsize,))
                else:
                    flat = collapse(self.chunk_sizes, Box(self.request.offsets, self.request.sizes), array.strides)
                # A view in either case; the first costs a tenth of the second.
                contiguous = array.flags.c_contiguous
                view = array.reshape(flat.sizes) if contiguous else np.lib.stride_tricks.as_strided(array, flat.sizes, flat.strides)
                self._target = (view, flat)
            return self._target

    @staticmethod
    def _pieces(flat: FlatBox, start: int, stop: int) -> Iterator[tuple[Box, Box]]:
        """The boxes that make up ``[start, stop)``, each with what of it is wanted."""
        wanted = Box(flat.offsets, flat.sizes)
        for box in range_to_boxes(flat.chunk_sizes, start, stop):
            common = intersect(box, wanted)
            if common is not None:
                yield box, common


def _bytes_of(part: NDArray[Any]) -> memoryview:
    return part.reshape(-1).view(np.uint8).data


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin - zero, begin - zero + size) for begin, size, zero in zip(box.offsets, box.sizes, origin, strict=True))


def _index_of(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    index = 0
    for offset, size in zip(offsets, sizes, strict=True):
        index = index * size + offset
    return index


def _is_run(inner: tuple[int, ...], outer: tuple[int, ...]) -> bool:
    """Whether a box of sizes ``inner`` is contiguous within a contiguous box of sizes ``outer``."""
    first = next((dim for dim, size in enumerate(inner) if size > 1), len(inner))
    return inner[first + 1 :] == outer[first + 1 :]
