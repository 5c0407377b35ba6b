"""Walks a whole checkpoint without a model: every file, every block, every byte of padding."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_engine.errors import DcpEngineError, DigestMismatchError, MalformedCheckpointError
from dcp_engine.storage import dtypes
from dcp_engine.storage.access import cipher_of, manifest_of
from dcp_engine.storage.backends import Directory, ReadFile
from dcp_engine.storage.codecs import Scratch, decode_block
from dcp_engine.storage.digest import digest_of_column
from dcp_engine.storage.encryption import BlockCipher, encryption_key_of
from dcp_engine.storage.keys import KeySource, secret_key
from dcp_engine.storage.limits import TAG_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.options import DEFAULT_BYTES_IN_FLIGHT, pipeline_options
from dcp_engine.storage.publish import open_checkpoint
from dcp_engine.storage.ranges import group_adjacent
from dcp_engine.storage.read_plan import read_budget
from dcp_engine.storage.shard_files import check_shard_file
from dcp_engine.storage.workers import WorkerPool

__all__ = ["VerifyReport", "verify_checkpoint", "verify_files"]

_MAX_FAULTS = 1000


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a walk over a checkpoint found.

    Attributes:
        path: the checkpoint.
        step: its step, if known.
        num_files: shard files.
        num_tensors: tensors and objects, ties counted once.
        num_blocks: blocks read.
        raw_bytes: bytes of the state.
        stored_bytes: bytes of all shard files.
        faults: everything that is wrong, in the order of files and blocks; at most 1,000. Empty: every byte is what was written.
    """

    path: str
    step: int | None
    num_files: int
    num_tensors: int
    num_blocks: int
    raw_bytes: int
    stored_bytes: int
    faults: tuple[DcpEngineError, ...]

    def raise_if_bad(self) -> None:
        """Raise the first fault, if there is one."""
        if self.faults:
            raise self.faults[0]


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
    storage_options: Mapping[str, Any] | None = None,
    signing_key: KeySource | None = None,
    encryption_key: KeySource | None = None,
) -> VerifyReport:
    """Check every byte of a checkpoint: markers, manifest, headers, footers, padding, digests, and that each block decodes.

    Encrypted blocks decrypt and decode only with their key; all else is checked without it, since digests are of what is stored.

    Args:
        path: directory or URL of the checkpoint.
        threads: worker threads; ``None``: the CPUs that this process may use, at most 8.
        bytes_in_flight: bytes held at once; at least 4 MiB, of which one worker takes 16 whatever the bound.
        storage_options: keyword arguments of the fsspec file system of a URL, and ``request_timeout_secs``: how long it may take to answer
            one request, and a second more for each MiB; 60 where it is not given.
        signing_key: what must have signed the checkpoint: bytes, the path of a file, or a callable; ``None``: anybody may have written it.
        encryption_key: what its blocks are encrypted with, likewise; ``None``: encrypted ones are not decrypted.

    Returns:
        A report. Damage of shard files is in its ``faults``; each names the file and, where it is a block, the block and its tensors.

    Raises:
        CheckpointNotFoundError kinds, UnsupportedVersionError, StorageError kinds, InvalidOptionError.
        CorruptCheckpointError kinds: COMPLETE or MANIFEST is damaged, or not signed with the key, so that nothing else can be judged.
        EncryptionKeyError: the blocks are encrypted with another key than the one that was passed.

    Thread-safety: callable from any thread.
    """
    options = pipeline_options(threads=threads, bytes_in_flight=bytes_in_flight)
    vouching, opening = secret_key(signing_key, "signing_key"), encryption_key_of(encryption_key)
    opened = open_checkpoint(path, storage_options=storage_options)
    place = opened.directory.path
    with opened.hold, WorkerPool(options.threads) as pool:
        manifest = manifest_of(opened, signing_key=vouching, path=place)
        cipher = None if opening is None else cipher_of(manifest, opening, path=place)
        indices = range(len(manifest.files))
        faults = verify_files(manifest, opened.directory, indices, cipher=cipher, pool=pool, bytes_in_flight=options.bytes_in_flight)
    return VerifyReport(
        path=place,
        step=manifest.step,
        num_files=len(manifest.files),
        num_tensors=len(manifest.names),
        num_blocks=len(manifest.block_file),
        raw_bytes=int(manifest.table.block_raw_bytes.sum()),
        stored_bytes=sum(record.size_bytes for record in manifest.files),
        faults=faults,
    )


def verify_files(
    manifest: Manifest, directory: Directory, indices: Iterable[int], *, cipher: BlockCipher | None, pool: WorkerPool, bytes_in_flight: int
) -> tuple[DcpEngineError, ...]:
    """Check every byte of some shard files against a manifest.

    Args:
        manifest: of the checkpoint.
        directory: where the files are.
        indices: of the files in the manifest, ascending.
        cipher: decrypts encrypted blocks; ``None``: they are not decrypted.
        pool: does the work.
        bytes_in_flight: bytes held at once.

    Returns:
        What is wrong, in the order of files and blocks; at most 1,000.
    """
    faults: list[tuple[int, int, DcpEngineError]] = []
    for index in indices:
        try:
            file = directory.open(manifest.files[index].name)
        except DcpEngineError as error:
            faults.append((index, -1, error))
            continue
        try:
            _verify_file(_Walk(manifest, index, file, directory.path, cipher, faults), pool, bytes_in_flight)
        finally:
            file.close()
    return tuple(error for _, _, error in sorted(faults, key=lambda fault: fault[:2]))


def _verify_file(walk: _Walk, pool: WorkerPool, bytes_in_flight: int) -> None:
    try:
        check_shard_file(walk.file, walk.manifest, walk.index, path=walk.path)
    except DcpEngineError as error:
        walk.report(-1, error)
    manifest = walk.manifest
    first, last = np.searchsorted(manifest.block_file, [walk.index, walk.index + 1]).tolist()
    span_bytes, num_workers = read_budget(bytes_in_flight, pool.threads)
    positions, extents = manifest.block_position[first:last].tolist(), manifest.block_extent[first:last].tolist()
    spans = [(first + start, first + stop) for start, stop in group_adjacent(positions, extents, span_bytes)]
    pool.for_each(spans, walk.check_span, limit=num_workers)


class _Walk:
    """The walk over one file. ``check_span`` runs in workers."""

    def __init__(
        self,
        manifest: Manifest,
        index: int,
        file: ReadFile,
        path: str,
        cipher: BlockCipher | None,
        faults: list[tuple[int, int, DcpEngineError]],
    ) -> None:
        self.manifest = manifest
        self._cipher = None if cipher is None else cipher.of_file(manifest.files[index].name)
        self._is_sealed = bool(manifest.table.encryption_key_id) and cipher is None
        self._digest = digest_of_column(manifest.table.block_digests)
        self.index = index
        self.file = file
        self.path = path
        self._faults = faults
        self._lock = threading.Lock()

    def report(self, block: int, error: DcpEngineError) -> None:
        """Note a fault, with its place."""
        error.path = self.path if error.path is None else error.path
        error.file = self.manifest.files[self.index].name if error.file is None else error.file
        error.step = self.manifest.step if error.step is None else error.step
        if block >= 0 and error.tensor is None:
            error.tensor = self._tensors(block)
        with self._lock:
            if len(self._faults) < _MAX_FAULTS:
                self._faults.append((self.index, block, error))

    def check_span(self, span: tuple[int, int], scratch: Scratch) -> None:
        """Read blocks ``span[0]`` to ``span[1]`` at once, check each."""
        extents = self.manifest.block_extent[span[0] : span[1]].tolist()
        buffer = scratch.buffer("span", sum(extents)).data[: sum(extents)]
        try:
            self.file.read_into(int(self.manifest.block_position[span[0]]), [buffer])
        except DcpEngineError as error:
            self.report(span[0], error)
            return
        ends = list(itertools.accumulate(extents))
        for block, begin, end in zip(range(*span), [0, *ends], ends, strict=False):
            try:
                self._check_block(block, buffer[begin:end], scratch)
            except DcpEngineError as error:
                self.report(block, error)

    def _check_block(self, block: int, extent: memoryview, scratch: Scratch) -> None:
        table = self.manifest.table
        number = block - int(np.searchsorted(self.manifest.block_file, self.index))
        name = f"block {number}"
        stored = extent[: int(table.block_stored_bytes[block])]
        if bytes(extent[len(stored) :]).strip(b"\0"):
            raise MalformedCheckpointError(f"the padding after {name} is not zero")
        found, expected = self._digest.of(stored), table.block_digests[block].tolist()
        if found != expected:
            text = self._digest.text
            raise DigestMismatchError(f"the stored bytes of {name} are damaged", expected=text(expected), found=text(found))
        if self._is_sealed:
            return
        if self._cipher is not None:
            opened = scratch.buffer("opened", len(stored) - TAG_BYTES).data
            self._cipher.open(number, stored, opened)
            stored = opened
        raw_bytes = int(table.block_raw_bytes[block])
        decoded = scratch.buffer("block", raw_bytes).data[:raw_bytes]
        chunk = self.manifest.chunks_of_block(block)[0]
        dtype = dtypes.of_code(int(table.entry_dtypes[table.chunk_entries[chunk]]))
        decode_block(int(table.block_codecs[block]), stored, decoded, dtype, scratch)

    def _tensors(self, block: int) -> str:
        chunks = self.manifest.chunks_of_block(block)
        name = self.manifest.names[int(self.manifest.table.chunk_entries[chunks[0]])]
        return name if len(chunks) == 1 else f"{name} and {len(chunks) - 1} more in one block"
