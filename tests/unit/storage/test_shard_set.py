"""How a rank shares its chunks among files, and what is left when one of them fails."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.shards import NONCE, Target, manifest_of, options, read

from dcp_engine.errors import StorageFullError
from dcp_engine.storage import shard_set
from dcp_engine.storage.backends.local import LocalDirectory, LocalWriteFile
from dcp_engine.storage.dtypes import of_code
from dcp_engine.storage.records import ChunkSource
from dcp_engine.storage.shard_set import STRIPE_BYTES, Writer, stripes_of, write_shards

WRITER = Writer(rank=0, world_size=1, nonce=NONCE)
UINT8 = of_code(2)


def source(name: str, nbytes: int) -> ChunkSource:
    def load() -> np.ndarray:
        return np.full(nbytes, len(name) + nbytes % 251, np.uint8)

    return ChunkSource(name, UINT8, (nbytes,), (0,), (nbytes,), nbytes, load)


@pytest.mark.parametrize(
    ("component", "sizes", "num_threads", "expected"),
    [
        ("model", [STRIPE_BYTES] * 4, 2, {"model": [0, 2], "model__1": [1, 3]}),
        ("model", [STRIPE_BYTES] * 4, 1, {"model": [0, 1, 2, 3]}),
        ("model", [STRIPE_BYTES // 4] * 4, 8, {"model": [0, 1, 2, 3]}),
        ("model", [STRIPE_BYTES] * 9, 64, {"model": [0, 4, 8], "model__1": [1, 5], "model__2": [2, 6], "model__3": [3, 7]}),
        ("model", [3 * STRIPE_BYTES, STRIPE_BYTES, STRIPE_BYTES, 0], 2, {"model": [0], "model__1": [1, 2, 3]}),
        ("model", [9 * STRIPE_BYTES], 4, {"model": [0]}),
        ("m" * 30, [STRIPE_BYTES] * 4, 2, {"m" * 30: [0, 1, 2, 3]}),
        ("m" * 29, [STRIPE_BYTES] * 2, 2, {"m" * 29: [0], "m" * 29 + "__1": [1]}),
    ],
)
def test_a_component_is_shared_equally_among_few_files(
    component: str, sizes: list[int], num_threads: int, expected: dict[str, list[int]]
) -> None:
    sources = [source(f"t{index}", nbytes) for index, nbytes in enumerate(sizes)]
    stripes = stripes_of(component, sources, num_threads)
    assert {name: [sources.index(chunk) for chunk in stripe] for name, stripe in stripes.items()} == expected


def test_a_striped_component_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_set, "STRIPE_BYTES", 1 << 20)
    sources = [source(f"t{index}", 700_000 + index) for index in range(8)] + [source("empty", 0), source("small", 5)]
    receipts = write_shards(LocalDirectory(str(tmp_path)), {"model": sources, "state": [source("s", 9)]}, WRITER, options())
    manifest = manifest_of(*receipts)

    assert sorted(os.listdir(tmp_path)) == ["model-00000.shard", "model__1-00000.shard", "state-00000.shard"]
    stored = [chunk for chunk in sources if chunk.nbytes]
    targets = [Target(np.zeros(chunk.nbytes, np.uint8)) for chunk in stored]
    read(tmp_path, manifest, [target.request(manifest, chunk.name) for target, chunk in zip(targets, stored, strict=True)], options())
    for target, chunk in zip(targets, stored, strict=True):
        assert target.array.tobytes() == chunk.load().tobytes()


def test_when_one_file_fails_no_descriptor_and_no_file_of_the_component_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_set, "STRIPE_BYTES", 1 << 20)
    genuine = LocalWriteFile.write_at

    def full(self: LocalWriteFile, position: int, parts: list[memoryview]) -> None:
        if self._name.startswith("model__1") and position > 4096:
            raise StorageFullError("no space", file=self._name)
        genuine(self, position, parts)

    monkeypatch.setattr(LocalWriteFile, "write_at", full)
    with pytest.raises(StorageFullError, match="no space"):
        write_shards(LocalDirectory(str(tmp_path)), {"model": [source(f"t{index}", 900_000) for index in range(6)]}, WRITER, options())
    assert os.listdir(tmp_path) == []
    # Only those of this test: what other tests left to the collector may be closed at any moment.
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []
