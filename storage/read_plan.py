"""Decides which blocks a list of requests needs, and which of them are read together. Pure: no I/O, no tensor is touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from dcp_engine.errors import PlanError
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.ranges import Box, blocks_of_box, group_adjacent
from dcp_engine.storage.read_targets import Wanted
from dcp_engine.storage.records import ReadRequest

if TYPE_CHECKING:
    from dcp_engine.storage.manifest import Manifest
    from dcp_engine.storage.read_whole import WholeTargets

__all__ = ["BlockPlan", "ReadPlan", "Span", "plan_reads", "read_budget", "spans_of", "take_turns"]

_Item = TypeVar("_Item")

_MAX_SPAN_BYTES = 2 * BLOCK_BYTES
_NO_ROWS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class BlockPlan:
    """One block to be read, once, and all that is wanted of it.

    Attributes:
        block: its index among the blocks of all files.
        whole: indices of requests for whole chunks that share this block with others: nothing but numbers is kept of each, since there
            may be tens of thousands, and an object for each would cost more time in the garbage collector than in reading.
        wanted: all other requests that touch it.
        rows: of the whole targets that have bytes in it.
    """

    block: int
    whole: list[int]
    wanted: list[Wanted]
    rows: NDArray[np.int64] = field(default_factory=lambda: _NO_ROWS)

    @property
    def num_reads(self) -> int:
        """How many reads want something of it."""
        return len(self.whole) + len(self.wanted) + len(self.rows)


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
    """All reads of a list of requests.

    Attributes:
        spans: of each file in the order of their positions; files take turns.
        block_offsets: for each request, where its chunk begins in the raw bytes of the chunk's first block, in bytes.
        empty: requests without elements, which need no read.
    """

    spans: list[Span]
    block_offsets: list[int]
    empty: list[ReadRequest]


def read_budget(bytes_in_flight: int, num_threads: int) -> tuple[int, int]:
    """How much a worker reads at once, and how many may work at once, so that all together stay within a bound.

    A worker holds the stored bytes of its span, twice where the storage hands over memory of its own; one decoded block; and the planes
    that it is joined from.

    Args:
        bytes_in_flight: the bound.
        num_threads: workers there are.

    Returns:
        Bytes of a span, one or two blocks; and the number of workers, at least one, which needs 16 MiB however small the bound is.
    """
    share = bytes_in_flight // num_threads - 2 * BLOCK_BYTES
    span_bytes = min(max(share // 2, BLOCK_BYTES), _MAX_SPAN_BYTES)
    return span_bytes, max(1, min(num_threads, bytes_in_flight // (2 * span_bytes + 2 * BLOCK_BYTES)))


def plan_reads(
    manifest: Manifest,
    requests: Sequence[ReadRequest],
    *,
    whole: WholeTargets | None = None,
    span_bytes: int,
    num_lanes: int = 1,
    path: str | None,
) -> ReadPlan:
    """Plan the reads of a checkpoint.

    Args:
        manifest: of the checkpoint.
        requests: boxes within chunks; any number per chunk, in any order, overlapping or not.
        whole: whole chunks beside them.
        span_bytes: most bytes of one read (one block is always allowed).
        num_lanes: files that take turns.
        path: directory of the checkpoint, for messages.

    Raises:
        PlanError: a request is not inside its chunk.
    """
    table = manifest.table
    chunks = np.fromiter((request.chunk for request in requests), np.int64, len(requests))
    firsts = table.chunk_first_block[chunks]
    is_whole = _are_whole(manifest, requests, chunks)
    is_small = is_whole & (table.chunk_num_blocks[chunks] == 1)
    plans: dict[int, BlockPlan] = {}
    touched, owners = whole.blocks() if whole is not None else (_NO_ROWS, _NO_ROWS)
    for block, places in _by_block(touched):
        plans[block] = BlockPlan(block, [], [], owners[places])
    small = np.flatnonzero(is_small)
    for block, rows in _by_block(firsts[small]):
        plans.setdefault(block, BlockPlan(block, [], [])).whole = small[rows].tolist()
    empty: list[ReadRequest] = []
    for index in np.flatnonzero(~is_small).tolist():
        request = requests[index]
        chunk_sizes = table.box(request.chunk)[1]
        _check_inside(request, chunk_sizes, path)
        if 0 in request.sizes:
            empty.append(request)
            continue
        wanted, blocks = _wanted(manifest, request, chunk_sizes, is_whole=bool(is_whole[index]))
        for block in blocks:
            plans.setdefault(block, BlockPlan(block, [], [])).wanted.append(wanted)
    for plan in plans.values():
        if len(plan.whole) == plan.num_reads == 1:
            # Alone in its block, it may be read straight into its target.
            request = requests[plan.whole.pop()]
            plan.wanted.append(_wanted(manifest, request, request.sizes, is_whole=True)[0])
    wanted_blocks = np.sort(np.fromiter(plans, np.int64, len(plans)))
    spans = spans_of(manifest, plans, wanted_blocks, span_bytes)
    of_files = [list(some) for _, some in itertools.groupby(spans, key=lambda span: span.file)]
    return ReadPlan(list(take_turns(of_files, num_lanes)), table.chunk_block_offset[chunks].tolist(), empty)


def _by_block(blocks: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each block, and where in ``blocks`` it stands."""
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order]
    borders = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    for begin, end in itertools.pairwise(borders if len(order) else []):
        yield int(ordered[begin]), order[begin:end]


def _are_whole(manifest: Manifest, requests: Sequence[ReadRequest], chunks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which requests have just the sizes of their chunk, compared by columns."""
    table = manifest.table
    starts = table.box_starts[chunks]
    num_dims = table.box_starts[chunks + 1] - starts
    is_whole: NDArray[np.bool_] = np.fromiter((len(request.sizes) for request in requests), np.int64, len(requests)) == num_dims
    if not is_whole.all():
        # Refused later, one by one, with its name.
        return np.zeros(len(requests), np.bool_)
    stops = np.cumsum(num_dims)
    num_extents = int(stops[-1]) if len(stops) else 0
    stored = table.chunk_sizes[np.arange(num_extents) + np.repeat(starts - (stops - num_dims), num_dims)]
    wanted = np.fromiter(itertools.chain.from_iterable(request.sizes for request in requests), np.int64, num_extents)
    shifted = np.fromiter(itertools.chain.from_iterable(request.offsets for request in requests), np.int64, num_extents)
    owners = np.repeat(np.arange(len(requests)), num_dims)
    is_whole[owners[(stored != wanted) | (shifted != 0)]] = False
    return is_whole


def _wanted(manifest: Manifest, request: ReadRequest, chunk_sizes: tuple[int, ...], *, is_whole: bool) -> tuple[Wanted, list[int]]:
    """A request, and the blocks that it touches."""
    table = manifest.table
    first_block = int(table.chunk_first_block[request.chunk])
    num_blocks = int(table.chunk_num_blocks[request.chunk])
    if is_whole or num_blocks == 1:
        blocks = list(range(first_block, first_block + num_blocks))
    else:
        itemsize = int(table.chunk_bytes[request.chunk]) // math.prod(chunk_sizes)
        blocks = (blocks_of_box(chunk_sizes, Box(request.offsets, request.sizes), itemsize, BLOCK_BYTES) + first_block).tolist()
    wanted = Wanted(
        request,
        chunk_sizes,
        first_block,
        int(table.chunk_block_offset[request.chunk]),
        is_whole=is_whole,
        in_one_block=num_blocks == 1,
        num_left=len(blocks),
    )
    return wanted, blocks


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


def spans_of(manifest: Manifest, plans: Mapping[int, BlockPlan], blocks: NDArray[np.int64], span_bytes: int) -> list[Span]:
    """Group blocks that lie back to back in their file.

    Args:
        manifest: of the checkpoint.
        plans: what is wanted of each block.
        blocks: those to be read, ascending.
        span_bytes: most bytes of one read (one block is always allowed).
    """
    files = manifest.block_file[blocks]
    positions = manifest.block_position[blocks].tolist()
    extents = manifest.block_extent[blocks].tolist()
    ids = blocks.tolist()
    spans = []
    borders = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(ids)]
    for first, last in itertools.pairwise(borders):
        for start, stop in group_adjacent(positions[first:last], extents[first:last], span_bytes):
            chosen = [plans[block] for block in ids[first + start : first + stop]]
            spans.append(Span(int(files[first]), positions[first + start], chosen))
    return spans


def take_turns(groups: Iterable[Iterable[_Item]], num_lanes: int) -> Iterator[_Item]:
    """The items of all groups, each group's in order, ``num_lanes`` groups by turns; one that is used up gives way to the next.

    Workers that read several files side by side leave each the order in which the system reads ahead, and a file is closed when it is done.
    """
    waiting = iter(groups)  # shared: a lane takes the next group that no other has taken
    lanes = [itertools.chain.from_iterable(waiting) for _ in range(num_lanes)]
    return (item for turn in itertools.zip_longest(*lanes) for item in turn if item is not None)
