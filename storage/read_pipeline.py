"""Reads chunks: merged reads in file order, digests checked, blocks decoded straight into the targets where memory allows."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dcp_engine.errors import DcpEngineError, DecryptionError, DigestMismatchError, MalformedCheckpointError
from dcp_engine.storage import dtypes
from dcp_engine.storage.codecs import RAW, Scratch, decode_block
from dcp_engine.storage.digest import DigestValue, digest_of_column
from dcp_engine.storage.limits import BLOCK_BYTES, TAG_BYTES
from dcp_engine.storage.ranges import grouped_by_size
from dcp_engine.storage.read_plan import BlockPlan, Span, plan_reads, read_budget
from dcp_engine.storage.read_targets import Wanted, open_target
from dcp_engine.storage.records import PipelineOptions, ReadRequest
from dcp_engine.storage.shard_files import ShardFiles
from dcp_engine.storage.workers import WorkerPool

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import ReadFile
    from dcp_engine.storage.dtypes import DtypeInfo
    from dcp_engine.storage.encryption import BlockCipher
    from dcp_engine.storage.manifest import Manifest
    from dcp_engine.storage.read_whole import WholeTargets

__all__ = ["BlockFiles", "SpanReader", "read_chunks"]


def read_chunks(
    manifest: Manifest,
    open_file: Callable[[str], ReadFile],
    requests: Sequence[ReadRequest],
    *,
    whole: WholeTargets | None = None,
    options: PipelineOptions,
    pool: WorkerPool,
    path: str | None,
) -> None:
    """Fill the targets of all requests.

    Only blocks that hold a wanted byte are read, each once, whatever number of requests touch it. Every file that is opened has its size,
    header and footer checked against the manifest; every block its digest, before it is decoded, and its padding.

    Args:
        manifest: of the checkpoint.
        open_file: opens a shard file by name.
        requests: boxes within chunks; any number per chunk, in any order.
        whole: whole chunks beside them, which are neither opened nor committed.
        options: ``verify``, ``cipher`` and ``bytes_in_flight`` are used.
        pool: does all the work; the calling thread waits.
        path: directory of the checkpoint, for messages.

    Raises:
        PlanError: a request or its target does not fit its chunk.
        CorruptCheckpointError: of the kind that fits, naming file, tensor and block.
        StorageError: of the storage.
        BaseException: whatever ``open`` or ``commit`` raised. After any error no worker touches a target any more, the contents of the
            targets are undefined, some requests may have been committed, and the pool is usable.

    Thread-safety: several calls may share a pool.
    """
    span_bytes, num_workers = read_budget(options.bytes_in_flight, pool.threads)
    plan = plan_reads(manifest, requests, whole=whole, span_bytes=span_bytes, num_lanes=num_workers, path=path)
    uses = Counter(span.file for span in plan.spans)
    with closing(ShardFiles(manifest, open_file, uses, path=path)) as files:
        reader = SpanReader(manifest, requests, whole, plan.block_offsets, options, path)
        pool.for_each(plan.spans, lambda span, scratch: reader.read(span, files, scratch), limit=num_workers)
    for request in plan.empty:
        request.commit()


@dataclass(slots=True)
class _Job:
    """One block of a span.

    Attributes:
        plan: the block and what is wanted of it.
        codec, raw_bytes, digest, extent: the manifest's columns.
        parts: where the stored bytes are read to, in order.
        padding: where the padding after them is read to.
        found_digest: of the stored bytes as they were read; ``None`` where it is not checked.
        in_place: the wanted bytes are part of ``parts`` already, in the target's memory.
    """

    plan: BlockPlan
    codec: int
    raw_bytes: int
    digest: DigestValue
    extent: int
    parts: list[memoryview]
    padding: memoryview
    found_digest: DigestValue | None = None
    in_place: bool = False


class BlockFiles(Protocol):
    """Where stored blocks come from: :class:`ShardFiles`, or memory that another rank filled."""

    def use(self, index: int) -> ReadFile:
        """The file of that index in the manifest. One call a span, from any thread."""
        ...

    def done(self, index: int) -> None:
        """The span that ``use`` was called for has been read."""
        ...


class SpanReader:
    """What the workers do with a span: read, check, decode, hand over."""

    def __init__(
        self,
        manifest: Manifest,
        requests: Sequence[ReadRequest],
        whole: WholeTargets | None,
        block_offsets: Sequence[int],
        options: PipelineOptions,
        path: str | None,
    ) -> None:
        self._manifest = manifest
        self._requests = requests
        self._whole = whole
        self._block_offsets = block_offsets
        self._verify = options.verify
        self._cipher = options.cipher
        self._digest = digest_of_column(manifest.table.block_digests)
        self._path = path
        self._count_lock = threading.Lock()
        self._commit_lock = threading.Lock()

    def read(self, span: Span, files: BlockFiles, scratch: Scratch) -> None:
        """Read one span. Runs in a worker, with that worker's scratch."""
        plan = span.blocks[0]
        try:
            file = files.use(span.file)
            position = span.position
            for group in grouped_by_size(self._prepare(span, scratch), attrgetter("extent"), self._piece_bytes(file)):
                plan = group[0].plan
                position = self._fill(group, file, position)
                for job in group:
                    plan = job.plan
                    self._check(job, span)
                    if not job.in_place:
                        self._deliver(job, span, scratch)
                    self._finish(plan)
        except Exception as error:
            self._add_place(error, span, plan)
            raise
        files.done(span.file)

    def read_stored(self, span: Span, files: BlockFiles, memory: memoryview) -> None:
        """Read a span as it is stored, padding included and nothing checked, for those to whom it is passed on."""
        try:
            files.use(span.file).read_into(span.position, [memory])
        except Exception as error:
            self._add_place(error, span, span.blocks[0])
            raise
        files.done(span.file)

    def _prepare(self, span: Span, scratch: Scratch) -> list[_Job]:
        """Decide for each block of a span where its stored bytes are read to."""
        manifest, table = self._manifest, self._manifest.table
        blocks = slice(span.blocks[0].block, span.blocks[-1].block + 1)
        columns = (table.block_codecs, table.block_raw_bytes, table.block_stored_bytes, table.block_digests, manifest.block_extent)
        buffer = scratch.buffer("span", int(manifest.block_extent[blocks].sum())).data
        jobs = []
        begin = 0
        for plan, codec, raw_bytes, stored_bytes, digest, extent in zip(
            span.blocks, *(column[blocks].tolist() for column in columns), strict=True
        ):
            middle, end = begin + stored_bytes, begin + extent
            job = _Job(plan, codec, raw_bytes, digest, extent, [buffer[begin:middle]], buffer[middle:end])
            begin = end
            if codec == RAW and self._cipher is None:
                self._read_in_place(job)
            jobs.append(job)
        return jobs

    def _read_in_place(self, job: _Job) -> None:
        """Let a raw block be read into the target, and what surrounds the wanted bytes into the buffer, if they are a run on both sides."""
        run = self._run_of(job)
        if run is None:
            return
        begin, memory = run
        (stored,) = job.parts
        parts = (stored[:begin], memory, stored[begin + len(memory) :])
        job.parts = [part for part in parts if len(part)]
        job.in_place = True

    def _run_of(self, job: _Job) -> tuple[int, memoryview] | None:
        """Where in the block the run of its only request begins, in bytes, and the run's memory; ``None`` where there is no such thing."""
        plan = job.plan
        if plan.num_reads != 1 or plan.whole:
            return None
        if not plan.wanted:
            assert self._whole is not None
            return self._whole.run(int(plan.rows[0]), plan.block)
        (item,) = plan.wanted
        dtype = self._dtype_of(plan)
        start, num_elements = _chunk_range(job, item, dtype.itemsize)
        run = item.run(dtypes.carrier_dtype(dtype), start, start + num_elements)
        return None if run is None else (item.block_offset + run[0] * dtype.itemsize, run[1])

    def _piece_bytes(self, file: ReadFile) -> int:
        """How much to read at once. What is not digested need not stay in the cache: a call for each span is cheapest."""
        return file.piece_bytes if self._verify else file.size_bytes

    def _fill(self, group: list[_Job], file: ReadFile, position: int) -> int:
        """Read some jobs at once, or one of them in pieces, each digested while it is in the cache. Returns where they end in the file."""
        piece_bytes = self._piece_bytes(file)
        if len(group) > 1 or group[0].extent <= piece_bytes:
            parts = [part for job in group for part in (*job.parts, job.padding) if len(part)]
            file.read_into(position, parts)
            for job in group:
                job.found_digest = self._digest.of(*job.parts) if self._verify else None
            return position + sum(map(len, parts))
        (job,) = group
        digest, end = self._digest.begin(), position + job.extent
        reads = [[part[begin : begin + piece_bytes]] for part in job.parts for begin in range(0, len(part), piece_bytes)]
        if len(job.padding):
            reads[-1].append(job.padding)
        read_into, update = file.read_into, digest.update
        for read in reads:
            read_into(position, read)
            position += len(read[0])
            update(read[0])
        job.found_digest = digest.value()
        return end

    def _check(self, job: _Job, span: Span) -> None:
        """Compare padding and digest."""
        if any(job.padding):
            raise MalformedCheckpointError(f"the padding after {self._describe(job, span)} is not zero")
        if job.found_digest is not None and job.found_digest != job.digest:
            raise DigestMismatchError(
                f"the stored bytes of {self._describe(job, span)} are damaged",
                expected=self._digest.text(job.digest),
                found=self._digest.text(job.found_digest),
            )

    def _deliver(self, job: _Job, span: Span, scratch: Scratch) -> None:
        """Decrypt and decode a block that was read to a buffer, and copy what is wanted of it."""
        stored = job.parts[0]
        dtype = self._dtype_of(job.plan)
        if job.codec != RAW or self._cipher is not None:
            run = self._run_of(job)
            whole = run[1] if run is not None and len(run[1]) == job.raw_bytes else None
            if self._cipher is not None:
                is_done = job.codec == RAW and whole is not None
                stored = self._decrypt(job, span, self._cipher, scratch, whole if is_done else None)
                if is_done:
                    return
            if job.codec != RAW and whole is not None:
                decode_block(job.codec, stored, whole, dtype, scratch)
                return
        if job.codec != RAW:
            decoded = scratch.buffer("block", job.raw_bytes).data
            decode_block(job.codec, stored, decoded, dtype, scratch)
            stored = decoded
        carrier = dtypes.carrier_dtype(dtype)
        itemsize = dtype.itemsize
        elements = np.frombuffer(stored, carrier)
        for index in job.plan.whole:
            target = open_target(self._requests[index], carrier)
            first = self._block_offsets[index] // itemsize
            target[...] = elements[first : first + target.size].reshape(target.shape)
        if self._whole is not None and len(job.plan.rows):
            self._whole.fill(job.plan.rows, job.plan.block, stored)
        for item in job.plan.wanted:
            first = item.block_offset // itemsize
            start, num_elements = _chunk_range(job, item, itemsize)
            item.scatter(carrier, elements[first : first + num_elements], start)

    def _decrypt(self, job: _Job, span: Span, cipher: BlockCipher, scratch: Scratch, out: memoryview | None) -> memoryview:
        """What a block was before it was encrypted: in ``out``, or else in the scratch."""
        (stored,) = job.parts
        if out is None:
            out = scratch.buffer("opened", len(stored) - TAG_BYTES).data
        first = int(np.searchsorted(self._manifest.block_file, span.file))
        try:
            cipher.of_file(self._manifest.files[span.file].name).open(job.plan.block - first, stored, out)
        except DecryptionError as error:
            error.message = f"{error.message}: {self._describe(job, span)}"
            raise
        return out

    def _finish(self, plan: BlockPlan) -> None:
        """Count the block off its requests, and commit those that are complete."""
        if not plan.wanted and not plan.whole:
            return
        complete = []
        with self._count_lock:
            for item in plan.wanted:
                item.num_left -= 1
                if not item.num_left:
                    complete.append(item)
        with self._commit_lock:
            for item in complete:
                item.drop()
                item.request.commit()
            for index in plan.whole:
                self._requests[index].commit()

    def _add_place(self, error: Exception, span: Span, plan: BlockPlan) -> None:
        """Name checkpoint, file and tensor in an error that came from a layer that knows less."""
        file, tensor = self._manifest.files[span.file].name, self._first_name(plan)
        if isinstance(error, DcpEngineError):
            error.path = self._path if error.path is None else error.path
            error.file = file if error.file is None else error.file
            error.tensor = tensor if error.tensor is None else error.tensor
        else:
            # Of a planner, say: it has no attributes for the place.
            error.add_note(f"while tensor {tensor!r} was read from file {file!r}")

    def _first_request(self, plan: BlockPlan) -> ReadRequest | None:
        if plan.wanted:
            return plan.wanted[0].request
        return self._requests[plan.whole[0]] if plan.whole else None

    def _first_chunk(self, plan: BlockPlan) -> int:
        request = self._first_request(plan)
        if request is not None:
            return request.chunk
        assert self._whole is not None
        return int(self._whole.chunks[plan.rows[0]])

    def _dtype_of(self, plan: BlockPlan) -> DtypeInfo:
        """Element type of everything in a block."""
        table = self._manifest.table
        return dtypes.of_code(int(table.entry_dtypes[table.chunk_entries[self._first_chunk(plan)]]))

    def _first_name(self, plan: BlockPlan) -> str:
        request = self._first_request(plan)
        return request.name if request is not None else self._manifest.names[self._manifest.table.chunk_entries[self._first_chunk(plan)]]

    def _describe(self, job: _Job, span: Span) -> str:
        first = int(np.searchsorted(self._manifest.block_file, span.file))
        others = job.plan.num_reads - 1
        return f"block {job.plan.block - first}" + (f" (of this tensor and {others} more requests)" if others else "")


def _chunk_range(job: _Job, item: Wanted, itemsize: int) -> tuple[int, int]:
    """First element of a request's chunk that lies in this block, and how many do."""
    if item.in_one_block:
        return 0, math.prod(item.chunk_sizes)
    return (job.plan.block - item.first_block) * BLOCK_BYTES // itemsize, job.raw_bytes // itemsize
