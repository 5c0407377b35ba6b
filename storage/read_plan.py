"""Decides which blocks a list of requests needs, and which of them are read together. Pure: no I/O, no tensor is touched."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dcp_engine.errors import PlanError
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.ranges import Box, blocks_of_box, group_adjacent
from dcp_engine.storage.read_targets import Wanted
from dcp_engine.storage.records import ReadRequest

if TYPE_CHECKING:
    from dcp_engine.storage.manifest import Manifest

__all__ = ["BlockPlan", "ReadPlan", "Span", "plan_reads"]


@dataclass(slots=True, eq=False)
class BlockPlan:
    """One block to be read, once, and all that is wanted of it."""

    block: int
    wanted: list[Wanted]


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks that lie back to back in one file and are read by one call.

    Attributes:
        file: index of the file in the manifest.
        position: first byte, in bytes from the start of the file.
        blocks: in file order.
    """

    file: int
    position: int
    blocks: list[BlockPlan]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All reads, ordered by file and position, and the requests that need none."""

    spans: list[Span]
    empty: list[ReadRequest]


def plan_reads(manifest: Manifest, requests: Sequence[ReadRequest], *, span_bytes: int, path: str | None) -> ReadPlan:
    """Plan the reads of a checkpoint.

    Args:
        manifest: of the checkpoint.
        requests: boxes within chunks; any number per chunk, in any order, overlapping or not.
        span_bytes: most bytes of one read (one block is always allowed).
        path: directory of the checkpoint, for messages.

    Raises:
        PlanError: a request is not inside its chunk.
    """
    empty: list[ReadRequest] = []
    by_block: defaultdict[int, list[Wanted]] = defaultdict(list)
    for request, (chunk_sizes, nbytes, first_block, block_offset, num_blocks) in zip(requests, _rows(manifest, requests), strict=True):
        sizes = request.sizes
        is_whole = sizes == chunk_sizes
        if not is_whole:
            _check_inside(request, chunk_sizes, path)
            if 0 in sizes:
                empty.append(request)
                continue
        if num_blocks == 1:
            by_block[first_block].append(
                Wanted(request, chunk_sizes, first_block, block_offset, is_whole=is_whole, in_one_block=True, num_left=1)
            )
            continue
        itemsize = nbytes // math.prod(chunk_sizes)
        blocks = blocks_of_box(chunk_sizes, Box(request.offsets, sizes), itemsize, BLOCK_BYTES) + first_block
        wanted = Wanted(request, chunk_sizes, first_block, block_offset, is_whole=is_whole, in_one_block=False, num_left=len(blocks))
        for block in blocks.tolist():
            by_block[block].append(wanted)
    return ReadPlan(_spans(manifest, by_block, span_bytes), empty)


def _rows(manifest: Manifest, requests: Sequence[ReadRequest]) -> Iterator[tuple[tuple[int, ...], int, int, int, int]]:
    """Sizes, bytes, first block, offset in it and number of blocks of each request's chunk, gathered by columns: there may be many."""
    table = manifest.table
    chunks = np.fromiter((request.chunk for request in requests), np.int64, len(requests))
    starts = table.box_starts[chunks]
    counts = table.box_starts[chunks + 1] - starts
    stops = np.cumsum(counts)
    num_extents = int(stops[-1]) if len(stops) else 0
    extents = table.chunk_sizes[np.arange(num_extents) + np.repeat(starts - (stops - counts), counts)].tolist()
    bounds = [0, *stops.tolist()]
    sizes = (tuple(extents[begin:end]) for begin, end in itertools.pairwise(bounds))
    places = (table.chunk_bytes, table.chunk_first_block, table.chunk_block_offset, table.chunk_num_blocks)
    return zip(sizes, *(column[chunks].tolist() for column in places), strict=True)


def _check_inside(request: ReadRequest, sizes: tuple[int, ...], path: str | None) -> None:
    inside = len(request.sizes) == len(request.offsets) == len(sizes) and all(
        begin >= 0 and extent >= 0 and begin + extent <= size
        for begin, extent, size in zip(request.offsets, request.sizes, sizes, strict=True)
    )
    if not inside:
        raise PlanError(
            "a read request is not inside its chunk",
            path=path,
            tensor=request.name,
            expected=f"a box within sizes {sizes}",
            found=f"offsets {request.offsets}, sizes {request.sizes}",
        )


def _spans(manifest: Manifest, by_block: dict[int, list[Wanted]], span_bytes: int) -> list[Span]:
    blocks = np.fromiter(by_block, np.int64, len(by_block))
    blocks.sort()
    files = manifest.block_file[blocks]
    positions = manifest.block_position[blocks].tolist()
    extents = manifest.block_extent[blocks].tolist()
    ids = blocks.tolist()
    spans = []
    borders = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(ids)]
    for first, last in itertools.pairwise(borders):
        for start, stop in group_adjacent(positions[first:last], extents[first:last], span_bytes):
            chosen = [BlockPlan(block, by_block[block]) for block in ids[first + start : first + stop]]
            spans.append(Span(int(files[first]), positions[first + start], chosen))
    return spans
