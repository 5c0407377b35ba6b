"""One shard file and its manifest in a directory, without writer, reader or planner: what the pipelines need to be tested alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcp_engine.storage import dtypes
from dcp_engine.storage.backends.base import ReadFile, WriteFile
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.read_pipeline import read_chunks
from dcp_engine.storage.records import ChunkSource, PipelineOptions, ReadRequest, ShardReceipt
from dcp_engine.storage.shard_write import ShardSpec
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.storage.write_pipeline import write_files

__all__ = ["NONCE", "CountingFile", "Target", "manifest_of", "options", "read", "source_of", "write", "write_to"]

NONCE = "0123456789abcdef" * 2


def options(
    *, codec: str = "raw", level: int = 1, threads: int = 2, bytes_in_flight: int = 64 << 20, verify: bool = True
) -> PipelineOptions:
    return PipelineOptions(threads=threads, bytes_in_flight=bytes_in_flight, codec=codec, level=level, verify=verify)


def source_of(name: str, tensor: torch.Tensor, *, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None) -> ChunkSource:
    """The tensor as a chunk: of itself, or of an entry of ``shape`` in which it begins at ``offsets``."""

    def load() -> np.ndarray:
        return dtypes.carrier(tensor.contiguous()).reshape(-1).view(np.uint8)

    sizes = tuple(tensor.shape)
    return ChunkSource(
        name=name,
        dtype=dtypes.of_tensor_dtype(tensor.dtype),
        shape=tuple(shape if shape is not None else sizes),
        offsets=tuple(offsets if offsets is not None else (0,) * len(sizes)),
        sizes=sizes,
        nbytes=tensor.numel() * tensor.element_size(),
        load=load,
    )


def write(
    directory: Path,
    sources: Sequence[ChunkSource],
    settings: PipelineOptions,
    *,
    component: str = "model",
    rank: int = 0,
    world_size: int = 1,
) -> ShardReceipt:
    """Write and commit one shard file."""
    spec = ShardSpec(component=component, rank=rank, world_size=world_size, nonce=NONCE, sources=sources)
    with WorkerPool(settings.threads) as pool:
        create = LocalDirectory(str(directory)).create
        return write_files([spec], create, settings, pool=pool, written=lambda file: file.commit())[0]


def write_to(file: WriteFile, sources: Sequence[ChunkSource], settings: PipelineOptions, pool: WorkerPool) -> ShardReceipt:
    """Write one shard file, whatever it is, and leave it open."""
    spec = ShardSpec(component="model", rank=0, world_size=1, nonce=NONCE, sources=sources)
    return write_files([spec], lambda name: file, settings, pool=pool, written=lambda whole: None)[0]


def manifest_of(*receipts: ShardReceipt, empty: Sequence[tuple[str, int, tuple[int, ...]]] = ()) -> Manifest:
    """The manifest of files, as its reader will see it."""
    manifest = Manifest.build(
        receipts=receipts,
        empty_entries=empty,
        nonce=NONCE,
        writer_version="0",
        run_id="run",
        step=1,
        saved_at="2026-01-01T00:00:00Z",
        world_size=len({receipt.rank for receipt in receipts}),
        aliases={},
        planner_data=b"",
        skeleton=b"",
        metadata=b"",
        codec="auto",
    )
    return Manifest.decode(manifest.encode())


class CountingFile:
    """A file that records what is read from it, in calls as large as can be unless told otherwise."""

    def __init__(self, file: ReadFile, reads: list[tuple[int, int]], closed: list[int], *, piece_bytes: int = 1 << 30) -> None:
        self._piece_bytes = piece_bytes
        self._file = file
        self._reads = reads
        self._closed = closed

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def piece_bytes(self) -> int:
        return self._piece_bytes

    def read_into(self, position: int, parts: Sequence[memoryview]) -> None:
        self._reads.append((position, sum(part.nbytes for part in parts)))
        self._file.read_into(position, parts)

    def close(self) -> None:
        self._closed.append(1)
        self._file.close()


@dataclass
class Target:
    """A request's target, and how often it was opened and committed."""

    array: np.ndarray
    opened: int = 0
    committed: int = 0
    on_commit: Callable[[], None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> np.ndarray[Any, Any]:
        with self.lock:
            self.opened += 1
        return self.array

    def commit(self) -> None:
        assert self.lock.acquire(blocking=False), "commits are serialised"
        self.committed += 1
        self.lock.release()
        if self.on_commit is not None:
            self.on_commit()

    def request(self, manifest: Manifest, name: str, offsets: Sequence[int] = (), *, chunk: int = 0) -> ReadRequest:
        """A request for the box at ``offsets`` in the ``chunk``-th chunk of an entry."""
        entry = manifest.entry_id(name)
        assert entry is not None
        sizes = self.array.shape
        ids = manifest.entry(entry).chunks
        return ReadRequest(
            name=name,
            chunk=int(ids[chunk]),
            offsets=tuple(offsets) or (0,) * len(sizes),
            sizes=tuple(sizes),
            open=self.open,
            commit=self.commit,
        )


def read(
    directory: Path,
    manifest: Manifest,
    requests: Sequence[ReadRequest],
    settings: PipelineOptions,
    *,
    reads: list[tuple[int, int]] | None = None,
    closed: list[int] | None = None,
) -> None:
    """Read with a pool of its own; ``reads`` receives position and length of every read."""
    place = LocalDirectory(str(directory))
    log = reads if reads is not None else []
    ends = closed if closed is not None else []
    with WorkerPool(settings.threads) as pool:
        read_chunks(
            manifest, lambda name: CountingFile(place.open(name), log, ends), requests, options=settings, pool=pool, path=str(directory)
        )
