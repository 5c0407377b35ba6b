"""Small checkpoints made of tables alone, for tests of what describes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_engine.storage.envelope import FOOTER_MAGIC, pack_record, shard_name
from dcp_engine.storage.footer import Footer, encode_footer
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.packed_table import PackedTable
from dcp_engine.storage.table import ShardTable

NONCE = "00112233445566778899aabbccddeeff"


@dataclass(frozen=True, slots=True)
class TableReceipt:
    """A file that could have been written."""

    name: str
    component: str
    rank: int
    world_size: int
    nonce: str
    size_bytes: int
    table: PackedTable
    footer_sha256: bytes
    stripe: int = 0


def receipt_of(
    table: ShardTable, rank: int, world_size: int, *, component: str = "model", nonce: str = NONCE, stripe: int = 0
) -> TableReceipt:
    """The receipt of a file with that table."""
    body = encode_footer(Footer(nonce, component, rank, world_size, table, stripe))
    _, stored = pack_record(FOOTER_MAGIC, body)
    extents = sum(-(-size // 64) * 64 for size in table.block_stored_bytes.tolist())
    size_bytes = 4096 + extents + len(stored) + 64
    sha256 = hashlib.sha256(stored).digest()
    name = shard_name(component, rank, stripe)
    return TableReceipt(name, component, rank, world_size, nonce, size_bytes, PackedTable.of(table), sha256, stripe)


def manifest_of(receipts: Sequence[TableReceipt], **changes: Any) -> Manifest:
    """A manifest of these files, other fields as given or plausible."""
    fields: dict[str, Any] = {
        "nonce": NONCE,
        "writer_version": "0.1.0",
        "run_id": "run-7",
        "step": 41_000,
        "saved_at": "2031-05-01T12:00:00.123456Z",
        "world_size": len(receipts),
        "aliases": {},
        "planner_data": b"\x80",
        "skeleton": b"",
        "metadata": b"\x80",
        "codec": "auto",
    }
    return Manifest.build(receipts=receipts, **{**fields, **changes})
