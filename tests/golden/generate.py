"""Writes the golden checkpoints: ``python tests/golden/generate.py``, once per format version. They are committed and read for ever.

It uses the modules of the format alone (tables, codecs, envelopes), so that it does not depend on how the pipelines schedule their work.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from golden import expected  # noqa: E402
from golden.expected import NONCE, OBJECT, OPAQUE, WORLD_SIZE  # noqa: E402

from dcp_engine.objects import encode_object  # noqa: E402
from dcp_engine.storage import dtypes  # noqa: E402
from dcp_engine.storage.codecs import Scratch, encode_block  # noqa: E402
from dcp_engine.storage.digest import SHA256, XXH3  # noqa: E402
from dcp_engine.storage.encryption import BlockCipher  # noqa: E402
from dcp_engine.storage.envelope import FOOTER_MAGIC, Marker, encode_marker, header_bytes, pack_record, shard_name  # noqa: E402
from dcp_engine.storage.footer import Footer, encode_footer  # noqa: E402
from dcp_engine.storage.keys import SecretKey  # noqa: E402
from dcp_engine.storage.limits import ALIGN_BYTES, BLOCK_BYTES, PACK_BYTES, TAG_BYTES  # noqa: E402
from dcp_engine.storage.manifest import Manifest  # noqa: E402
from dcp_engine.storage.packed_table import PackedTable  # noqa: E402
from dcp_engine.storage.signing import sign  # noqa: E402
from dcp_engine.storage.table import TableBuilder  # noqa: E402


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box to be written, with its bytes."""

    name: str
    code: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    name: str
    component: str
    rank: int
    world_size: int
    nonce: str
    size_bytes: int
    table: PackedTable
    footer_sha256: bytes
    stripe: int


def chunks() -> Iterator[tuple[str, int, int, Chunk]]:
    """Component, rank, stripe and chunk of everything that the checkpoint holds."""
    for index, (name, (code, shape, data)) in enumerate(expected.entries().items()):
        if not data:
            continue
        whole = [(index % 2, (0,) * len(shape), shape)]
        component = "state" if code == OPAQUE else "optimizer" if name == "noise" else "model"
        for rank, offsets, sizes in expected.BOXES.get(name, whole):
            array = np.frombuffer(data, dtype=f"V{len(data) // int(np.prod(shape))}").reshape(shape)
            box = array[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            yield component, rank, expected.STRIPES.get(name, 0), Chunk(name, code, shape, offsets, sizes, box.tobytes())
    for name, value in {**expected.OBJECTS, "state.typed": expected.TUPLE_AND_BIG_INT}.items():
        data = encode_object(value, key=name)
        yield "state", 0, 0, Chunk(name, OBJECT, (len(data),), (0,), (len(data),), data)


def write_shard(
    directory: Path,
    place: tuple[str, int, int],
    world_size: int,
    parts: list[Chunk],
    codecs: dict[str, str],
    *,
    secret: bool = False,
) -> Written:
    """One shard file: large chunks first, then small ones packed by dtype. A ``secret`` one is encrypted, and has SHA-256 digests."""
    component, rank, stripe = place
    name = shard_name(*place)
    content, scratch = bytearray(header_bytes(name, rank, NONCE)), Scratch()
    cipher = BlockCipher(expected.ENCRYPTION_KEY, NONCE)
    digest = SHA256 if secret else XXH3
    table = TableBuilder(digest, cipher.key_id if secret else b"")
    num_blocks = itertools.count()

    def add_block(raw: bytes, code: int, codec: str) -> int:
        block = encode_block(memoryview(raw), dtypes.of_code(code), codec, 1, scratch)
        stored = b"".join(block.parts)
        if secret:
            sealed = bytearray(len(stored) + TAG_BYTES)
            cipher.of_file(name).seal(next(num_blocks), stored, memoryview(sealed))
            stored = bytes(sealed)
        content.extend(stored + bytes(-len(stored) % ALIGN_BYTES))
        return table.add_block(len(raw), block.stored_bytes, block.codec, digest.of(stored))

    small: dict[int, list[Chunk]] = {}
    for chunk in parts:
        if len(chunk.data) < PACK_BYTES:
            small.setdefault(chunk.code, []).append(chunk)
            continue
        starts = range(0, len(chunk.data), BLOCK_BYTES)
        blocks = [add_block(chunk.data[start : start + BLOCK_BYTES], chunk.code, codecs.get(chunk.name, "auto")) for start in starts]
        table.add_chunk(chunk.name, chunk.code, chunk.shape, chunk.offsets, chunk.sizes, blocks[0], 0)
    for code, group in small.items():
        block = add_block(b"".join(chunk.data for chunk in group), code, "auto")
        offset = 0
        for chunk in group:
            table.add_chunk(chunk.name, code, chunk.shape, chunk.offsets, chunk.sizes, block, offset)
            offset += len(chunk.data)
    built = table.build()
    record, stored = pack_record(FOOTER_MAGIC, encode_footer(Footer(NONCE, component, rank, world_size, built, stripe)))
    (directory / name).write_bytes(bytes(content) + stored + record)
    size_bytes = len(content) + len(stored) + len(record)
    return Written(name, component, rank, world_size, NONCE, size_bytes, PackedTable.of(built), hashlib.sha256(stored).digest(), stripe)


def publish(root: Path, data: Path, manifest: Manifest, *, signed: bool = False) -> None:
    """MANIFEST and COMPLETE."""
    encoded = manifest.encode()
    (data / "MANIFEST").write_bytes(encoded)
    marker = Marker(NONCE, "." if data == root else NONCE, len(encoded), hashlib.sha256(encoded).hexdigest())
    if signed:
        marker = sign(marker, SecretKey(expected.SIGNING_KEY, "signing_key"))
    (root / "COMPLETE").write_bytes(encode_marker(marker))


def manifest_of(files: list[Written], world_size: int, **fields: object) -> Manifest:
    """A manifest with everything that is the same in all golden checkpoints."""
    return Manifest.build(
        receipts=files,
        nonce=NONCE,
        writer_version="0.1.0",
        run_id=expected.RUN_ID,
        saved_at=expected.SAVED_AT,
        world_size=world_size,
        codec="auto",
        **{"empty_entries": (), "aliases": {}, "planner_data": b"", "skeleton": b"", "metadata": b"", "step": None, **fields},  # type: ignore[arg-type]
    )


def generate(root: Path) -> None:
    """``v1`` as it lies on a file system, ``v1-object-store`` as under a prefix, ``v1-secret`` signed and encrypted."""
    local = root / "v1"
    local.mkdir(parents=True)
    by_file: dict[tuple[str, int, int], list[Chunk]] = {}
    for *place, chunk in chunks():
        by_file.setdefault(tuple(place), []).append(chunk)
    # One large tensor shows zstd on floats, which a writer may choose.
    files = [write_shard(local, place, WORLD_SIZE, parts, {"large.int": "zstd"}) for place, parts in by_file.items()]
    planner_data = encode_object({"state.step": ("state", "step"), "rows": ("rows",)}, key="planner_data")
    empty = [(name, code, shape) for name, (code, shape, data) in expected.entries().items() if not data]
    manifest = manifest_of(
        files,
        WORLD_SIZE,
        step=expected.STEP,
        empty_entries=empty,
        aliases=expected.ALIASES,
        planner_data=planner_data,
        metadata=encode_object({"user": {"note": "golden"}}, key="metadata"),
    )
    publish(local, local, manifest)

    remote = root / "v1-object-store"
    data = remote / NONCE
    data.mkdir(parents=True)
    value = expected.pattern(18, 6).tobytes()
    files = [write_shard(data, ("model", 0, 0), 1, [Chunk("w", 18, (2, 3), (0, 0), (2, 3), value)], {})]
    publish(remote, data, manifest_of(files, 1))

    hidden = root / "v1-secret"
    hidden.mkdir(parents=True)
    entries = expected.entries()
    by_file = {}
    for rank, name in enumerate(expected.SECRET):
        code, shape, content = entries[name]
        by_file[("model", rank % 2, 0)] = [
            *by_file.get(("model", rank % 2, 0), []),
            Chunk(name, code, shape, (0,) * len(shape), shape, content),
        ]
    files = [write_shard(hidden, place, 2, parts, {}, secret=True) for place, parts in by_file.items()]
    publish(hidden, hidden, manifest_of(files, 2), signed=True)


if __name__ == "__main__":
    for old in ("v1", "v1-object-store", "v1-secret"):
        shutil.rmtree(HERE / old, ignore_errors=True)
    generate(HERE)
