"""The manifest's fields between values and the document that is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage import columns
from dcp_engine.storage.envelope import nonce_bytes, split_shard_name
from dcp_engine.storage.limits import (
    FREE_ROWS,
    HEADER_BYTES,
    MAX_BLOCKS,
    MAX_CHUNKS,
    MAX_ENTRIES,
    MAX_FILE_NAME_BYTES,
    MAX_FILES,
    MAX_NAME_BYTES,
    RECORD_BYTES,
    ROWS_PER_BYTE,
)
from dcp_engine.storage.shard_table import ShardTable
from dcp_engine.storage.table_columns import TABLE_FIELDS, aligned, check_count, row_starts

if TYPE_CHECKING:
    from dcp_engine.storage.manifest import Manifest

__all__ = ["FileRecord", "from_document", "num_rows", "to_document"]

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "writer_version": str,
    "nonce": bytes,
    "run_id": str,
    "step": (int, type(None)),
    "saved_at": str,
    "world_size": int,
    "codec": str,
    "file_names": bytes,
    "file_name_bytes": bytes,
    "file_chunks": bytes,
    "file_blocks": bytes,
    "file_footer_bytes": bytes,
    "file_footer_sha256": bytes,
    **{name: kind for name, kind in TABLE_FIELDS.items() if name != "encryption_key_id"},
    "alias_names": bytes,
    "alias_name_bytes": bytes,
    "alias_targets": bytes,
    "planner_data": bytes,
    "skeleton": bytes,
    "metadata": bytes,
    "encryption_key_id": bytes,
}
_SHA256_BYTES = 32


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One shard file.

    Attributes:
        name: file name.
        component: what it holds.
        rank: of its writer.
        size_bytes: size of the whole file.
        footer_sha256: SHA-256 of the footer body as stored, 32 bytes.
        num_chunks: chunks that begin in it.
        num_blocks: blocks in it.
        stripe: which of its writer's files of the component it is.
    """

    name: str
    component: str
    rank: int
    size_bytes: int
    footer_sha256: bytes
    num_chunks: int
    num_blocks: int
    stripe: int = 0


def to_document(manifest: Manifest, extents: npt.NDArray[np.int64]) -> columns.Document:
    """The document of a manifest.

    Args:
        manifest: to be stored.
        extents: bytes of the blocks of each file, padding included. Only the rest of a file's size is stored.
    """
    files = manifest.files
    names, name_bytes = columns.pack_texts([file.name for file in files])
    sizes = np.array([file.size_bytes for file in files], dtype=np.int64)
    aliases, alias_bytes = columns.pack_texts(list(manifest.aliases))
    targets = np.array([manifest.entry_id(name) for name in manifest.aliases.values()], dtype=np.int64)
    table = manifest.table.to_document()
    key_id = table.pop("encryption_key_id")
    return {
        "writer_version": manifest.writer_version,
        "nonce": nonce_bytes(manifest.nonce),
        "run_id": manifest.run_id,
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "codec": manifest.codec,
        "file_names": names,
        "file_name_bytes": name_bytes,
        "file_chunks": columns.pack_column(np.array([file.num_chunks for file in files], dtype=np.int64), "<u4"),
        "file_blocks": columns.pack_column(np.array([file.num_blocks for file in files], dtype=np.int64), "<u4"),
        "file_footer_bytes": columns.pack_column(sizes - extents - (HEADER_BYTES + RECORD_BYTES), "<u4"),
        "file_footer_sha256": b"".join(file.footer_sha256 for file in files),
        **table,
        "alias_names": aliases,
        "alias_name_bytes": alias_bytes,
        "alias_targets": columns.pack_column(targets, "<u4"),
        "planner_data": manifest.planner_data,
        "skeleton": manifest.skeleton,
        "metadata": manifest.metadata,
        "encryption_key_id": key_id,
    }


def num_rows(document: columns.Document) -> int:
    """Rows of entries, chunks, blocks and aliases: what decoding takes memory for."""
    widths = {"entry_dtypes": 1, "chunk_begins": 1, "block_codecs": 1, "alias_targets": 4}
    return sum(len(cast("bytes", document[name])) // width for name, width in widths.items())


def from_document(body: bytes, stored_bytes: int) -> dict[str, Any]:
    """The fields of a manifest by name, parsed from the document; their meaning is checked by the manifest itself.

    Args:
        body: the document.
        stored_bytes: its length as it was compressed, which bounds what it may ask for.

    Raises:
        MalformedCheckpointError, LimitExceededError
    """
    document = columns.unpack_document(body, _FIELDS, what="manifest")
    check_count("rows for the length of the manifest", num_rows(document), FREE_ROWS + ROWS_PER_BYTE * stored_bytes)
    table = ShardTable.from_document(document)
    aliases = columns.unpack_texts(
        cast("bytes", document["alias_names"]),
        cast("bytes", document["alias_name_bytes"]),
        what="alias_names",
        max_rows=MAX_ENTRIES,
        max_bytes=MAX_NAME_BYTES,
    )
    targets = columns.unpack_column(
        cast("bytes", document["alias_targets"]), "<u4", what="alias_targets", num_rows=len(aliases), max_rows=MAX_ENTRIES
    )
    if len(set(aliases)) != len(aliases) or (len(targets) and int(targets.max()) >= len(table.names)):
        raise MalformedCheckpointError("two aliases of one name, or one of an entry that does not exist")
    kept = ("writer_version", "run_id", "step", "saved_at", "world_size", "codec", "planner_data", "skeleton", "metadata")
    return {
        **{name: document[name] for name in kept},
        "nonce": cast("bytes", document["nonce"]).hex(),
        "files": _files(document, table),
        "table": table,
        "aliases": {alias: table.names[target] for alias, target in zip(aliases, targets.tolist(), strict=True)},
    }


def _files(document: columns.Document, table: ShardTable) -> tuple[FileRecord, ...]:
    raw = {name: cast("bytes", document[name]) for name in _FIELDS if name.startswith("file_")}
    names = columns.unpack_texts(
        raw["file_names"], raw["file_name_bytes"], what="file_names", max_rows=MAX_FILES, max_bytes=MAX_FILE_NAME_BYTES
    )
    count = len(names)
    num_chunks, num_blocks, footers = (
        columns.unpack_column(raw[name], "<u4", what=name, num_rows=count, max_rows=MAX_FILES).astype(np.int64)
        for name in ("file_chunks", "file_blocks", "file_footer_bytes")
    )
    digests = raw["file_footer_sha256"]
    sums = (int(num_chunks.sum()), int(num_blocks.sum()))
    if len(digests) != _SHA256_BYTES * count or sums != (len(table.chunk_entries), len(table.block_codecs)):
        raise MalformedCheckpointError(
            "files hold other numbers of chunks or blocks than the table",
            expected=f"{len(table.chunk_entries)} of at most {MAX_CHUNKS} and {len(table.block_codecs)} of at most {MAX_BLOCKS}",
            found=sums,
        )
    before = row_starts(aligned(table.block_stored_bytes))[row_starts(num_blocks)]
    sizes = HEADER_BYTES + np.diff(before) + footers + RECORD_BYTES
    records = []
    for index, name in enumerate(names):
        component, rank, stripe = split_shard_name(name)
        digest = digests[_SHA256_BYTES * index : _SHA256_BYTES * (index + 1)]
        counts = int(num_chunks[index]), int(num_blocks[index])
        records.append(FileRecord(name, component, rank, int(sizes[index]), digest, *counts, stripe))
    return tuple(records)
