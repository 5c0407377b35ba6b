"""A table on its way to the coordinator: columns in three compressed parts, of which ranks with equal states send two that are equal."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import zstandard

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.plan_columns import compress, decompress
from dcp_engine.storage import columns
from dcp_engine.storage.table_columns import (
    BLOCK_FIELDS,
    ENTRY_FIELDS,
    LAYOUT_FIELDS,
    TableColumns,
    block_columns,
    block_document,
    entry_columns,
    entry_document,
    layout_columns,
    layout_document,
    offsets_column,
)

__all__ = ["PackedTable"]

_ENTRIES = dict.fromkeys(ENTRY_FIELDS, bytes)
_LAYOUT = dict.fromkeys(LAYOUT_FIELDS, bytes)
_OWN = dict.fromkeys(("chunk_offsets", *BLOCK_FIELDS), bytes)  # one of them a key's id, which is bytes, too


@dataclass(frozen=True, slots=True)
class PackedTable:
    """The table of a file that a rank has written.

    Attributes:
        entries: names, dtypes and shapes of the entries: compressed document.
        layout: which entry each chunk is of, its sizes, and where blocks begin: likewise.
        own: offsets of the chunks (as they are, not relative to each other), and the blocks: likewise.
    """

    entries: bytes
    layout: bytes
    own: bytes

    @classmethod
    def of(cls, table: TableColumns) -> PackedTable:
        """Compress a table."""
        offsets = {"chunk_offsets": columns.pack_column(table.chunk_offsets, "<i8")}
        parts = (entry_document(table), layout_document(table), {**offsets, **block_document(table)})
        return cls(*(compress(columns.pack_document(part)) for part in parts))

    def unpack(self, known: MutableMapping[Any, Any] | None = None) -> TableColumns:
        """The columns, each as long as it must be; nothing else is checked.

        Args:
            known: what was unpacked of other tables. Parts that are in it are taken from there, so that equal ones are the same objects.

        Raises:
            MalformedCheckpointError, LimitExceededError: the parts are no columns, or do not fit each other.
        """
        known = {} if known is None else known
        entries = known.get(self.entries)
        if entries is None:
            entries = known[self.entries] = entry_columns(_document(self.entries, _ENTRIES))
        layout = known.get(place := (self.entries, self.layout))
        if layout is None:
            layout = known[place] = layout_columns(_document(self.layout, _LAYOUT), entries["entry_dims"])
        own = _document(self.own, _OWN)
        offsets = offsets_column(own, len(layout["chunk_sizes"]))
        return TableColumns(**entries, **layout, chunk_offsets=offsets, **block_columns(own))


def _document(part: bytes, fields: Mapping[str, type]) -> columns.Document:
    try:
        return columns.unpack_document(decompress(part), fields, what="table")
    except zstandard.ZstdError as error:
        raise MalformedCheckpointError("a table cannot be decompressed", found=str(error)) from error
