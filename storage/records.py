"""The records that pass between the layer that knows DCP and the pipelines that move bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dcp_engine.storage.digest import XXH3, DigestKind
from dcp_engine.storage.packed_chunks import PackedChunks

if TYPE_CHECKING:
    from dcp_engine.storage.dtypes import DtypeInfo
    from dcp_engine.storage.encryption import BlockCipher
    from dcp_engine.storage.packed_table import PackedTable
    from dcp_engine.storage.table import TableBuilder

__all__ = ["ChunkSource", "PipelineOptions", "ReadRequest", "ShardReceipt", "Source"]


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """One box of one entry, to be stored as one chunk of a shard file.

    Attributes:
        name: key of the entry.
        dtype: element type; ``OBJECT`` and ``OPAQUE`` entries count as bytes.
        shape: global shape of the entry, in elements.
        offsets: where the box begins, in elements; as long as ``shape``.
        sizes: extent of the box, in elements; as long as ``shape``.
        nbytes: bytes of the box: product of ``sizes`` times the item size. Zero is allowed and stores nothing.
        load: returns the row-major bytes of the box as a C-contiguous 1-D ``uint8`` array of ``nbytes``: a view of the tensor's memory
            where that is contiguous CPU memory, else a fresh copy. Idempotent and thread-safe. The memory must stay unchanged until the
            write returns. A view of staged memory may be floats that a device took apart (``split_memory``), blocks of the chunk's size.
    """

    name: str
    dtype: DtypeInfo
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    load: Callable[[], NDArray[np.uint8]]

    def record(self, table: TableBuilder, block: int, block_offset: int) -> None:
        """Say where it was stored: from ``block_offset`` of a block on."""
        table.add_chunk(self.name, self.dtype.code, self.shape, self.offsets, self.sizes, block, block_offset)


Source: TypeAlias = ChunkSource | PackedChunks
"""What a shard file is made of. Many small chunks together are treated as one chunk would be, but for how they are recorded."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One box inside one stored chunk, wanted in the caller's memory.

    Attributes:
        name: key of the entry, for messages.
        chunk: id of the chunk in the manifest.
        offsets: where the box begins **within the chunk**, in elements.
        sizes: extent of the box, in elements. A zero among them makes the request empty: ``open`` is not called, ``commit`` is.
        open: returns the target: an array of exactly ``sizes`` in the dtype of ``dtypes.carrier_dtype``, any strides, writable. Called at
            most once, late, from any thread, perhaps while another request's is being called.
        commit: called exactly once, after all bytes are in the array; not called after a failure. Calls are never concurrent, but come
            from any thread.
    """

    name: str
    chunk: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    open: Callable[[], NDArray[Any]]
    commit: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How the pipelines work. Validated by whoever makes it (writer, reader).

    Attributes:
        threads: number of worker threads.
        bytes_in_flight: bound on the bytes that one pipeline holds: raw bytes loaded, encoded bytes waiting to be written, buffers of
            reads. A chunk is loaded whole, so one larger than half of the bound counts as half; and one block is always in work, which
            takes up to 16 MiB when it is read.
        codec: "raw", "zstd", "planes" or "auto" (writing only).
        level: zstd level (writing only).
        verify: check block digests (reading only). Sizes, structure and padding are always checked.
        size_target: share of their raw bytes that a rank's files may have before "auto" compresses whatever it takes; ``None``: no matter
            (writing only).
        max_bytes_per_sec: cap on what the rank writes, all its files and threads together; ``None``: none (writing only).
        digest: kind of the blocks' digests (writing only).
        cipher: encrypts or decrypts all blocks; ``None``: they are not encrypted. Set for one save or load.
    """

    threads: int
    bytes_in_flight: int
    codec: str
    level: int
    verify: bool
    size_target: float | None = None
    max_bytes_per_sec: float | None = None
    digest: DigestKind = XXH3
    cipher: BlockCipher | None = None


@dataclass(frozen=True, slots=True)
class ShardReceipt:
    """What a rank reports about one shard file that it wrote. Picklable: it crosses ranks.

    Attributes:
        name: file name within the checkpoint.
        component: component that the file holds.
        rank: rank that wrote it.
        world_size: number of ranks that write the checkpoint.
        nonce: hex nonce of the attempt.
        size_bytes: size of the whole file.
        table: of the file, as its footer has it.
        footer_sha256: SHA-256 of the footer body as stored.
        raw_bytes: bytes of all chunks before encoding.
        stored_bytes: bytes of all blocks after encoding, without padding.
        raw_bytes_by_codec: name of a codec that blocks were stored with -> their bytes before encoding.
        stripe: which of the rank's files of the component it is.
    """

    name: str
    component: str
    rank: int
    world_size: int
    nonce: str
    size_bytes: int
    table: PackedTable
    footer_sha256: bytes
    raw_bytes: int
    stored_bytes: int
    raw_bytes_by_codec: dict[str, int] = field(default_factory=dict)
    stripe: int = 0
