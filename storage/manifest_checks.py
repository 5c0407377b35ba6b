"""The rules of the format that a manifest as a whole must keep."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from dcp_engine.errors import LimitExceededError, MalformedCheckpointError
from dcp_engine.storage.codecs import CHOICES
from dcp_engine.storage.dtypes import OBJECT, OPAQUE
from dcp_engine.storage.envelope import nonce_bytes, shard_name
from dcp_engine.storage.limits import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAX_ENTRIES,
    MAX_FILES,
    MAX_RECORD_STORED_BYTES,
    MAX_STEP,
    MAX_TEXT_BYTES,
    MAX_WORLD_SIZE,
    RECORD_BYTES,
)
from dcp_engine.storage.shard_table import ShardTable
from dcp_engine.storage.table_columns import Boxes, check_count, check_name, row_starts, rows_by_dims
from dcp_engine.storage.tiling import tiled

if TYPE_CHECKING:
    from dcp_engine.storage.manifest import Manifest

__all__ = ["check_fields", "check_files", "untiled_entries"]

_NONE = np.empty(0, dtype=np.int64)
_SAVED_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z", re.ASCII)


def check_fields(manifest: Manifest) -> None:
    """Check every field that is a single value.

    Raises:
        MalformedCheckpointError, LimitExceededError
    """
    for name in ("writer_version", "run_id"):
        found = len(getattr(manifest, name).encode("utf-8", "surrogatepass"))
        if found > MAX_TEXT_BYTES:
            raise LimitExceededError(f"{name} is too long", expected=f"at most {MAX_TEXT_BYTES} bytes", found=found)
    nonce_bytes(manifest.nonce)
    if manifest.format_version != FORMAT_VERSION:
        raise MalformedCheckpointError("no such format version", expected=FORMAT_VERSION, found=manifest.format_version)
    if manifest.step is not None and not 0 <= manifest.step <= MAX_STEP:
        raise MalformedCheckpointError("invalid step", expected=f"0 to {MAX_STEP}, or none", found=manifest.step)
    if not 1 <= manifest.world_size <= MAX_WORLD_SIZE:
        raise MalformedCheckpointError("invalid world size", expected=f"1 to {MAX_WORLD_SIZE}", found=manifest.world_size)
    if manifest.codec not in CHOICES:
        raise MalformedCheckpointError("unknown codec", expected=f"one of {', '.join(CHOICES)}", found=repr(manifest.codec[:100]))
    _check_time(manifest.saved_at)
    # Whoever decodes has refused these already; whoever builds must not write what no reader takes.
    check_count("aliases", len(manifest.aliases), MAX_ENTRIES)
    check_count("files", len(manifest.files), MAX_FILES)
    for alias in manifest.aliases:
        check_name(alias)


def _check_time(saved_at: str) -> None:
    valid = _SAVED_AT.fullmatch(saved_at) is not None
    if valid:
        try:
            datetime.fromisoformat(saved_at)
        except ValueError:
            valid = False
    if not valid:
        raise MalformedCheckpointError(
            "invalid time of the save", expected="UTC in RFC 3339, such as 2031-05-01T12:00:00Z", found=repr(saved_at[:100])
        )


def check_files(manifest: Manifest) -> None:
    """Check the files against the table: names, sizes, and that no block spans two of them.

    Raises:
        MalformedCheckpointError
    """
    files, table = manifest.files, manifest.table
    first_chunks = row_starts([file.num_chunks for file in files]).tolist()
    first_blocks = row_starts([file.num_blocks for file in files]).tolist()
    if (first_chunks[-1], first_blocks[-1]) != (len(table.chunk_entries), len(table.block_codecs)):
        raise MalformedCheckpointError("files hold other numbers of chunks or blocks than the table")
    extents = manifest.file_extents.tolist()
    previous: tuple[str, int, int] | None = None
    for index, file in enumerate(files):
        place = (file.component, file.rank, file.stripe)
        footer = file.size_bytes - HEADER_BYTES - extents[index] - RECORD_BYTES
        if file.name != shard_name(*place) or file.rank >= manifest.world_size or len(file.footer_sha256) != 32:
            fault = "a file has a name, rank or digest that it cannot have"
        elif previous is not None and place <= previous:
            fault = "files are not in order of component, rank and stripe, or one appears twice"
        elif file.stripe and previous != (file.component, file.rank, file.stripe - 1):
            fault = "a file's stripe does not follow the one before it"
        elif not 0 < footer <= MAX_RECORD_STORED_BYTES:
            fault = "a file has a size that it cannot have"
        elif (file.num_chunks == 0) != (file.num_blocks == 0):
            fault = "a file has blocks without chunks"
        elif file.num_chunks and (
            not table.chunk_begins[first_chunks[index]] or table.chunk_first_block[first_chunks[index]] != first_blocks[index]
        ):
            fault = "a block spans two files"
        else:
            previous = place
            continue
        raise MalformedCheckpointError(fault, file=file.name, rank=file.rank)


def untiled_entries(table: ShardTable) -> list[int]:
    """Entries whose chunks do not cover them exactly once, in order. An object is one chunk, so that it can be read at once."""
    by_dims = {boxes.dims: boxes for boxes in table.boxes()}
    counts = np.bincount(table.chunk_entries, minlength=len(table.names))
    is_object = (table.entry_dtypes == OBJECT.code) | (table.entry_dtypes == OPAQUE.code)
    faulty = (counts > 1) & is_object
    # An encoded object has at least one byte.
    faulty |= (counts == 0) & (table.entry_dtypes == OBJECT.code)
    local = np.empty(len(table.names), dtype=np.int64)
    for rows, places in rows_by_dims(table.shape_starts):
        local[rows] = np.arange(len(rows))
        boxes = by_dims.get(places.shape[1], Boxes(places.shape[1], _NONE, _NONE, _NONE))
        offsets, sizes = boxes.of(table.chunk_offsets), boxes.of(table.chunk_sizes)
        faulty[rows] |= ~tiled(table.entry_shapes[places], local[boxes.owners], offsets, sizes)
    return [int(entry) for entry in np.flatnonzero(faulty)]
