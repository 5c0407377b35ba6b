"""Whole chunks go from their blocks to the memory that is named for each, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.shards import Target, manifest_of, options, source_of, write

from dcp_engine.errors import DigestMismatchError
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.dcp_metadata import metadata_of_manifest
from dcp_engine.storage.limits import BLOCK_BYTES, HEADER_BYTES, PACK_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.read_pipeline import read_chunks
from dcp_engine.storage.read_whole import WholeTargets
from dcp_engine.storage.records import ReadRequest
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.stored_tensors import WholeReads


def targets_of(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> WholeTargets:
    stored = metadata_of_manifest(manifest, path="p", manifest_sha256="").stored_tensors
    rows = np.array([stored.rows[name] for name in tensors], dtype=np.int64)
    addresses = np.array([tensor.data_ptr() for tensor in tensors.values()], dtype=np.int64)
    return WholeTargets(manifest, WholeReads(stored, rows, list(tensors.values()), addresses))


def read(directory: Path, manifest: Manifest, requests: list[ReadRequest], whole: WholeTargets) -> None:
    with WorkerPool(2) as pool:
        opener = LocalDirectory(str(directory)).open
        read_chunks(manifest, opener, requests, whole=whole, options=options(), pool=pool, path=str(directory))


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_chunks_of_several_blocks_arrive_between_untouched_neighbours(tmp_path: Path, codec: str) -> None:
    """300 chunks of 40,000 bytes fill three blocks; the memory of each lies between guards."""
    values = {f"t{number}": torch.arange(10_000, dtype=torch.int32) + number for number in range(300)}
    manifest = manifest_of(write(tmp_path, [source_of(name, value) for name, value in values.items()], options(codec=codec)))
    assert len(manifest.table.block_codecs) == 3
    memory = torch.full((300, 10_002), -7, dtype=torch.int32)
    targets = {f"t{number}": memory[number, 1:-1] for number in reversed(range(300))}
    read(tmp_path, manifest, [], targets_of(manifest, targets))
    assert torch.equal(memory[:, 1:-1], torch.stack(list(values.values())))
    assert set(memory[:, 0].tolist()) == set(memory[:, -1].tolist()) == {-7}


def test_a_shared_block_serves_whole_reads_and_requests_alike(tmp_path: Path) -> None:
    values = {name: torch.arange(6, dtype=torch.int64) * factor for factor, name in enumerate("abcd", start=1)}
    manifest = manifest_of(write(tmp_path, [source_of(name, value) for name, value in values.items()], options()))
    rest = {"b": torch.zeros(6, dtype=torch.int64), "d": torch.zeros(6, dtype=torch.int64)}
    whole, part = Target(np.zeros(6, np.int64)), Target(np.zeros(2, np.int64))
    read(tmp_path, manifest, [whole.request(manifest, "a"), part.request(manifest, "c", (3,))], targets_of(manifest, rest))
    assert rest["b"].tolist() == [0, 2, 4, 6, 8, 10]
    assert rest["d"].tolist() == [0, 4, 8, 12, 16, 20]
    assert whole.array.tolist() == [0, 1, 2, 3, 4, 5]
    assert part.array.tolist() == [9, 12]
    assert (whole.committed, part.committed) == (1, 1)


def test_damage_is_found_before_anything_is_copied(tmp_path: Path) -> None:
    values = {name: torch.ones(6) for name in "ab"}
    manifest = manifest_of(write(tmp_path, [source_of(name, value) for name, value in values.items()], options(codec="raw")))
    shard = tmp_path / manifest.files[0].name
    data = bytearray(shard.read_bytes())
    data[HEADER_BYTES] ^= 1
    shard.write_bytes(data)
    targets = {"b": torch.zeros(6), "a": torch.zeros(6)}
    with pytest.raises(DigestMismatchError) as caught:
        read(tmp_path, manifest, [], targets_of(manifest, targets))
    assert (caught.value.file, caught.value.tensor) == (shard.name, "b")
    assert [target.tolist() for target in targets.values()] == [[0] * 6, [0] * 6]


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_chunk_of_several_blocks_arrives_between_untouched_neighbours(tmp_path: Path, codec: str) -> None:
    """Two blocks and 12 bytes of a third, which ends in padding; beside it chunks with a block of their own, one without padding."""
    values = {
        name: torch.arange(size, dtype=torch.float32) / 7 for name, size in (("l", 2 * BLOCK_BYTES // 4 + 3), ("m", 20_000), ("n", 16_384))
    }
    manifest = manifest_of(write(tmp_path, [source_of(name, value) for name, value in values.items()], options(codec=codec)))
    assert len(manifest.table.block_codecs) == 5
    memory = {name: torch.full((len(value) + 2,), -7.0) for name, value in values.items()}
    read(tmp_path, manifest, [], targets_of(manifest, {name: held[1:-1] for name, held in memory.items()}))
    for name, held in memory.items():
        assert torch.equal(held[1:-1], values[name])
        assert (held[0], held[-1]) == (-7, -7)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_blocks_of_one_chunk_serve_a_whole_read_and_a_request_alike(tmp_path: Path, codec: str) -> None:
    value = torch.arange(2 * BLOCK_BYTES // 4 + 3, dtype=torch.int32)
    manifest = manifest_of(write(tmp_path, [source_of("a", value)], options(codec=codec)))
    memory = torch.zeros(len(value) + 2, dtype=torch.int32)
    part = Target(np.zeros(4, np.int32))
    begin = BLOCK_BYTES // 4 - 2
    read(tmp_path, manifest, [part.request(manifest, "a", (begin,))], targets_of(manifest, {"a": memory[1:-1]}))
    assert torch.equal(memory[1:-1], value)
    assert (memory[0], memory[-1]) == (0, 0)
    assert part.array.tolist() == [begin, begin + 1, begin + 2, begin + 3]


def test_damage_of_a_large_chunk_names_file_tensor_and_block(tmp_path: Path) -> None:
    value = torch.ones(2 * BLOCK_BYTES // 4)
    manifest = manifest_of(write(tmp_path, [source_of("a", value)], options(codec="raw")))
    shard = tmp_path / manifest.files[0].name
    data = bytearray(shard.read_bytes())
    data[HEADER_BYTES + 2 * BLOCK_BYTES - 1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DigestMismatchError) as caught:
        read(tmp_path, manifest, [], targets_of(manifest, {"a": torch.zeros_like(value)}))
    assert (caught.value.file, caught.value.tensor) == (shard.name, "a")
    assert "block 1" in str(caught.value)


def test_only_tensors_of_one_chunk_count_as_whole(tmp_path: Path) -> None:
    sources = [
        source_of("small", torch.zeros(3)),
        source_of("large", torch.zeros(PACK_BYTES // 4)),
        source_of("below", torch.zeros(PACK_BYTES // 4 - 1)),
        source_of("split", torch.zeros(2), shape=(4,), offsets=(0,)),
        source_of("split", torch.zeros(2), shape=(4,), offsets=(2,)),
    ]
    manifest = manifest_of(write(tmp_path, sources, options()), empty=[("none", 18, (0, 2))])
    stored = metadata_of_manifest(manifest, path="p", manifest_sha256="").stored_tensors
    assert {name: stored.is_whole[row] for name, row in stored.rows.items()} == {
        "small": True,
        "large": True,
        "below": True,
        "split": False,
        "none": False,
    }
    assert {name: stored.shapes[row] for name, row in stored.rows.items() if stored.is_whole[row]} == {
        "small": (3,),
        "large": (16384,),
        "below": (16383,),
    }
    assert set(stored.dtypes) == {torch.float32}
    assert stored.num_bytes[stored.rows["small"]] == 12
