"""Old checkpoints are read for ever: by the page alone, and by the package."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from golden import expected, generate, spec_parser

from dcp_engine import ReshardLoadPlanner, ShardReader
from dcp_engine.objects import decode_object
from dcp_engine.storage import dtypes
from dcp_engine.storage.codecs import Scratch, decode_block
from dcp_engine.storage.digest import XXH3
from dcp_engine.storage.manifest import Manifest

HERE = Path(__file__).resolve().parent
V1 = HERE / "v1"


@pytest.fixture(scope="module")
def parsed() -> spec_parser.Checkpoint:
    return spec_parser.parse(V1)


def test_the_parser_knows_the_page_alone() -> None:
    tree = ast.parse((HERE / "spec_parser.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.split(".")[0] in ("dcp_engine", "torch", "golden", "support")]


def test_every_value_is_the_one_known_before(parsed: spec_parser.Checkpoint) -> None:
    tensors = {name: (entry.dtype, entry.shape, entry.data) for name, entry in parsed.entries.items() if entry.dtype != expected.OBJECT}
    assert sorted(tensors) == sorted(expected.entries())
    for name, value in expected.entries().items():
        assert tensors[name] == value, name


def test_fields_are_the_ones_known_before(parsed: spec_parser.Checkpoint) -> None:
    fields = parsed.fields
    found = (fields["nonce"].hex(), fields["run_id"], fields["step"], fields["saved_at"], fields["world_size"], fields["codec"])
    assert found == (expected.NONCE, expected.RUN_ID, expected.STEP, expected.SAVED_AT, expected.WORLD_SIZE, "auto")
    assert parsed.aliases == expected.ALIASES
    assert msgpack.unpackb(fields["metadata"]) == {"user": {"note": "golden"}}


def test_plain_objects_are_plain_msgpack(parsed: spec_parser.Checkpoint) -> None:
    for name, value in expected.OBJECTS.items():
        found = msgpack.unpackb(parsed.entries[name].data)
        assert found == value
        assert type(found) is type(value)


def test_typed_objects_are_tagged_as_the_page_says(parsed: spec_parser.Checkpoint) -> None:
    def untag(value: Any) -> Any:
        return (
            [untag(part) for part in value]
            if isinstance(value, list)
            else (value.code, value.data)
            if isinstance(value, msgpack.ExtType)
            else value
        )

    found = untag(msgpack.unpackb(parsed.entries["state.typed"].data))
    big = (2**70).to_bytes(9, "little")
    assert found == [(10, b""), 1, [(10, b""), [(1, b""), big], "x"]]


def test_the_golden_checkpoint_shows_all_of_the_format(parsed: spec_parser.Checkpoint) -> None:
    assert {codec for codec, _ in parsed.codecs_of_dtypes} == {0, 1, 2}
    assert {code for codec, code in parsed.codecs_of_dtypes if codec == 2} == set(expected.FLOAT_BYTES)
    assert {entry.dtype for entry in parsed.entries.values()} == {*expected.ITEMSIZES, expected.OBJECT, expected.OPAQUE}
    # Both layouts of planes, the paired one with folded signs and listed exponents.
    assert {head[1] > 0 for head in parsed.heads_of_planes} == {True, False}
    assert [(head[0], head[3]) for head in parsed.heads_of_planes if head[1] == 0] == [(4, 1)]
    assert all(head[8:12] != bytes(4) for head in parsed.heads_of_planes if head[1] == 0)
    assert parsed.entries["large.float"].num_blocks == 2
    assert parsed.entries["large.float"].codecs == {2}
    assert parsed.entries["large.int"].codecs == {1}
    assert parsed.entries["noise"].codecs == {0}
    assert {name: parsed.entries[name].num_chunks for name in expected.BOXES} == {
        name: len(boxes) for name, boxes in expected.BOXES.items()
    }
    assert {name.split("-")[0] for name in parsed.files} == {"model", "optimizer", "state"}
    assert {name.split("-")[1] for name in parsed.files} == {"00000.shard", "00000.1.shard", "00001.shard", "00001.1.shard", "00002.shard"}


def test_the_object_store_layout_is_read_too() -> None:
    found = spec_parser.parse(HERE / "v1-object-store")
    assert {name: (entry.dtype, entry.shape, entry.data) for name, entry in found.entries.items()} == {
        "w": (18, (2, 3), expected.pattern(18, 6).tobytes())
    }


def test_the_signed_and_encrypted_checkpoint_is_read_with_its_keys() -> None:
    found = spec_parser.parse(HERE / "v1-secret", expected.SIGNING_KEY, expected.ENCRYPTION_KEY)
    tensors = {name: (entry.dtype, entry.shape, entry.data) for name, entry in found.entries.items()}
    assert tensors == {name: expected.entries()[name] for name in expected.SECRET}
    assert {codec for codec, _ in found.codecs_of_dtypes} == {0, 2}
    assert found.entries["large.float"].num_blocks == 2
    assert len(found.files) == 2


@pytest.mark.parametrize(
    ("signing", "encryption"), [(b"x" * 32, expected.ENCRYPTION_KEY), (expected.SIGNING_KEY, None), (expected.SIGNING_KEY, b"x" * 32)]
)
def test_the_parser_refuses_other_keys(signing: bytes, encryption: bytes | None) -> None:
    with pytest.raises(spec_parser.SpecError):
        spec_parser.parse(HERE / "v1-secret", signing, encryption)
    with pytest.raises(spec_parser.SpecError):
        spec_parser.parse(V1, signing)


def test_the_package_reads_the_signed_and_encrypted_checkpoint() -> None:
    state = {}
    for name in expected.SECRET:
        code, shape, _ = expected.entries()[name]
        state[name] = torch.zeros(shape, dtype=dtypes.of_code(code).torch_dtype)
    reader = ShardReader(HERE / "v1-secret", signing_key=expected.SIGNING_KEY, encryption_key=expected.ENCRYPTION_KEY)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    for name, tensor in state.items():
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == expected.entries()[name][2], name


def test_golden_checkpoints_stay_small() -> None:
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file() and path.suffix in ("", ".shard")) < 250_000


def test_the_package_reads_every_value() -> None:
    manifest = Manifest.decode((V1 / "MANIFEST").read_bytes(), path=str(V1))
    values: dict[str, Any] = expected.entries()
    scratch = Scratch()
    data = [(V1 / file.name).read_bytes() for file in manifest.files]
    table = manifest.table
    for entry in map(manifest.entry, range(len(manifest.names))):
        target = np.zeros(entry.shape, dtype=f"V{entry.dtype.itemsize}")
        for chunk in map(manifest.chunk, entry.chunks.tolist()):
            raw = b""
            for block in range(chunk.first_block, chunk.first_block + chunk.num_blocks):
                start = int(manifest.block_position[block])
                stored = memoryview(data[chunk.file])[start : start + int(table.block_stored_bytes[block])]
                assert XXH3.of(stored) == int(table.block_digests[block])
                out = bytearray(int(table.block_raw_bytes[block]))
                decode_block(int(table.block_codecs[block]), stored, memoryview(out), entry.dtype, scratch)
                raw += out
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            content = raw[chunk.block_offset : chunk.block_offset + chunk.nbytes]
            target[box] = np.frombuffer(content, dtype=target.dtype).reshape(chunk.sizes)
        if entry.dtype is dtypes.OBJECT:
            values[entry.name] = decode_object(target.tobytes(), key=entry.name)
        else:
            assert values[entry.name] == (entry.dtype.code, entry.shape, target.tobytes())
    assert {name: values[name] for name in expected.OBJECTS} == expected.OBJECTS
    assert values["state.typed"] == expected.TUPLE_AND_BIG_INT


def test_what_the_generator_writes_today_still_follows_the_page(tmp_path: Path) -> None:
    generate.generate(tmp_path)
    for name, entry in spec_parser.parse(tmp_path / "v1").entries.items():
        if entry.dtype != expected.OBJECT:
            assert (entry.dtype, entry.shape, entry.data) == expected.entries()[name]


@pytest.mark.parametrize("name", ["COMPLETE", "MANIFEST", "model-00000.shard", "model-00000.1.shard", "state-00001.shard"])
def test_the_parser_finds_damage_anywhere(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "v1"
    shutil.copytree(V1, copy)
    data = bytearray((copy / name).read_bytes())
    for position in {0, 100 % len(data), len(data) // 2, len(data) - 70, len(data) - 1}:
        data[position] ^= 4
        (copy / name).write_bytes(data)
        with pytest.raises(spec_parser.SpecError):
            spec_parser.parse(copy)
        data[position] ^= 4
