"""How a rank shares its chunks among files, and what is left when one of them fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shards import NONCE, Target, manifest_of, options, read

from dcp_engine.errors import StorageFullError
from dcp_engine.storage import shard_set, write_pipeline
from dcp_engine.storage.backends.local import LocalDirectory, LocalWriteFile
from dcp_engine.storage.dtypes import of_code
from dcp_engine.storage.limits import BLOCK_BYTES
from dcp_engine.storage.records import ChunkSource
from dcp_engine.storage.shard_set import STRIPE_BYTES, Writer, stripes_of, write_shards

WRITER = Writer(rank=0, world_size=1, nonce=NONCE)
UINT8 = of_code(2)


def source(name: str, nbytes: int) -> ChunkSource:
    def load() -> np.ndarray:
        return np.full(nbytes, len(name) + nbytes % 251, np.uint8)

    return ChunkSource(name, UINT8, (nbytes,), (0,), (nbytes,), nbytes, load)


@pytest.mark.parametrize(
    ("sizes", "num_threads", "expected"),
    [
        ([STRIPE_BYTES] * 4, 2, [[0, 2], [1, 3]]),
        ([STRIPE_BYTES] * 4, 1, [[0, 1, 2, 3]]),
        ([STRIPE_BYTES // 4] * 4, 8, [[0, 1, 2, 3]]),
        ([STRIPE_BYTES] * 9, 64, [[0, 4, 8], [1, 5], [2, 6], [3, 7]]),
        ([3 * STRIPE_BYTES, STRIPE_BYTES, STRIPE_BYTES, 0], 2, [[0, 3], [1, 2]]),
        ([9 * STRIPE_BYTES, 0, 0], 4, [[0, 1, 2]]),
    ],
)
def test_a_component_is_shared_equally_among_few_files(sizes: list[int], num_threads: int, expected: list[list[int]]) -> None:
    sources = [source(f"t{index}", nbytes) for index, nbytes in enumerate(sizes)]
    assert [[sources.index(chunk) for chunk in stripe] for stripe in stripes_of(sources, num_threads)] == expected


def test_a_striped_component_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_set, "STRIPE_BYTES", 1 << 20)
    sources = [source(f"t{index}", 700_000 + index) for index in range(8)] + [source("empty", 0), source("small", 5)]
    receipts = write_shards(LocalDirectory(str(tmp_path)), {"model": sources, "state": [source("s", 9)]}, WRITER, options())
    manifest = manifest_of(*receipts)

    assert sorted(os.listdir(tmp_path)) == ["model-00000.1.shard", "model-00000.shard", "state-00000.shard"]
    stored = [chunk for chunk in sources if chunk.nbytes]
    targets = [Target(np.zeros(chunk.nbytes, np.uint8)) for chunk in stored]
    read(tmp_path, manifest, [target.request(manifest, chunk.name) for target, chunk in zip(targets, stored, strict=True)], options())
    for target, chunk in zip(targets, stored, strict=True):
        assert target.array.tobytes() == chunk.load().tobytes()


def test_when_one_file_fails_it_is_removed_and_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_set, "STRIPE_BYTES", 1 << 20)
    genuine = LocalWriteFile.write_pieces

    def full(self: LocalWriteFile, position: int, *rest: Any) -> None:
        if self._name == "model-00000.1.shard":
            raise StorageFullError("no space", file=self._name)
        genuine(self, position, *rest)

    monkeypatch.setattr(LocalWriteFile, "write_pieces", full)
    with pytest.raises(StorageFullError, match="no space"):
        write_shards(LocalDirectory(str(tmp_path)), {"model": [source(f"t{index}", 900_000) for index in range(6)]}, WRITER, options())
    assert set(os.listdir(tmp_path)) <= {"model-00000.shard"}  # which may have been whole before
    # Only those of this test: what other tests left to the collector may be closed at any moment.
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []


def test_a_component_that_is_named_like_a_numbered_one_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_set, "STRIPE_BYTES", 1 << 20)
    by_component = {"model": [source(f"t{index}", 1 << 20) for index in range(2)], "model__1": [source("x", 9)]}
    write_shards(LocalDirectory(str(tmp_path)), by_component, WRITER, options())
    assert sorted(os.listdir(tmp_path)) == ["model-00000.1.shard", "model-00000.shard", "model__1-00000.shard"]


@pytest.mark.parametrize(("blocks_in_flight", "num_files"), [(1, 1), (3, 3), (4, 4), (100, 4)])
def test_each_file_of_a_component_has_room_for_a_block(
    blocks_in_flight: int, num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_set, "STRIPE_BYTES", 1 << 20)
    sources = [source(f"t{index}", 1 << 20) for index in range(8)]
    settings = options(threads=4, bytes_in_flight=blocks_in_flight * BLOCK_BYTES)
    write_shards(LocalDirectory(str(tmp_path)), {"model": sources}, WRITER, settings)
    assert len(os.listdir(tmp_path)) == num_files


def told(monkeypatch: pytest.MonkeyPatch, waiting: Callable[[int], bool]) -> tuple[list[ChunkSource], list[str]]:
    """Chunks for two files, some of which are loaded only once the workers were told to stop; and the names of those that were."""
    monkeypatch.setattr(shard_set, "STRIPE_BYTES", 1 << 20)
    stopped = threading.Event()
    loaded: list[str] = []
    genuine = write_pipeline._Schedule._stop

    def noted(self: Any, *args: Any) -> None:
        genuine(self, *args)
        stopped.set()

    def patient(number: int) -> ChunkSource:
        chunk = source(f"t{number}", 1 << 20)

        def load() -> np.ndarray:
            loaded.append(chunk.name)
            assert not waiting(number) or stopped.wait(60)
            return chunk.load()

        return replace(chunk, load=load)

    monkeypatch.setattr(write_pipeline._Schedule, "_stop", noted)
    return [patient(number) for number in range(64)], loaded


def test_after_a_failure_the_other_files_are_not_written_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, loaded = told(monkeypatch, lambda number: number % 2 == 1)

    def full(self: LocalWriteFile, *args: object) -> None:
        raise StorageFullError("no space", file=self._name)

    monkeypatch.setattr(LocalWriteFile, "write_pieces", full)
    with pytest.raises(StorageFullError, match="no space"):
        write_shards(LocalDirectory(str(tmp_path)), {"model": sources}, WRITER, options(threads=2))
    assert len(loaded) <= 2 * 16  # a batch of each
    assert os.listdir(tmp_path) == []


def test_an_interrupt_is_heeded_before_the_files_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, loaded = told(monkeypatch, lambda number: True)

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write_pipeline, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_shards(LocalDirectory(str(tmp_path)), {"model": sources}, WRITER, options(threads=2))
    assert len(loaded) <= 2 * 16
    assert os.listdir(tmp_path) == []
