from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manifests import TableReceipt, manifest_of, receipt_of

from dcp_engine.errors import (
    CorruptCheckpointError,
    DcpEngineError,
    LimitExceededError,
    MalformedCheckpointError,
    PlanError,
    UnsupportedVersionError,
)
from dcp_engine.storage import dtypes
from dcp_engine.storage.columns import pack_column, pack_document, pack_texts
from dcp_engine.storage.envelope import MANIFEST_MAGIC, open_body, pack_record, parse_record
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.table import ShardTable, TableBuilder

F32 = 18


def table_of(rank: int, world_size: int) -> ShardTable:
    builder = TableBuilder()
    rows = (BLOCK_BYTES + 8192) // 4
    builder.add_block(BLOCK_BYTES, 1000, 2, 10 + rank)
    builder.add_block(8192, 8192, 0, 20 + rank)
    builder.add_chunk("w", F32, (rows * world_size,), (rows * rank,), (rows,), 0, 0)
    builder.add_block(28, 28, 0, 30 + rank)
    builder.add_chunk("m", F32, (2, 3 * world_size), (0, 3 * rank), (2, 3), 2, 0)
    builder.add_chunk(f"s{rank}", F32, (), (), (), 2, 24)
    builder.add_block(3, 3, 0, 40 + rank)
    builder.add_chunk(f"o{rank}", 254, (3,), (0,), (3,), 3, 0)
    return builder.build()


def receipts(world_size: int = 2) -> list[TableReceipt]:
    return [receipt_of(table_of(rank, world_size), rank, world_size) for rank in range(world_size)]


def sample() -> Manifest:
    return manifest_of(receipts()[::-1], empty_entries=[("e", F32, (0, 3))], aliases={"tied": "w"})


def body_of(data: bytes) -> dict[str, Any]:
    record = parse_record(data[:64], MANIFEST_MAGIC, file="MANIFEST")
    document: dict[str, Any] = msgpack.unpackb(open_body(record, data[64:], file="MANIFEST"))
    return document


def decoded(document: dict[str, Any]) -> Manifest:
    """Decode a changed document whose digests are right."""
    return Manifest.decode(b"".join(pack_record(MANIFEST_MAGIC, pack_document(document))), path="/checkpoints/step-00041000")


def test_everything_comes_back() -> None:
    manifest = sample()
    found = Manifest.decode(manifest.encode(), path="/x")
    for name in ("writer_version", "nonce", "run_id", "step", "saved_at", "world_size", "codec", "files", "aliases", "format_version"):
        assert getattr(found, name) == getattr(manifest, name)
    assert (found.planner_data, found.skeleton, found.metadata) == (b"\x80", b"", b"\x80")
    assert found.names == ["w", "m", "s0", "o0", "s1", "o1", "e"]
    assert found.encode() == manifest.encode()
    assert pickle.loads(pickle.dumps(found)).encode() == manifest.encode()


def test_files_are_ordered_and_sized() -> None:
    files = sample().files
    assert [(file.name, file.component, file.rank, file.num_chunks, file.num_blocks) for file in files] == [
        ("model-00000.shard", "model", 0, 4, 4),
        ("model-00001.shard", "model", 1, 4, 4),
    ]
    assert [file.size_bytes for file in files] == [receipt.size_bytes for receipt in receipts()]
    assert [file.footer_sha256 for file in files] == [receipt.footer_sha256 for receipt in receipts()]


def test_stripes_follow_the_first_file_of_their_rank_and_component() -> None:
    parts = [receipt_of(table_of(part, 3), rank, 2, stripe=stripe) for part, (rank, stripe) in enumerate([(0, 0), (0, 1), (1, 0)])]
    manifest = manifest_of(parts[::-1], world_size=2)
    found = Manifest.decode(manifest.encode())
    assert [(file.name, file.rank, file.stripe) for file in found.files] == [
        ("model-00000.shard", 0, 0),
        ("model-00000.1.shard", 0, 1),
        ("model-00001.shard", 1, 0),
    ]
    assert found.files == manifest.files


def test_a_rank_that_left_out_a_stripe_is_refused() -> None:
    parts = [receipt_of(table_of(rank, 2), 0, 1, stripe=2 * rank) for rank in range(2)]
    with pytest.raises(MalformedCheckpointError, match="stripe") as caught:
        manifest_of(parts, world_size=1)
    assert caught.value.file == "model-00000.2.shard"


def test_positions_follow_from_the_blocks_before() -> None:
    manifest = sample()
    assert manifest.block_file.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert manifest.block_extent.tolist() == [1024, 8192, 64, 64] * 2
    assert manifest.block_position.tolist() == [4096, 5120, 13312, 13376] * 2
    assert manifest.footer_position(1) == 13440
    assert manifest.files[1].size_bytes > 13440 + 64


def test_entries_and_chunks_are_found() -> None:
    manifest = sample()
    entry = manifest.entry(1)
    assert (entry.id, entry.name, entry.dtype, entry.shape, entry.chunks.tolist()) == (1, "m", dtypes.of_code(F32), (2, 6), [1, 5])
    offsets, sizes, ids = manifest.chunks_of(1)
    assert (offsets.tolist(), sizes.tolist(), ids.tolist()) == ([[0, 0], [0, 3]], [[2, 3], [2, 3]], [1, 5])
    chunk = manifest.chunk(6)
    assert (chunk.entry, chunk.offsets, chunk.sizes, chunk.file) == (4, (), (), 1)
    assert (chunk.first_block, chunk.num_blocks, chunk.block_offset, chunk.nbytes) == (6, 1, 24, 4)
    assert manifest.chunk(4).num_blocks == 2
    scalar = manifest.chunks_of(2)
    assert (scalar[0].shape, scalar[1].shape, scalar[2].tolist()) == ((1, 0), (1, 0), [2])
    assert manifest.chunks_of(6)[0].shape == (0, 2)


def test_aliases_resolve_to_what_they_share() -> None:
    manifest = sample()
    assert manifest.entry_id("tied") == manifest.entry_id("w") == 0
    assert manifest.entry_id("absent") is None


def test_a_checkpoint_of_nothing_is_a_checkpoint() -> None:
    manifest = manifest_of([], world_size=1, step=None)
    found = Manifest.decode(manifest.encode())
    assert (found.names, found.files, found.step) == ([], (), None)


def test_a_newer_version_is_told_from_a_damaged_manifest() -> None:
    data = bytearray(sample().encode())
    data[8] = 2
    with pytest.raises(UnsupportedVersionError, match="newer") as caught:
        Manifest.decode(bytes(data), path="/x")
    assert (caught.value.path, caught.value.file) == ("/x", "MANIFEST")


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100, -1])
def test_every_cut_is_found(length: int) -> None:
    with pytest.raises(CorruptCheckpointError):
        Manifest.decode(sample().encode()[:length])


def test_trailing_bytes_are_found() -> None:
    with pytest.raises(CorruptCheckpointError):
        Manifest.decode(sample().encode() + b"\0")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_flipped_bit_is_found(data: st.DataObject) -> None:
    damaged = bytearray(DATA)
    bit = data.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptCheckpointError, UnsupportedVersionError)):
        Manifest.decode(bytes(damaged))


DATA = sample().encode()


def u4(*values: int) -> bytes:
    return pack_column(np.array(values, dtype=np.uint32), "<u4")


def names(*texts: str) -> dict[str, bytes]:
    data, lengths = pack_texts(texts)
    return {"file_names": data, "file_name_bytes": lengths}


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "nonce": {"nonce": b"\0" * 15},
    "negative step": {"step": -1},
    "step as text": {"step": "7"},
    "huge step": {"step": 2**63},
    "no world": {"world_size": 0},
    "huge world": {"world_size": 2**40},
    "codec": {"codec": "lzma"},
    "time without zone": {"saved_at": "2031-05-01T12:00:00"},
    "time elsewhere": {"saved_at": "2031-05-01T12:00:00+02:00"},
    "time that is none": {"saved_at": "2031-02-30T12:00:00Z"},
    "no time": {"saved_at": ""},
    "long run id": {"run_id": "x" * 5000},
    "file elsewhere": names("../model-00000.shard", "model-00001.shard"),
    "absolute file": names("/etc/passwd", "model-00001.shard"),
    "file named MANIFEST": names("MANIFEST", "model-00001.shard"),
    "one file twice": names("model-00001.shard", "model-00001.shard"),
    "files out of order": names("model-00001.shard", "model-00000.shard"),
    "no first stripe": names("model-00000.1.shard", "model-00001.shard"),
    "a stripe that is left out": names("model-00000.shard", "model-00000.2.shard"),
    "a stripe of another rank": names("model-00000.shard", "model-00001.1.shard"),
    "stripes out of order": names("model-00000.1.shard", "model-00000.shard"),
    "rank beyond the world": names("model-00000.shard", "model-00002.shard"),
    "fewer files": names("model-00000.shard"),
    "more files": names("model-00000.shard", "model-00001.shard", "model-00002.shard"),
    "chunks that do not add up": {"file_chunks": u4(4, 5)},
    "blocks that do not add up": {"file_blocks": u4(4, 3)},
    "chunks in another file": {"file_chunks": u4(3, 5)},
    "blocks in another file": {"file_blocks": u4(3, 5)},
    "block over two files": {"file_chunks": u4(2, 6), "file_blocks": u4(3, 5)},
    "blocks without chunks": {"file_chunks": u4(0, 8)},
    "huge counts": {"file_chunks": u4(2**32 - 1, 9)},
    "no footer": {"file_footer_bytes": u4(0, 100)},
    "huge footer": {"file_footer_bytes": u4(100, 2**32 - 1)},
    "digests": {"file_footer_sha256": b"\0" * 63},
    "alias of itself": {"alias_names": b"w", "alias_name_bytes": u4(1)},
    "alias twice": {"alias_names": b"xx", "alias_name_bytes": u4(1, 1), "alias_targets": u4(0, 0)},
    "alias of nothing": {"alias_targets": u4(7)},
    "aliases that do not add up": {"alias_targets": u4(0, 0)},
    "metadata as text": {"metadata": "x"},
    "overlapping chunks": {"chunk_offsets": pack_column(np.array([0, 0, 0, 0, 0, 0, 2, 0], dtype=np.int64), "<i8")},
    "chunk out of bounds": {"chunk_offsets": pack_column(np.array([2**62, 0, 0, 0, 0, 0, 3, 0], dtype=np.int64), "<i8")},
    "larger shape": {"entry_shapes": pack_column(np.array([2**30, 2, 6, 3, 3, 0, 3], dtype=np.int64), "<i8")},
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_fields_that_break_a_rule_are_refused_with_their_place(name: str) -> None:
    document = {**body_of(DATA), **BAD_FIELDS[name]}
    assert document != body_of(DATA)
    with pytest.raises((MalformedCheckpointError, LimitExceededError)) as caught:
        decoded(document)
    assert caught.value.path == "/checkpoints/step-00041000"
    assert caught.value.file is not None


def test_a_tensor_that_is_not_covered_is_named() -> None:
    document = body_of(DATA)
    document["chunk_offsets"] = BAD_FIELDS["overlapping chunks"]["chunk_offsets"]
    with pytest.raises(MalformedCheckpointError, match="exactly once") as caught:
        decoded(document)
    assert caught.value.tensor == "w"


def test_a_plan_that_leaves_a_hole_is_refused_before_anything_is_published() -> None:
    parts = [receipt_of(table_of(rank, 3), rank, 3) for rank in (0, 2)]
    with pytest.raises(PlanError) as caught:
        manifest_of(parts, world_size=3)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("change", [{"nonce": "f" * 32}, {"world_size": 3}])
def test_files_of_another_save_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        manifest_of(receipts(), **change)
    assert caught.value.file == "model-00000.shard"


@pytest.mark.parametrize(
    "change",
    [{"name": "model-00000.shard"}, {"component": "optimizer"}, {"rank": 0}, {"nonce": "f" * 32}, {"world_size": 3}],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_that_contradicts_itself_or_the_save_is_refused(change: dict[str, Any]) -> None:
    first, second = receipts()
    with pytest.raises(PlanError, match="does not belong to this save"):
        manifest_of([first, replace(second, **change)])


def test_two_receipts_of_one_table_are_refused() -> None:
    first, second = receipts()
    with pytest.raises(PlanError, match="do not cover it exactly once") as caught:
        manifest_of([first, replace(second, table=first.table)])
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("part", ["entries", "layout", "own"])
def test_a_table_that_is_damaged_on_its_way_is_refused_with_its_place(part: str) -> None:
    first, second = receipts()
    damaged = replace(second.table, **{part: getattr(second.table, part)[:-5]})
    with pytest.raises(MalformedCheckpointError) as caught:
        manifest_of([first, replace(second, table=damaged)])
    assert (caught.value.file, caught.value.rank) == ("model-00001.shard", 1)


@pytest.mark.parametrize("code", [254, 255])
def test_an_object_is_one_chunk(code: int) -> None:
    builder = TableBuilder()
    builder.add_block(4, 4, 0, 0)
    builder.add_chunk("o", code, (4,), (0,), (2,), 0, 0)
    builder.add_chunk("o", code, (4,), (2,), (2,), 0, 2)
    with pytest.raises(PlanError):
        manifest_of([receipt_of(builder.build(), 0, 1)])


def test_an_encoded_object_is_never_empty_but_an_opaque_one_may_be() -> None:
    assert manifest_of([], world_size=1, empty_entries=[("o", 255, (0,))]).entry(0).shape == (0,)
    with pytest.raises(PlanError):
        manifest_of([], world_size=1, empty_entries=[("o", 254, (0,))])


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutations_with_repaired_digests_raise_only_errors_of_ours(data: st.DataObject) -> None:
    body = bytearray(BODY)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        action = data.draw(st.sampled_from(["set", "flip", "insert", "delete", "copy"]))
        if action == "set":
            body[place] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0x91, 0xC1, 0xDD, 0xDF, 0xFF]))
        elif action == "flip":
            body[place] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "insert":
            body[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        elif action == "delete":
            del body[place : place + data.draw(st.integers(1, 9))]
        else:
            source = data.draw(st.integers(0, len(body) - 1))
            body[place : place + 8] = body[source : source + 8]
        if not body:
            return
    mutated = b"".join(pack_record(MANIFEST_MAGIC, bytes(body)))
    try:
        manifest = Manifest.decode(mutated, path="/x")
    except DcpEngineError as caught:
        error = caught
    else:
        assert Manifest.decode(manifest.encode()).names == manifest.names
        return
    assert error.path == "/x"


BODY = pack_document(body_of(DATA))


def test_a_hostile_claim_costs_no_memory() -> None:
    # Boxes of 2**55 elements: nothing may be allocated by a size that is only claimed.
    document = body_of(DATA)
    document["entry_shapes"] = pack_column(np.array([2**55, 2, 6, 3, 3, 0, 3], dtype=np.int64), "<i8")
    document["chunk_sizes"] = pack_column(np.array([2**55, 2, 3, 3, 2**55, 2, 3, 3], dtype=np.int64), "<i8")
    tracemalloc.start()
    try:
        with pytest.raises((MalformedCheckpointError, LimitExceededError)):
            decoded(document)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_chunks_of_a_block_are_known() -> None:
    manifest = sample()
    assert [list(manifest.chunks_of_block(block)) for block in range(8)] == [[0], [0], [1, 2], [3], [4], [4], [5, 6], [7]]


def test_a_writer_refuses_what_no_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LimitExceededError, match="a key is too long") as caught:
        manifest_of(receipts(), aliases={"\u00e9" * 2049: "w"})
    assert caught.value.expected == "at most 4096 bytes"
    assert manifest_of(receipts(), aliases={"\u00e9" * 2048: "w"}).entry_id("\u00e9" * 2048) == 0
    for name, limit, what in (("ENTRIES", 5, "entries"), ("CHUNKS", 7, "chunks"), ("BLOCKS", 7, "blocks")):
        with monkeypatch.context() as patch:
            patch.setattr(f"dcp_engine.storage.shard_table.MAX_{name}", limit)
            with pytest.raises(LimitExceededError, match=f"too many {what}"):
                sample()
    for name, what in (("ENTRIES", "aliases"), ("FILES", "files")):
        with monkeypatch.context() as patch:
            patch.setattr(f"dcp_engine.storage.manifest_checks.MAX_{name}", 0)
            with pytest.raises(LimitExceededError, match=f"too many {what}"):
                sample()


def test_its_text_counts_instead_of_listing() -> None:
    assert repr(sample()).endswith(" 2 files, ShardTable(7 entries, 8 chunks, 8 blocks))")
    assert len(repr(sample())) < 250


def test_a_manifest_that_compresses_too_well_for_readers_is_stored_longer() -> None:
    """300,000 chunks of one entry in a regular row: a few hundred bytes would do, and no reader would believe them."""
    count = 300_000
    table = ShardTable(
        names=["w"],
        entry_dtypes=np.array([2], dtype=np.uint8),
        entry_dims=np.array([1], dtype=np.uint8),
        entry_shapes=np.array([count]),
        chunk_entries=np.zeros(count, dtype=np.int64),
        chunk_offsets=np.arange(count),
        chunk_sizes=np.ones(count, dtype=np.int64),
        chunk_begins=np.arange(count) == 0,
        block_codecs=np.zeros(1, dtype=np.uint8),
        block_saved_bytes=np.zeros(1, dtype=np.int64),
        block_digests=np.zeros(1, dtype=np.uint64),
    )
    encoded = manifest_of([receipt_of(table, 0, 1)]).encode()
    assert len(encoded) > count * 21
    assert Manifest.decode(encoded).table.chunk_offsets.tolist() == list(range(count))
