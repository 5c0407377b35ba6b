"""The columns of a table as they are stored, between numpy and documents.

Nothing that follows from other columns is here, and nothing is checked beyond what a document can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_engine.errors import LimitExceededError, MalformedCheckpointError
from dcp_engine.storage import columns
from dcp_engine.storage.digest import SHA256, XXH3, digest_of_column
from dcp_engine.storage.limits import ALIGN_BYTES, KEY_ID_BYTES, MAX_BLOCKS, MAX_CHUNKS, MAX_ENTRIES, MAX_NAME_BYTES

__all__ = [
    "BLOCK_FIELDS",
    "ENTRY_FIELDS",
    "LAYOUT_FIELDS",
    "TABLE_FIELDS",
    "Boxes",
    "TableColumns",
    "aligned",
    "block_columns",
    "block_document",
    "boxes_by_dims",
    "check_count",
    "check_name",
    "entry_columns",
    "entry_document",
    "layout_columns",
    "layout_document",
    "offsets_column",
    "require",
    "row_starts",
    "rows_by_dims",
]

_I64 = npt.NDArray[np.int64]

ENTRY_FIELDS = ("entry_names", "entry_name_bytes", "entry_dtypes", "entry_dims", "entry_shapes")
"""What a document says of entries."""
LAYOUT_FIELDS = ("chunk_entries", "chunk_sizes", "chunk_begins")
"""What it says of chunks that the ranks of one sharding have in common."""
BLOCK_FIELDS = ("block_saved", "block_codecs", "block_digests", "encryption_key_id")
"""What it says of blocks."""
TABLE_FIELDS: dict[str, type] = dict.fromkeys(
    (*ENTRY_FIELDS, "chunk_entries", "chunk_offsets", "chunk_sizes", "chunk_begins", *BLOCK_FIELDS), bytes
)
"""The fields of a table in a document, in their order; all of them columns but the last."""


def require(holds: bool, fault: str) -> None:
    """Raises ``MalformedCheckpointError`` where a rule of tables does not hold."""
    if not holds:
        raise MalformedCheckpointError(f"the table describes {fault}")


def check_count(what: str, count: int, limit: int) -> None:
    """Raises ``LimitExceededError`` for more than the format allows."""
    if count > limit:
        raise LimitExceededError(f"too many {what}", expected=f"at most {limit}", found=count)


def check_name(name: str) -> None:
    """Raises ``LimitExceededError`` for a name of an entry or alias that is too long."""
    # Most names need not be encoded to know that they are short enough.
    if len(name) > MAX_NAME_BYTES // 4 and len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise LimitExceededError("a key is too long", tensor=name, expected=f"at most {MAX_NAME_BYTES} bytes", remedy="shorten it")


def row_starts(counts: npt.NDArray[Any] | Sequence[int]) -> _I64:
    """Where each of consecutive groups starts, and where the last ends."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


def aligned(num_bytes: _I64) -> _I64:
    """Lengths rounded up to whole units of alignment, as blocks lie in a file."""
    rounded: _I64 = (num_bytes + (ALIGN_BYTES - 1)) & -ALIGN_BYTES
    return rounded


def rows_by_dims(starts: _I64) -> Iterator[tuple[_I64, npt.NDArray[Any]]]:
    """Group rows of a flat column by their number of values.

    Args:
        starts: where each row starts, and the last ends.

    Yields:
        The rows of one length d >= 0, and the ``[num_rows, d]`` positions of their values in the flat column.
    """
    counts = np.diff(starts)
    for dims in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == dims)
        yield rows, starts[rows][:, None] + np.arange(dims)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The chunks whose entries have one number of dimensions.

    Attributes:
        dims: that number.
        chunks: their ids, by entry; those of one entry ascend.
        owners: entry of each, ascending.
        places: where each starts in the flat columns of boxes; ``None``: at ``dims`` times its id.
    """

    dims: int
    chunks: _I64
    owners: _I64
    places: _I64 | None

    def of(self, column: _I64) -> _I64:
        """Their rows of a flat column, ``[num_chunks, dims]``, a copy."""
        if self.places is None:
            return np.take(column.reshape(-1, self.dims), self.chunks, axis=0)  # several times as fast as indexing
        rows: _I64 = column[self.places[:, None] + np.arange(self.dims)]
        return rows

    def put(self, rows: _I64, column: _I64) -> None:
        """The inverse of :meth:`of`: write to a flat column."""
        for dim in range(self.dims):
            if self.places is None:
                column[dim :: self.dims][self.chunks] = rows[:, dim]
            else:
                column[self.places + dim] = rows[:, dim]


def boxes_by_dims(entries: _I64, order: _I64, starts: _I64, dims: npt.NDArray[np.uint8]) -> Iterator[Boxes]:
    """Group chunks by their number of dimensions.

    Args:
        entries: of each chunk.
        order: of the chunks, by entry.
        starts: where each chunk starts in the flat columns, and the last ends.
        dims: of each entry.
    """
    owners = entries[order]
    of_chunks = dims[owners]
    used = np.flatnonzero(np.bincount(of_chunks)).tolist()
    for num in used:
        if len(used) == 1:
            yield Boxes(num, order, owners, None if num else starts[order])
            continue
        some = np.flatnonzero(of_chunks == num)
        chunks = order[some]
        yield Boxes(num, chunks, owners[some], starts[chunks])


@dataclass(frozen=True, slots=True, eq=False)
class TableColumns:
    """A table as it is stored. Arrays are not to be written to. Whether it is one, only :class:`ShardTable` says.

    Attributes:
        names: name of each entry.
        entry_dtypes: u8 dtype code of each entry.
        entry_dims: number of dimensions of each entry.
        entry_shapes: flat: the extents of one entry after those of the one before, in elements.
        chunk_entries: index of the entry that each chunk belongs to.
        chunk_offsets: flat: where the chunk begins in the entry, in elements.
        chunk_sizes: flat: the chunk's extents, in elements, none of them zero.
        chunk_begins: whether the chunk begins a block.
        block_codecs: u8 codec of each block.
        block_saved_bytes: raw less stored bytes of each block: zero for raw blocks, else more.
        block_digests: digest of each block's stored bytes, as :class:`~dcp_engine.storage.digest.DigestKind` has them.
        encryption_key_id: of the key that all blocks are encrypted with; empty: they are not.
    """

    names: list[str]
    entry_dtypes: npt.NDArray[np.uint8]
    entry_dims: npt.NDArray[np.uint8]
    entry_shapes: _I64
    chunk_entries: _I64
    chunk_offsets: _I64
    chunk_sizes: _I64
    chunk_begins: npt.NDArray[np.bool_]
    block_codecs: npt.NDArray[np.uint8]
    block_saved_bytes: _I64
    block_digests: npt.NDArray[Any]
    encryption_key_id: bytes = b""


# ------------------------------------------------------------------------------------------------------- columns to documents


def entry_document(table: TableColumns) -> columns.Document:
    """:data:`ENTRY_FIELDS` of a table."""
    names, name_bytes = columns.pack_texts(table.names)
    return {
        "entry_names": names,
        "entry_name_bytes": name_bytes,
        "entry_dtypes": columns.pack_column(table.entry_dtypes, "u1"),
        "entry_dims": columns.pack_column(table.entry_dims, "u1"),
        "entry_shapes": columns.pack_column(table.entry_shapes, "<i8"),
    }


def layout_document(table: TableColumns) -> columns.Document:
    """:data:`LAYOUT_FIELDS` of a table."""
    return {
        "chunk_entries": columns.pack_column(table.chunk_entries, "<u4"),
        "chunk_sizes": columns.pack_column(table.chunk_sizes, "<i8"),
        "chunk_begins": columns.pack_column(table.chunk_begins, "u1"),
    }


def block_document(table: TableColumns) -> columns.Document:
    """:data:`BLOCK_FIELDS` of a table."""
    return {
        "block_saved": columns.pack_column(table.block_saved_bytes, "<u4"),
        "block_codecs": columns.pack_column(table.block_codecs, "u1"),
        "block_digests": _packed_digests(table.block_digests),
        "encryption_key_id": table.encryption_key_id,
    }


def _packed_digests(digests: npt.NDArray[Any]) -> bytes:
    # Planes of bytes that look like noise would be no smaller, and a SHA-256 is no number.
    return columns.pack_column(digests, "<u8") if digest_of_column(digests) is XXH3 else digests.tobytes()


# ------------------------------------------------------------------------------------------------------- documents to columns


def entry_columns(document: columns.Document) -> dict[str, Any]:
    """The columns of :data:`ENTRY_FIELDS`, by their names in :class:`TableColumns`.

    Raises:
        MalformedCheckpointError, LimitExceededError: they are no columns, or too long.
    """
    raw = _bytes_of(document, ENTRY_FIELDS)
    codes = columns.unpack_column(raw["entry_dtypes"], "u1", what="entry_dtypes", max_rows=MAX_ENTRIES)
    dims = columns.unpack_column(raw["entry_dims"], "u1", what="entry_dims", num_rows=len(codes), max_rows=MAX_ENTRIES)
    names = columns.unpack_texts(
        raw["entry_names"], raw["entry_name_bytes"], what="entry_names", max_rows=MAX_ENTRIES, max_bytes=MAX_NAME_BYTES
    )
    num_extents = int(dims.sum(dtype=np.int64))
    shapes = columns.unpack_column(raw["entry_shapes"], "<i8", what="entry_shapes", num_rows=num_extents, max_rows=num_extents)
    return {"names": names, "entry_dtypes": codes, "entry_dims": dims, "entry_shapes": shapes}


def layout_columns(document: columns.Document, dims: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """The columns of :data:`LAYOUT_FIELDS`, of chunks of entries that have ``dims`` dimensions. Raises as :func:`entry_columns`."""
    raw = _bytes_of(document, LAYOUT_FIELDS)
    entries = columns.unpack_column(raw["chunk_entries"], "<u4", what="chunk_entries", max_rows=MAX_CHUNKS).astype(np.int64)
    require(not len(entries) or int(entries.max()) < len(dims), "a chunk of an entry that does not exist")
    num_extents = int(dims[entries].sum(dtype=np.int64))
    sizes = columns.unpack_column(raw["chunk_sizes"], "<i8", what="chunk_sizes", num_rows=num_extents, max_rows=num_extents)
    begins = columns.unpack_column(raw["chunk_begins"], "u1", what="chunk_begins", num_rows=len(entries), max_rows=MAX_CHUNKS)
    require(not len(begins) or int(begins.max()) <= 1, "a mark that is neither 0 nor 1")
    return {"chunk_entries": entries, "chunk_sizes": sizes, "chunk_begins": begins.astype(np.bool_)}


def offsets_column(document: columns.Document, num_extents: int) -> _I64:
    """The column ``chunk_offsets`` as it is in a document, of chunks with that many extents together. Raises as :func:`entry_columns`."""
    raw = _bytes_of(document, ("chunk_offsets",))["chunk_offsets"]
    found: _I64 = columns.unpack_column(raw, "<i8", what="chunk_offsets", num_rows=num_extents, max_rows=num_extents)
    return found


def block_columns(document: columns.Document) -> dict[str, Any]:
    """The columns of :data:`BLOCK_FIELDS`, by their names in :class:`TableColumns`. Raises as :func:`entry_columns`."""
    raw = _bytes_of(document, BLOCK_FIELDS)
    codecs = columns.unpack_column(raw["block_codecs"], "u1", what="block_codecs", max_rows=MAX_BLOCKS)
    saved = columns.unpack_column(raw["block_saved"], "<u4", what="block_saved", num_rows=len(codecs), max_rows=MAX_BLOCKS)
    key_id = raw["encryption_key_id"]
    require(len(key_id) in (0, KEY_ID_BYTES), "a key of another kind")
    digests = _unpacked_digests(raw["block_digests"], len(codecs))
    return {"block_codecs": codecs, "block_saved_bytes": saved.astype(np.int64), "block_digests": digests, "encryption_key_id": key_id}


def _unpacked_digests(data: bytes, num_blocks: int) -> npt.NDArray[Any]:
    """The width says which kind they are."""
    if num_blocks and len(data) == num_blocks * SHA256.dtype.itemsize:
        return np.frombuffer(data, dtype=SHA256.dtype)
    return columns.unpack_column(data, "<u8", what="block_digests", num_rows=num_blocks, max_rows=MAX_BLOCKS)


def _bytes_of(document: columns.Document, fields: Sequence[str]) -> dict[str, bytes]:
    return {name: value for name in fields if isinstance(value := document[name], bytes)}
