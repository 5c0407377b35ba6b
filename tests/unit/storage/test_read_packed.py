"""Small chunks go from their block to the memory that is named for each, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.shards import Target, manifest_of, options, source_of, write

from dcp_engine.errors import DigestMismatchError
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.dcp_metadata import metadata_of_manifest
from dcp_engine.storage.limits import HEADER_BYTES, PACK_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.read_packed import PackedReads
from dcp_engine.storage.read_pipeline import read_chunks
from dcp_engine.storage.records import ReadRequest
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.stored_tensors import WholeReads


def packed_of(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> PackedReads:
    stored = metadata_of_manifest(manifest, path="p", manifest_sha256="").stored_tensors
    rows = np.array([stored.rows[name] for name in tensors], dtype=np.int64)
    addresses = np.array([tensor.data_ptr() for tensor in tensors.values()], dtype=np.int64)
    return PackedReads(manifest, WholeReads(stored, rows, list(tensors.values()), addresses))


def read(directory: Path, manifest: Manifest, requests: list[ReadRequest], packed: PackedReads) -> None:
    with WorkerPool(2) as pool:
        opener = LocalDirectory(str(directory)).open
        read_chunks(manifest, opener, requests, packed=packed, options=options(), pool=pool, path=str(directory))


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_chunks_of_several_blocks_arrive_between_untouched_neighbours(tmp_path: Path, codec: str) -> None:
    """300 chunks of 40,000 bytes fill three blocks; the memory of each lies between guards."""
    values = {f"t{number}": torch.arange(10_000, dtype=torch.int32) + number for number in range(300)}
    manifest = manifest_of(write(tmp_path, [source_of(name, value) for name, value in values.items()], options(codec=codec)))
    assert len(manifest.table.block_codecs) == 3
    memory = torch.full((300, 10_002), -7, dtype=torch.int32)
    targets = {f"t{number}": memory[number, 1:-1] for number in reversed(range(300))}
    read(tmp_path, manifest, [], packed_of(manifest, targets))
    assert torch.equal(memory[:, 1:-1], torch.stack(list(values.values())))
    assert set(memory[:, 0].tolist()) == set(memory[:, -1].tolist()) == {-7}


def test_a_block_serves_packed_reads_and_requests_alike(tmp_path: Path) -> None:
    values = {name: torch.arange(6, dtype=torch.int64) * factor for factor, name in enumerate("abcd", start=1)}
    manifest = manifest_of(write(tmp_path, [source_of(name, value) for name, value in values.items()], options()))
    packed = {"b": torch.zeros(6, dtype=torch.int64), "d": torch.zeros(6, dtype=torch.int64)}
    whole, part = Target(np.zeros(6, np.int64)), Target(np.zeros(2, np.int64))
    read(tmp_path, manifest, [whole.request(manifest, "a"), part.request(manifest, "c", (3,))], packed_of(manifest, packed))
    assert packed["b"].tolist() == [0, 2, 4, 6, 8, 10]
    assert packed["d"].tolist() == [0, 4, 8, 12, 16, 20]
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
    targets = {"b": torch.zeros(6)}
    with pytest.raises(DigestMismatchError) as caught:
        read(tmp_path, manifest, [], packed_of(manifest, targets))
    assert (caught.value.file, caught.value.tensor) == (shard.name, "b")
    assert targets["b"].tolist() == [0] * 6


def test_only_tensors_of_one_small_chunk_count_as_packed(tmp_path: Path) -> None:
    sources = [
        source_of("small", torch.zeros(3)),
        source_of("large", torch.zeros(PACK_BYTES // 4)),
        source_of("below", torch.zeros(PACK_BYTES // 4 - 1)),
        source_of("split", torch.zeros(2), shape=(4,), offsets=(0,)),
        source_of("split", torch.zeros(2), shape=(4,), offsets=(2,)),
    ]
    manifest = manifest_of(write(tmp_path, sources, options()), empty=[("none", 18, (0, 2))])
    stored = metadata_of_manifest(manifest, path="p", manifest_sha256="").stored_tensors
    assert {name: stored.is_packed[row] for name, row in stored.rows.items()} == {
        "small": True,
        "large": False,
        "below": True,
        "split": False,
        "none": False,
    }
    assert {name: stored.shapes[row] for name, row in stored.rows.items() if stored.is_packed[row]} == {"small": (3,), "below": (16383,)}
    assert set(stored.dtypes) == {torch.float32}
    assert stored.num_bytes[stored.rows["small"]] == 12
