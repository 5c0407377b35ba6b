"""What the hostile parser campaign feeds, and to whom: each target takes bytes whose digests and sizes it repairs first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import msgpack
import numpy as np
from faults.campaign.damage import subject_of
from faults.campaign.damage_subject import Subject
from support.damage import replace_manifest
from support.manifests import NONCE, manifest_of, receipt_of

from dcp_engine import ReshardLoadPlanner, ShardReader
from dcp_engine.objects import decode_object, encode_object
from dcp_engine.storage import dtypes
from dcp_engine.storage.codecs import NAMES as CODECS
from dcp_engine.storage.codecs import Scratch, decode_block, encode_block
from dcp_engine.storage.columns import pack_document
from dcp_engine.storage.dcp_metadata import metadata_of_manifest
from dcp_engine.storage.envelope import (
    FOOTER_MAGIC,
    MANIFEST_MAGIC,
    Marker,
    encode_marker,
    open_body,
    pack_record,
    parse_marker,
    parse_record,
)
from dcp_engine.storage.footer import Footer, decode_footer, encode_footer
from dcp_engine.storage.limits import BLOCK_BYTES, RECORD_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.table import ShardTable, TableBuilder

__all__ = ["NAMES", "Target", "document_of", "opened"]

F32, BF16, OBJECT = 18, 17, 254


@dataclass(frozen=True, slots=True)
class Target:
    """One parser.

    Attributes:
        name: of it.
        seeds: sound inputs, from which others are bred.
        feed: parses one input; raises the engine's errors and no others. What it accepts, it holds to be consistent.
        is_document: inputs are documents of the format, so that fields can be changed one by one.
    """

    name: str
    seeds: tuple[bytes, ...]
    feed: Callable[[bytes], None]
    is_document: bool = False


def document_of(body: bytes) -> dict[str, Any] | None:
    """The fields of a document; ``None`` if it is none."""
    try:
        found = msgpack.unpackb(body, unicode_errors="surrogatepass")
    except Exception:  # whatever a mutated one raises
        return None
    return found if isinstance(found, dict) else None


def _table(rank: int) -> ShardTable:
    builder = TableBuilder()
    rows = (BLOCK_BYTES + 4096) // 4
    builder.add_block(BLOCK_BYTES, 1000, 2, 7)
    builder.add_block(4096, 4096, 0, 8)
    builder.add_chunk("w", F32, (2 * rows,), (rank * rows,), (rows,), 0, 0)
    builder.add_block(28, 20, 1, 9)
    builder.add_chunk("m", F32, (2, 6), (0, 3 * rank), (2, 3), 2, 0)
    builder.add_chunk(f"s{rank}", F32, (), (), (), 2, 24)
    builder.add_block(40, 40, 0, 10)
    builder.add_chunk(f"o{rank}", OBJECT, (40,), (0,), (40,), 3, 0)
    return builder.build()


def _body(data: bytes) -> bytes:
    record = parse_record(data[:RECORD_BYTES], MANIFEST_MAGIC, file="MANIFEST")
    return open_body(record, data[RECORD_BYTES:], file="MANIFEST")


def _manifests() -> tuple[bytes, ...]:
    value = {"user": {"a": 1}, "environment": {"python": "3"}}
    whole = manifest_of(
        [receipt_of(_table(rank), rank, 2) for rank in range(2)],
        aliases={"tied": "w"},
        empty_entries=[("empty", BF16, (0, 5))],
        planner_data=encode_object({"w": ("model", "w"), "m": ("m",)}, key="p"),
        metadata=encode_object(value, key="m"),
    )
    return (_body(whole.encode()),)


def _feed_manifest(body: bytes) -> None:
    manifest = Manifest.decode(b"".join(pack_record(MANIFEST_MAGIC, body)), path="fuzzed")
    assert Manifest.decode(manifest.encode()).encode() == manifest.encode(), "what was accepted is written as something else"
    table = manifest.table
    assert int(table.chunk_bytes.sum()) == int(table.block_raw_bytes.sum()), "chunks do not fill the blocks"
    metadata = metadata_of_manifest(manifest, path="fuzzed", manifest_sha256="0" * 64)
    _ = metadata.planner_data, metadata.stored_tensors
    for name in list(metadata.state_dict_metadata)[:50]:
        entry = metadata.state_dict_metadata[name]
        _ = getattr(entry, "chunks", None)


def _feed_footer(body: bytes) -> None:
    record, stored = pack_record(FOOTER_MAGIC, body)
    footer = decode_footer(open_body(parse_record(record, FOOTER_MAGIC, file="x"), stored, file="x"))
    assert decode_footer(encode_footer(footer)).name == footer.name


def _feed_record(data: bytes) -> None:
    """A record and its body with the digest repaired, whatever the sizes say."""
    head = bytearray(data[:RECORD_BYTES])
    body = data[RECORD_BYTES:]
    head[32:64] = hashlib.sha256(body).digest()
    open_body(parse_record(bytes(head), MANIFEST_MAGIC, file="MANIFEST"), body, file="MANIFEST")


def _feed_marker(data: bytes) -> None:
    """With its check line repaired, where there is one."""
    text, found, _ = data.rpartition(b"check ")
    if found:
        data = text + b"check " + hashlib.sha256(text).hexdigest().encode("ascii") + b"\n"
    assert encode_marker(parse_marker(data)) == data, "a marker has two spellings"


def _feed_object(data: bytes) -> None:
    decode_object(data, key="fuzzed")


_BLOCK_DTYPES = (2, BF16, F32, 19)
_SCRATCH = Scratch()


def _feed_block(data: bytes) -> None:
    """Codec, dtype and raw length in front, stored bytes behind."""
    head, stored = data[:6].ljust(6, b"\0"), data[6:]
    dtype = dtypes.of_code(_BLOCK_DTYPES[head[1] % len(_BLOCK_DTYPES)])
    raw_bytes = int.from_bytes(head[2:6], "little") % (1 << 20) // dtype.itemsize * dtype.itemsize
    decode_block(head[0], memoryview(stored), memoryview(bytearray(raw_bytes)), dtype, _SCRATCH)


def _blocks() -> tuple[bytes, ...]:
    generator = np.random.default_rng(0)
    found = []
    for index, code in enumerate(_BLOCK_DTYPES):
        dtype = dtypes.of_code(code)
        for values in (generator.standard_normal(700), np.abs(generator.standard_normal(64)) * 1e-3, np.zeros(300)):
            raw = (values.astype("<f8" if code == 19 else "<f4").view(np.uint8)).tobytes()
            for codec in ("zstd", "planes"):
                block = encode_block(memoryview(raw), dtype, codec, 1, _SCRATCH)
                found.append(bytes([block.codec, index]) + len(raw).to_bytes(4, "little") + b"".join(block.parts))
    assert {block[0] for block in found} == set(CODECS)
    return tuple(found)


def _objects() -> tuple[bytes, ...]:
    values: list[Any] = [
        {"a": [1, -2, 2**63, True, None, 0.5, "ü", b"x"], "t": (1, (2**70, "x")), 3: {"b": {}}},
        {"set": {1, 2}, "complex": 1j, "range": range(3), "fraction": Fraction(1, 3), "slice": slice(1, None, 2)},
        {"array": np.arange(12, dtype="<i4").reshape(3, 4), "scalar": np.float32(2), "dtype": np.dtype([("a", "<f4"), ("b", "<i2")])},
        np.zeros(5, dtype=[("a", "<f4"), ("b", "<i2", (2,))]),
    ]
    return tuple(encode_object(value, key="seed") for value in values)


def _markers() -> tuple[bytes, ...]:
    plain = Marker(NONCE, ".", 1234, "ab" * 32)
    return encode_marker(plain), encode_marker(Marker(NONCE, NONCE, 99, "cd" * 32, "01" * 8, "ef" * 32))


def _feed_checkpoint(subject: Subject, body: bytes) -> None:
    """As the manifest of a checkpoint that lies there: verified, loaded into a state, and built without one."""
    replace_manifest(subject.path, b"".join(pack_record(MANIFEST_MAGIC, body)))
    verdicts = subject.verify(), subject.load()
    built: dict[str, Any] = {}
    reader, planner = ShardReader(subject.path, threads=1), ReshardLoadPlanner(build_from_metadata=True)
    metadata = reader.read_metadata()
    planner.set_up_planner(built, metadata, True)
    plan = planner.finish_plan(planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])[0])
    reader.read_data(plan, planner)
    for error in verdicts:
        if error is not None:
            raise error


def _targets() -> tuple[Target, ...]:
    footers = (encode_footer(Footer(NONCE, "model", 1, 2, _table(1), 0)),)
    manifests = _manifests()
    records = tuple(b"".join(pack_record(MANIFEST_MAGIC, body)) for body in (manifests[0], pack_document({"a": 1})))
    return (
        Target("manifest", manifests, _feed_manifest, is_document=True),
        Target("footer", footers, _feed_footer, is_document=True),
        Target("record", records, _feed_record),
        Target("marker", _markers(), _feed_marker),
        Target("object", _objects(), _feed_object),
        Target("block", _blocks(), _feed_block),
    )


_TARGETS = {target.name: target for target in _targets()}
NAMES = (*_TARGETS, "checkpoint")
"""Of all targets."""


@contextmanager
def opened(name: str) -> Iterator[Target]:
    """A target by its name, and what it needs."""
    if name in _TARGETS:
        yield _TARGETS[name]
        return
    with subject_of("plain", 0) as subject:
        body = _body(subject.contents["MANIFEST"])
        yield Target(name, (body,), partial(_feed_checkpoint, subject), is_document=True)
