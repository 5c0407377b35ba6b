"""Damage to a checkpoint: by accident, byte by byte, and on purpose, with every digest repaired afterwards."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from dcp_engine.storage.columns import pack_column, pack_document, unpack_column
from dcp_engine.storage.digest import SHA256, XXH3, digest_of_column
from dcp_engine.storage.envelope import MANIFEST_MAGIC, Marker, encode_marker, open_body, pack_record, parse_marker, parse_record
from dcp_engine.storage.limits import HEADER_BYTES, RECORD_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.manifest_document import num_rows

__all__ = ["copy_of", "document_of", "forge", "forge_block", "regions", "replace_manifest", "write_damaged"]


def copy_of(checkpoint: Path, target: Path) -> Path:
    """A fresh copy to damage."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(checkpoint, target)
    return target


def write_damaged(path: Path, content: bytes | bytearray) -> None:
    """Replace a file's content in place."""
    path.write_bytes(content)


def regions(checkpoint: Path) -> Iterator[tuple[str, str, int, int]]:
    """Every kind of bytes that a checkpoint has: file, kind, first byte, byte after the last."""
    data = (checkpoint / "MANIFEST").read_bytes()
    manifest = Manifest.decode(data)
    yield "COMPLETE", "marker", 0, (checkpoint / "COMPLETE").stat().st_size
    yield "MANIFEST", "record", 0, RECORD_BYTES
    yield "MANIFEST", "body", RECORD_BYTES, len(data)
    for index, record in enumerate(manifest.files):
        yield record.name, "header", 0, HEADER_BYTES
        for block in np.flatnonzero(manifest.block_file == index).tolist():
            begin = int(manifest.block_position[block])
            stored, extent = int(manifest.table.block_stored_bytes[block]), int(manifest.block_extent[block])
            yield record.name, "block", begin, begin + stored
            if stored < extent:
                yield record.name, "padding", begin + stored, begin + extent
        footer = manifest.footer_position(index)
        yield record.name, "footer", footer, record.size_bytes - RECORD_BYTES
        yield record.name, "trailer", record.size_bytes - RECORD_BYTES, record.size_bytes


def replace_manifest(checkpoint: Path, manifest: bytes) -> None:
    """Put another MANIFEST there, and a COMPLETE that vouches for it."""
    marker = parse_marker((checkpoint / "COMPLETE").read_bytes())
    (checkpoint / "MANIFEST").write_bytes(manifest)
    sealed = Marker(marker.nonce, marker.data, len(manifest), hashlib.sha256(manifest).hexdigest())
    (checkpoint / "COMPLETE").write_bytes(encode_marker(sealed))


def document_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest's document."""
    data = (checkpoint / "MANIFEST").read_bytes()
    record = parse_record(data[:RECORD_BYTES], MANIFEST_MAGIC, file="MANIFEST")
    body = open_body(record, memoryview(data)[RECORD_BYTES:], file="MANIFEST")
    document: dict[str, Any] = msgpack.unpackb(body, unicode_errors="surrogatepass")
    return document


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest's document as an attacker would, who repairs all that vouches for it."""
    document = document_of(checkpoint)
    change(document)
    replace_manifest(checkpoint, b"".join(pack_record(MANIFEST_MAGIC, pack_document(document), num_rows(document))))


def forge_block(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace the stored bytes of an entry's first block, digest and all. ``content`` is as long as they are."""
    manifest = Manifest.decode((checkpoint / "MANIFEST").read_bytes())
    entry = manifest.entry_id(name)
    assert entry is not None
    chunk = manifest.chunk(int(manifest.entry(entry).chunks[0]))
    block = chunk.first_block
    assert chunk.block_offset == 0
    assert len(content) == int(manifest.table.block_stored_bytes[block]), (len(content), int(manifest.table.block_stored_bytes[block]))
    with open(checkpoint / manifest.files[chunk.file].name, "r+b") as file:
        file.seek(int(manifest.block_position[block]))
        file.write(content)

    def repair(document: dict[str, Any]) -> None:
        if digest_of_column(manifest.table.block_digests) is SHA256:
            all_of_them = document["block_digests"]
            document["block_digests"] = all_of_them[: 32 * block] + SHA256.of(content) + all_of_them[32 * block + 32 :]
            return
        digests = unpack_column(document["block_digests"], "<u8", what="block_digests", max_rows=1 << 25).copy()
        digests[block] = XXH3.of(content)
        document["block_digests"] = pack_column(digests, "<u8")

    forge(checkpoint, repair)
