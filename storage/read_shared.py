"""Reads chunks together with other ranks: each stored block is read by one of those that want it, which passes it on to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dcp_engine.errors import CorruptCheckpointError, RankDisagreementError
from dcp_engine.storage.codecs import Scratch
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.rank_group import RankGroup
from dcp_engine.storage.read_pipeline import SpanReader
from dcp_engine.storage.read_plan import BlockPlan, Span, plan_reads, read_budget, spans_of
from dcp_engine.storage.read_sharing import Message, pack_blocks, share_blocks
from dcp_engine.storage.records import PipelineOptions, ReadRequest
from dcp_engine.storage.shard_files import ShardFiles
from dcp_engine.storage.workers import WorkerPool

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import ReadFile
    from dcp_engine.storage.manifest import Manifest
    from dcp_engine.storage.read_whole import WholeTargets

__all__ = ["read_shared"]

_Result = TypeVar("_Result")

_PIECE_BYTES = 1 << 19
"""Copied out of a buffer and digested at once, while in the cache."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a rank tells all others before anything is read.

    Attributes:
        seen: the checkpoint that it opened.
        blocks: those that it wants, packed.
        round_bytes: most that it can hold of a round.
    """

    seen: str
    blocks: bytes
    round_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of a message that are read by one call.

    Attributes:
        span: where they lie in their file.
        reader: rank that reads them.
        begin: where they lie in the buffer of their round, in bytes.
        end: byte after the last one.
    """

    span: Span
    reader: int
    begin: int
    end: int


def read_shared(
    manifest: Manifest,
    open_file: Callable[[str], ReadFile],
    prepare: Callable[[], tuple[Sequence[ReadRequest], WholeTargets | None]],
    *,
    options: PipelineOptions,
    pool: WorkerPool,
    ranks: RankGroup,
    seen: str,
    path: str | None,
) -> None:
    """Fill the targets of all requests of all ranks, which call this together.

    What :func:`dcp_engine.storage.read_pipeline.read_chunks` promises holds here, too. What travels are stored bytes: fewer than decoded
    ones, and each rank checks the digest of what it decodes, wherever the bytes came from. All ranks go through the same number of rounds:
    each reads its blocks of the round, all agree that nobody failed, blocks go from those who read them to those who want them, and are
    checked, decoded and handed over there, while the next round's blocks are being read.

    Beyond the targets a rank holds two buffers of a quarter of ``bytes_in_flight`` each, of the rank with the smallest, but at least a
    block (4 MiB); and what the pipeline holds with half of its own ``bytes_in_flight``, which is at least 16 MiB.

    Args:
        manifest: of the checkpoint.
        open_file: opens a shard file by name.
        prepare: gives the requests of this rank, as for ``read_chunks``. What it raises is raised on all ranks.
        options: ``verify`` and ``bytes_in_flight`` are used.
        pool: does all the work but the passing on.
        ranks: all of them call this.
        seen: tells the checkpoint from any other.
        path: directory of the checkpoint, for messages.

    Raises:
        RankDisagreementError: the ranks have opened different checkpoints; nothing was read.
        DcpEngineError: all ranks raise the same one, that of the lowest rank that failed, which it names. After any error the targets are
            undefined and no worker touches them any more.
        RankFailedError: in place of an error of a planner, say, that is not of the engine; its cause on the rank where it happened.
    """
    shared = _SharedRead(manifest, open_file, options=options, pool=pool, ranks=ranks, path=path)
    wish, failure = _attempt(partial(shared.plan, prepare, seen))
    wishes = ranks.exchange(wish, failure, _Wish)
    _require_one_checkpoint(wishes, path)
    _, failure = _attempt(partial(shared.share, wishes))
    ranks.agree(failure)
    shared.run()


class _SharedRead:
    """One rank's part: to be planned, shared out and run, in this order."""

    def __init__(
        self,
        manifest: Manifest,
        open_file: Callable[[str], ReadFile],
        *,
        options: PipelineOptions,
        pool: WorkerPool,
        ranks: RankGroup,
        path: str | None,
    ) -> None:
        self._manifest = manifest
        self._open_file = open_file
        self._round_bytes = options.bytes_in_flight // 4
        self._options = replace(options, bytes_in_flight=max(BLOCK_BYTES, options.bytes_in_flight // 2))
        self._pool = pool
        self._ranks = ranks
        self._path = path
        self._span_bytes, self._num_workers = read_budget(self._options.bytes_in_flight, pool.threads)
        self._blocks: dict[int, BlockPlan] = {}

    def plan(self, prepare: Callable[[], tuple[Sequence[ReadRequest], WholeTargets | None]], seen: str) -> _Wish:
        """Find the blocks that this rank wants."""
        requests, whole = prepare()
        reads = plan_reads(self._manifest, requests, whole=whole, span_bytes=self._span_bytes, path=self._path)
        self._empty = reads.empty
        self._blocks = {plan.block: plan for span in reads.spans for plan in span.blocks}
        self._reader = SpanReader(self._manifest, requests, whole, reads.block_offsets, self._options, self._path)
        wanted = np.fromiter(self._blocks, np.int64, len(self._blocks))
        return _Wish(seen, pack_blocks(wanted, len(self._manifest.block_extent)), self._round_bytes)

    def share(self, wishes: Sequence[_Wish]) -> None:
        """Find what this rank reads alone, and what it reads, sends and gets in each round."""
        wanted, round_bytes = [wish.blocks for wish in wishes], min(wish.round_bytes for wish in wishes)
        sharing = share_blocks(wanted, self._manifest.block_extent, rank=self._ranks.rank, round_bytes=round_bytes)
        self._messages = sharing.rounds
        self._alone = spans_of(self._manifest, self._blocks, sharing.alone, self._span_bytes)
        self._parts = [[part for message in messages for part in self._parts_of(message)] for messages in sharing.rounds]
        # One is read into while the other is passed on and decoded.
        self._buffers = [torch.empty(sharing.buffer_bytes, dtype=torch.uint8) for _ in range(2)]
        uses = Counter(span.file for span in self._alone)
        uses.update(part.span.file for parts in self._parts for part in parts if part.reader == self._ranks.rank)
        self._files = ShardFiles(self._manifest, self._open_file, uses, path=self._path)

    def run(self) -> None:
        """Read, pass on, check and hand over everything."""
        with closing(self._files):
            finish_reading = self._start_reading(0)
            try:
                _, failure = _attempt(self._read_alone)
                for number, messages in enumerate(self._messages):
                    _, unread = _attempt(finish_reading)
                    finish_reading = _nothing
                    self._ranks.agree(unread if failure is None else failure)
                    finish_passing = self._ranks.pass_on(messages, self._buffers[number % 2])
                    finish_reading = self._start_reading(number + 1)
                    finish_passing()
                    _, failure = _attempt(partial(self._deliver, number))
            finally:
                # After an error, whatever still reads must end before its files are closed. What it finds is no news any more.
                _attempt(finish_reading)
            if failure is None:
                _, failure = _attempt(self._commit_empty)
            self._ranks.agree(failure)

    def _commit_empty(self) -> None:
        for request in self._empty:
            request.commit()

    def _parts_of(self, message: Message) -> Iterator[_Part]:
        begin = message.begin
        for span in spans_of(self._manifest, self._blocks, message.blocks, self._span_bytes):
            end = begin + int(self._manifest.block_extent[[plan.block for plan in span.blocks]].sum())
            yield _Part(span, message.reader, begin, end)
            begin = end

    def _read_alone(self) -> None:
        """The blocks that nobody else wants go straight from their files into the targets."""
        self._pool.for_each(self._alone, lambda span, scratch: self._reader.read(span, self._files, scratch), limit=self._num_workers)

    def _start_reading(self, number: int) -> Callable[[], None]:
        """Begin to read what this rank passes on in a round, and return the wait for its end. After the last round there is nothing."""
        if number == len(self._parts):
            return _nothing
        memory = self._buffers[number % 2].numpy()

        def read(part: _Part, _: Scratch) -> None:
            self._reader.read_stored(part.span, self._files, memory[part.begin : part.end].data)

        mine = [part for part in self._parts[number] if part.reader == self._ranks.rank]
        return self._pool.start_each(mine, read, limit=self._num_workers)

    def _deliver(self, number: int) -> None:
        """Check and decode everything that this rank holds of a round."""
        memory = self._buffers[number % 2].numpy()

        def deliver(part: _Part, scratch: Scratch) -> None:
            try:
                self._reader.read(part.span, _HeldSpan(part.span, memory[part.begin : part.end]), scratch)
            except CorruptCheckpointError as error:
                if part.reader != self._ranks.rank:
                    error.message += f", as rank {part.reader} read and sent them"
                raise

        self._pool.for_each(self._parts[number], deliver, limit=self._num_workers)


class _HeldSpan:
    """A span that lies in memory, in place of its file."""

    def __init__(self, span: Span, memory: NDArray[np.uint8]) -> None:
        self._position = span.position
        self._memory = memory

    @property
    def size_bytes(self) -> int:
        """Bytes of the span."""
        return len(self._memory)

    @property
    def piece_bytes(self) -> int:
        """How much is copied, and digested, at once."""
        return _PIECE_BYTES

    def use(self, index: int) -> ReadFile:
        """Stands for the file of its span alone."""
        return self

    def done(self, index: int) -> None:
        """The memory belongs to the round."""

    def read_into(self, position: int, parts: Sequence[memoryview]) -> None:
        """Copy out of the memory; ``position`` counts from the start of the file."""
        begin = position - self._position
        for part in parts:
            # numpy lets other threads run while it copies, which a memoryview does not.
            np.frombuffer(part, dtype=np.uint8)[...] = self._memory[begin : begin + len(part)]
            begin += len(part)

    def close(self) -> None:
        """Nothing to close."""


def _require_one_checkpoint(wishes: Sequence[_Wish], path: str | None) -> None:
    for rank, wish in enumerate(wishes):
        if wish.seen != wishes[0].seen:
            raise RankDisagreementError(
                "ranks opened different checkpoints under one path",
                path=path,
                rank=rank,
                expected=f"what rank 0 saw: {wishes[0].seen}",
                found=wish.seen,
                remedy="the path must lie on one file system that all ranks see, and nobody may replace the checkpoint during a load",
            )


def _attempt(work: Callable[[], _Result]) -> tuple[_Result | None, BaseException | None]:
    """What came of some work on this rank. Its error is kept until all ranks are told: raised at once, it would leave them waiting."""
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001 - raised by the next call of the group
        return None, error


def _nothing() -> None:
    """Waits for nothing."""
