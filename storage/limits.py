"""The constants of format v1: sizes that every writer uses, and caps on what a reader accepts.

The caps bound the memory and the time that a hostile checkpoint can cost. A writer refuses to exceed them, so that whatever was saved
can be loaded. ``docs/format.md`` lists them all.
"""

from __future__ import annotations

from typing import Final

FORMAT_VERSION: Final = 1

HEADER_BYTES: Final = 4096
"""Length of a shard file's header; also the alignment of the first block."""
RECORD_BYTES: Final = 64
"""Length of the fixed record of MANIFEST and of a shard's footer."""
ALIGN_BYTES: Final = 64
"""Every block extent is a multiple of this."""
BLOCK_BYTES: Final = 4 << 20
"""Raw bytes of a full block; a multiple of every item size."""
PACK_BYTES: Final = 64 << 10
"""A chunk smaller than this shares a block with others."""
TAG_BYTES: Final = 16
"""What an encrypted block is longer than what was encrypted."""
KEY_ID_BYTES: Final = 8
"""Length of what tells one key from another."""

MAX_NAME_BYTES: Final = 4096
"""UTF-8 bytes of the name of an entry."""
MAX_FILE_NAME_BYTES: Final = 255
MAX_TEXT_BYTES: Final = 4096
"""UTF-8 bytes of one text field of the manifest (run id, versions, times)."""
MAX_DIMS: Final = 64
MAX_ELEMENTS: Final = 1 << 56
"""Elements of one tensor, and extent of one dimension: every product and sum of the format then fits in 63 bits."""
MAX_STEP: Final = (1 << 63) - 1
MAX_WORLD_SIZE: Final = 1 << 20
MAX_FILES: Final = 1 << 20
MAX_STRIPES: Final = 1000
"""Files of one rank and component."""
MAX_ENTRIES: Final = 1 << 22
MAX_CHUNKS: Final = 1 << 25
MAX_BLOCKS: Final = 1 << 25

MAX_RECORD_STORED_BYTES: Final = 1 << 30
"""Compressed bytes of a manifest or of a footer."""
MAX_RECORD_RAW_BYTES: Final = 2 << 30
"""Raw bytes of a manifest or of a footer."""
FREE_RECORD_RAW_BYTES: Final = 16 << 20
"""Raw bytes that a record may have however small its compressed form is."""
MAX_RECORD_RATIO: Final = 128
"""Beyond ``FREE_RECORD_RAW_BYTES`` a record may grow to this many times its compressed form: a small file cannot claim much memory."""
FREE_ROWS: Final = 1 << 17
"""Rows of entries, chunks, blocks and aliases, together, that a manifest may have however small it is."""
ROWS_PER_BYTE: Final = 2
"""Beyond ``FREE_ROWS`` each compressed byte may stand for this many: a row that takes a bit in the file takes 200 bytes in memory."""
MAX_MARKER_BYTES: Final = 4096
"""Length of COMPLETE."""


def max_record_raw_bytes(stored_bytes: int) -> int:
    """Raw bytes that a record of ``stored_bytes`` compressed bytes may have."""
    return min(MAX_RECORD_RAW_BYTES, FREE_RECORD_RAW_BYTES + MAX_RECORD_RATIO * stored_bytes)


def min_record_stored_bytes(raw_bytes: int, num_rows: int) -> int:
    """Compressed bytes that a record of ``raw_bytes`` and ``num_rows`` must at least have."""
    by_length = -(-max(0, raw_bytes - FREE_RECORD_RAW_BYTES) // MAX_RECORD_RATIO)
    return max(by_length, -(-max(0, num_rows - FREE_ROWS) // ROWS_PER_BYTE))
