"""Checkpoints made by an enemy, all digests right: a typed error, bounded memory, nothing outside the directory, nothing executed."""

from __future__ import annotations

import builtins
import hashlib
import pickle
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from support.damage import copy_of, document_of, forge, forge_block, replace_manifest
from support.engine import load, refused, save
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcp_engine import ReshardLoadPlanner, ShardReader, verify_checkpoint
from dcp_engine.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpEngineError, LimitExceededError, UntrustedDataError
from dcp_engine.storage.columns import pack_column, pack_document, pack_texts, unpack_column
from dcp_engine.storage.envelope import MANIFEST_MAGIC, encode_marker, pack_record, parse_marker
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.manifest import Manifest

MEMORY_BYTES = 64 << 20
"""What reading a checkpoint of a few kilobytes may take at most, whatever it claims."""
OBJECT_BYTES = 3000
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors in blocks of their own, two small ones in one, an object of some length, and a tie."""
    place = tmp_path_factory.mktemp("hostile") / "a"
    big = torch.arange(40_000, dtype=torch.int64) // 5
    state = {
        "model": {"w": big, "tied": big, "v": torch.randn(30_000), "s": torch.ones(3, 5), "t": torch.zeros(4)},
        "optimizer": {"o": bytes(range(250)) * (OBJECT_BYTES // 250)},
    }
    save(state, place)
    return place


def template() -> dict[str, Any]:
    tied = torch.zeros(40_000, dtype=torch.int64)
    return {
        "model": {"w": tied, "tied": tied, "v": torch.zeros(30_000), "s": torch.zeros(3, 5), "t": torch.zeros(4)},
        "optimizer": {"o": b""},
    }


@contextmanager
def bounded(memory_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Python's and numpy's memory stays within the bound, and the process's address space is not touched beyond it either."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < memory_bytes
    finally:
        tracemalloc.stop()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < memory_bytes


def outcomes(path: Path) -> list[DcpEngineError]:
    """What every way to read the checkpoint says; each must refuse, with an error of ours."""
    found = []
    with bounded():
        try:
            faults = verify_checkpoint(path, threads=1).faults
            found += list(faults[:1])
        except DcpEngineError as error:
            found.append(error)
        found.append(refused(load, template(), path))
        found.append(refused(load, {}, path, planner=ReshardLoadPlanner(build_from_metadata=True)))
    return found


# -- the manifest --------------------------------------------------------------------------------------------------------


def column(name: str, dtype: str, change: Callable[[np.ndarray], Any]) -> Change:
    """Changes one column: in place, or to what ``change`` returns."""

    def apply(document: dict[str, Any]) -> None:
        values = unpack_column(document[name], dtype, what=name, max_rows=1 << 25).copy()
        changed = change(values)
        document[name] = pack_column(values if changed is None else changed, dtype)

    return apply


def files(*names: str) -> Change:
    def apply(document: dict[str, Any]) -> None:
        document["file_names"], document["file_name_bytes"] = pack_texts(names)

    return apply


def entries(change: Callable[[list[str]], list[str]]) -> Change:
    def apply(document: dict[str, Any]) -> None:
        lengths = unpack_column(document["entry_name_bytes"], "<u4", what="", max_rows=1 << 22).tolist()
        data, names = document["entry_names"].decode(), []
        for length in lengths:
            names.append(data[:length])
            data = data[length:]
        document["entry_names"], document["entry_name_bytes"] = pack_texts(change(names))

    return apply


def field(name: str, value: Any) -> Change:
    def apply(document: dict[str, Any]) -> None:
        assert name in document
        document[name] = value

    return apply


def set_first(value: int) -> Callable[[np.ndarray], None]:
    def apply(values: np.ndarray) -> None:
        values[0] = value

    return apply


MANIFESTS: dict[str, Change] = {
    "a file above": files("../a-00000.shard", "optimizer-00000.shard"),
    "a file below": files("model/x-00000.shard", "optimizer-00000.shard"),
    "an absolute file": files("/etc/passwd", "optimizer-00000.shard"),
    "a device": files("/dev/zero", "optimizer-00000.shard"),
    "a file of nobody": files("", "optimizer-00000.shard"),
    "a dot": files(".", "optimizer-00000.shard"),
    "a name with a zero": files("model-00000.shard\0", "optimizer-00000.shard"),
    "a name with a line end": files("model-00000.shard\n", "optimizer-00000.shard"),
    "one file twice": files("model-00000.shard", "model-00000.shard"),
    "another rank's file": files("model-00001.shard", "optimizer-00000.shard"),
    "the marker as a shard": files("COMPLETE", "optimizer-00000.shard"),
    "two entries of one name": entries(lambda names: [names[0], names[0], *names[2:]]),
    "an endless name": entries(lambda names: ["x" * 100_000, *names[1:]]),
    "an empty shape column": field("entry_shapes", b""),
    "an unknown dtype": column("entry_dtypes", "u1", set_first(250)),
    "no dtype": column("entry_dtypes", "u1", set_first(0)),
    "a tensor as an object": column("entry_dtypes", "u1", set_first(254)),
    "an object as a tensor": column("entry_dtypes", "u1", lambda values: np.where(values == 254, 18, values)),
    "another item size": column("entry_dtypes", "u1", set_first(34)),
    "a huge shape": column("entry_shapes", "<i8", set_first(1 << 60)),
    "a negative shape": column("entry_shapes", "<i8", set_first(-1)),
    "a larger shape": column("entry_shapes", "<i8", lambda values: values + 1),
    "a huge chunk": column("chunk_sizes", "<i8", set_first(1 << 55)),
    "a negative chunk": column("chunk_sizes", "<i8", set_first(-40_000)),
    "huge shape and chunk": lambda document: (
        column("entry_shapes", "<i8", lambda values: np.where(values == 40_000, 1 << 50, values))(document),
        column("chunk_sizes", "<i8", lambda values: np.where(values == 40_000, 1 << 50, values))(document),
    )[0],
    "a chunk elsewhere": column("chunk_offsets", "<i8", set_first(1)),
    "a chunk before the start": column("chunk_offsets", "<i8", set_first(-1)),
    "a chunk that wraps around": column("chunk_offsets", "<i8", set_first((1 << 63) - 1)),
    "a chunk of nothing": column("chunk_entries", "<u4", set_first(1_000_000)),
    "a chunk of another entry": column("chunk_entries", "<u4", lambda values: values[::-1].copy()),
    "overlapping chunks": column("chunk_entries", "<u4", lambda values: np.zeros_like(values)),
    "blocks that save more than they have": column("block_saved", "<u4", set_first((1 << 32) - 1)),
    "blocks that save nothing": column("block_saved", "<u4", lambda values: values * 0),
    "an unknown codec": column("block_codecs", "u1", set_first(77)),
    "another codec": column("block_codecs", "u1", lambda values: 3 - values),
    "fewer blocks": column("block_codecs", "u1", lambda values: values[:-1]),
    "more blocks": column("block_codecs", "u1", lambda values: np.repeat(values, 1000)),
    "more chunks than the file has": column("file_chunks", "<u4", lambda values: values + 1),
    "a huge footer": column("file_footer_bytes", "<u4", set_first((1 << 32) - 1)),
    "a huge world": field("world_size", 1 << 40),
    "a tie to itself": field("alias_names", b"model.w" + b"x" * 3),
    "a tie to nothing": column("alias_targets", "<u4", set_first(1 << 31)),
    "no nonce": field("nonce", b""),
    "another nonce": field("nonce", b"\1" * 16),
    "another step": field("step", -1),
    "planner data that is no object": field("planner_data", b"\xc1"),
    "planner data that is a pickle": field("planner_data", pickle.dumps({"a": 1})),
    "planner data that is a number": field("planner_data", b"\x07"),
    "deep planner data": field("planner_data", b"\x91" * 100_000 + b"\xc0"),
    "a bomb of planner data": field("planner_data", b"\xdd\xff\xff\xff\xff" * 50),
    "a skeleton that is no object": field("skeleton", b"\xc1"),
    "a skeleton of nothing": field("skeleton", b"\xc0"),
    "a deep skeleton": field("skeleton", b"\x91" * 100_000 + b"\xc0"),
    "metadata that is no object": field("metadata", b"\xc1"),
    "metadata that is a list": field("metadata", b"\x90"),
    "metadata of another kind within": field("metadata", b"\x81\xa4user\x07"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_a_typed_error(checkpoint: Path, tmp_path: Path, name: str) -> None:
    path = copy_of(checkpoint, tmp_path / "a")
    forge(path, MANIFESTS[name])
    with bounded():
        errors = []
        for read in (
            lambda: verify_checkpoint(path, threads=1).raise_if_bad(),
            lambda: load(template(), path),
            lambda: load({}, path, planner=ReshardLoadPlanner(build_from_metadata=True)),
        ):
            try:
                read()
            except BaseException as error:
                failure = getattr(error, "failures", {0: (error,)})[0][0]
                assert isinstance(failure, DcpEngineError), repr(failure)
                errors.append(failure)
    assert errors, "nobody refused"


def test_a_manifest_that_unpacks_to_gigabytes_is_refused_unread(checkpoint: Path, tmp_path: Path) -> None:
    """Zstandard makes 2 GiB of zeros into 200 KB: the declared length is judged first, and a false one is caught by the frame's."""
    path = copy_of(checkpoint, tmp_path / "a")
    compressor = zstandard.ZstdCompressor().compressobj(size=2 << 30)
    zeros = b"\0" * (1 << 20)
    bomb = b"".join(compressor.compress(zeros) for _ in range(2048)) + compressor.flush()
    small, _ = pack_record(MANIFEST_MAGIC, b"\0" * 100)
    for claimed in (2 << 30, 1 << 20, 100, 1 << 62):
        record = struct.pack("<8sIIQQ32s", MANIFEST_MAGIC, 1, 0, len(bomb), claimed, hashlib.sha256(bomb).digest())
        assert len(record) == len(small)
        replace_manifest(path, record + bomb)
        for error in outcomes(path):
            assert isinstance(error, LimitExceededError | CorruptCheckpointError)
            assert error.file == "MANIFEST"


def test_a_manifest_of_kilobytes_that_stands_for_millions_of_rows_is_refused_before_they_take_memory(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Columns of zeros compress a thousandfold, and a row takes fifty times in memory what it takes in its column."""
    path = copy_of(checkpoint, tmp_path / "a")
    rows = 1_000_000
    document = document_of(path)
    document["entry_names"], document["entry_name_bytes"] = b"w", struct.pack("<I", 1)
    document.update(entry_dtypes=b"\2", entry_dims=b"\0", entry_shapes=b"", chunk_offsets=b"", chunk_sizes=b"")
    document.update(chunk_entries=bytes(4 * rows), chunk_begins=bytes(rows))
    replace_manifest(path, b"".join(pack_record(MANIFEST_MAGIC, pack_document(document))))
    assert (path / "MANIFEST").stat().st_size < 10_000
    for error in outcomes(path):
        assert isinstance(error, LimitExceededError)
        assert (error.file, error.message) == ("MANIFEST", "too many rows for the length of the manifest")


@pytest.mark.parametrize("value", [0, 63, 1 << 40, (1 << 62)])
def test_a_marker_with_an_impossible_manifest_size_is_refused(checkpoint: Path, tmp_path: Path, value: int) -> None:
    path = copy_of(checkpoint, tmp_path / "a")
    marker = parse_marker((path / "COMPLETE").read_bytes())
    (path / "COMPLETE").write_bytes(encode_marker(type(marker)(marker.nonce, ".", value, marker.manifest_sha256)))
    for error in outcomes(path):
        assert isinstance(error, CorruptCheckpointError)
        assert error.file in ("COMPLETE", "MANIFEST")


def test_a_marker_never_leads_out_of_the_directory(checkpoint: Path, tmp_path: Path) -> None:
    path = copy_of(checkpoint, tmp_path / "a")
    marker = parse_marker((path / "COMPLETE").read_bytes())
    copy_of(checkpoint, tmp_path / marker.nonce)
    text = (path / "COMPLETE").read_bytes()
    for data in (b"..", b"../" + marker.nonce.encode(), b"/tmp", marker.nonce.encode(), b"", b"./."):
        body = text[: text.index(b"check ")].replace(b"data .\n", b"data " + data + b"\n")
        (path / "COMPLETE").write_bytes(body + b"check " + hashlib.sha256(body).hexdigest().encode() + b"\n")
        for error in outcomes(path):
            assert isinstance(error, CorruptCheckpointError | CheckpointNotFoundError)
    (path / marker.nonce).symlink_to(tmp_path / marker.nonce)
    body = text[: text.index(b"check ")].replace(b"data .\n", b"data " + marker.nonce.encode() + b"\n")
    (path / "COMPLETE").write_bytes(body + b"check " + hashlib.sha256(body).hexdigest().encode() + b"\n")
    for error in outcomes(path):
        assert isinstance(error, CorruptCheckpointError)


# -- blocks and objects --------------------------------------------------------------------------------------------------


def stored_bytes(path: Path, name: str) -> int:
    manifest = Manifest.decode((path / "MANIFEST").read_bytes())
    entry = manifest.entry_id(name)
    assert entry is not None
    return int(manifest.table.block_stored_bytes[manifest.chunk(int(manifest.entry(entry).chunks[0])).first_block])


def frame(declared: int, length: int, *, padding: bytes = b"\0") -> bytes:
    """A zstd frame that declares a content size; what follows is an RLE block that would fill memory, and noise."""
    head = b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", declared)
    block = struct.pack("<I", (131_072 << 3) | 2)[:3] + b"A"
    content = head + block * ((length - len(head)) // len(block))
    return content.ljust(length, padding)[:length]


@pytest.mark.parametrize("declared", [1 << 40, (1 << 64) - 1, 320_000, 0, 1])
@pytest.mark.parametrize("name", ["model.w", "model.v"])
def test_a_block_that_decodes_to_something_else_is_refused(checkpoint: Path, tmp_path: Path, name: str, declared: int) -> None:
    """``w`` is zstd, ``v`` planes: neither payload is believed."""
    path = copy_of(checkpoint, tmp_path / "a")
    forge_block(path, name, frame(declared, stored_bytes(path, name)))
    errors = outcomes(path)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, CorruptCheckpointError)
        assert error.tensor is not None
        assert error.tensor.startswith((name, "model.tied"))
        assert error.file == "model-00000.shard"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["model.w", "model.v"])
def test_noise_with_a_right_digest_is_refused_or_harmless(checkpoint: Path, tmp_path: Path, name: str, seed: int) -> None:
    """Noise may decode by chance where a plane is raw: to numbers. Where it is a frame it never does."""
    path = copy_of(checkpoint, tmp_path / "a")
    length = stored_bytes(path, name)
    noise = np.random.default_rng(seed).bytes(length)
    forge_block(path, name, noise)
    with bounded():
        error = refused(load, template(), path)
    assert isinstance(error, CorruptCheckpointError)


class Boom:
    def __reduce__(self) -> Any:
        return (eval, ("__import__('builtins').__dict__.__setitem__('dcp_engine_was_executed', True)",))


OBJECTS: dict[str, bytes] = {
    "a pickle": pickle.dumps(Boom()),
    "nested arrays": b"\x91" * (OBJECT_BYTES - 1) + b"\xc0",
    "nested maps": b"\x81\xa0" * (OBJECT_BYTES // 2 - 1) + b"\xc0",
    "nested map keys": b"\x81" * (OBJECT_BYTES - 1),
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "bytes of four billion": b"\xc6\xff\xff\xff\xff",
    "text of four billion": b"\xdb\xff\xff\xff\xff",
    "an extension of four billion": b"\xc9\xff\xff\xff\xff\x01",
    "arrays that each promise four billion": b"\xdd\xff\xff\xff\xff" * (OBJECT_BYTES // 5),
    "maps that each promise four billion": b"\xdf\xff\xff\xff\xff\x01" * (OBJECT_BYTES // 6),
    "an unknown extension": b"\xd4\x7f\x00",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "an endless array of an endless shape": b"\x95\xc7\x00\x1f\xa3<f4\x92\xce\xff\xff\xff\xff\xce\xff\xff\xff\xff\xa1C\xc4\x00",
    "a tensor of an endless shape": b"\x96\xc7\x00\x24\xa7float32\x91\xcf\x7f\xff\xff\xff\xff\xff\xff\xff\xc2\xc2\xc4\x00",
    "two values": b"\xc0\xc0",
    "nothing": b"",
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("planner", [ReshardLoadPlanner, DefaultLoadPlanner])
def test_a_hostile_object_is_a_typed_error_naming_the_key(checkpoint: Path, tmp_path: Path, name: str, planner: Any) -> None:
    path = copy_of(checkpoint, tmp_path / "a")
    forge_block(path, "optimizer.o", padded(OBJECTS[name], stored_bytes(path, "optimizer.o")))
    with bounded():
        error = refused(load, template(), path, planner=planner())
    assert isinstance(error, CorruptCheckpointError)
    assert error.tensor == "optimizer.o"
    assert not hasattr(builtins, "dcp_engine_was_executed")


def padded(payload: bytes, length: int) -> bytes:
    return (payload + b"\xc1" * length)[:length]


def test_an_object_relabelled_as_opaque_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    path = copy_of(checkpoint, tmp_path / "a")
    forge_block(path, "optimizer.o", padded(pickle.dumps(Boom()), stored_bytes(path, "optimizer.o")))
    forge(path, column("entry_dtypes", "u1", lambda values: np.where(values == 254, 255, values)))
    for planner in (ReshardLoadPlanner(), DefaultLoadPlanner(), ReshardLoadPlanner(build_from_metadata=True)):
        state = {} if planner.__class__ is ReshardLoadPlanner and planner._builds else template()
        error = refused(load, state, path, planner=planner)
        assert isinstance(error, UntrustedDataError)
        assert error.tensor == "optimizer.o"
    assert not hasattr(builtins, "dcp_engine_was_executed")


# -- claims of memory ----------------------------------------------------------------------------------------------------


def inflated(checkpoint: Path, name: str, times: int) -> None:
    """Make the last block of the one entry that a file has count ``times`` over, in the file and in all that describes it: sound in every
    respect, but of a size that no machine has.
    """
    manifest = Manifest.decode((checkpoint / "MANIFEST").read_bytes())
    entry = manifest.entry_id(name)
    assert entry is not None
    chunk = manifest.chunk(int(manifest.entry(entry).chunks[0]))
    assert chunk.num_blocks == 1
    assert len(manifest.files) == 1
    path = checkpoint / manifest.files[0].name
    content = path.read_bytes()
    begin, end = int(manifest.block_position[chunk.first_block]), manifest.footer_position(0)
    path.write_bytes(content[:begin] + content[begin:end] * times + content[end:])

    def scaled(values: np.ndarray) -> np.ndarray:
        return values * times

    def repeated(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, times)

    def change(document: dict[str, Any]) -> None:
        for field_name, dtype, how in (
            ("entry_shapes", "<i8", scaled),
            ("chunk_sizes", "<i8", scaled),
            ("file_blocks", "<u4", scaled),
            ("block_saved", "<u4", repeated),
            ("block_codecs", "u1", repeated),
            ("block_digests", "<u8", repeated),
        ):
            column(field_name, dtype, how)(document)

    forge(checkpoint, change)


@pytest.mark.parametrize("value", [torch.zeros(BLOCK_BYTES, dtype=torch.uint8), "one object of that length"])
def test_a_sound_checkpoint_of_terabytes_is_refused_before_memory_is_filled(tmp_path: Path, value: Any) -> None:
    """A few megabytes of zstd can say so much. Who brings a template has said what to expect; without one it is judged here."""
    length = BLOCK_BYTES
    save({"model": {"w": value if isinstance(value, torch.Tensor) else "A" * (length - 5)}}, tmp_path / "a", codec="zstd")
    times = (4 << 40) // length
    inflated(tmp_path / "a", "model.w", times)
    metadata = ShardReader(tmp_path / "a").read_metadata()
    if isinstance(value, torch.Tensor):
        assert tuple(metadata.state_dict_metadata["model.w"].size) == (4 << 40,)
    with bounded(512 << 20):
        error = refused(load, {}, tmp_path / "a", planner=ReshardLoadPlanner(build_from_metadata=True))
        assert isinstance(error, LimitExceededError)
        assert error.tensor == "model.w"
        if not isinstance(value, torch.Tensor):
            error = refused(load, {"model": {"w": ""}}, tmp_path / "a")
            assert isinstance(error, LimitExceededError)
            assert error.tensor == "model.w"
