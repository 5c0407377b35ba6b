"""When codec="auto" compresses: tables of figures, and a file whose storage is as fast as the test says."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from support.shards import NONCE, options, source_of, write_to

from dcp_engine.storage.codec_choice import Figures, compression_pays, is_over_target
from dcp_engine.storage.codec_gauge import CodecGauge, Work
from dcp_engine.storage.records import ShardReceipt
from dcp_engine.storage.shard_write import ShardSpec
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.storage.write_pipeline import write_files

GB = 1e9


@pytest.mark.parametrize(
    ("num_threads", "encode", "share", "copy", "storage", "expected"),
    [
        # memory: copying 2.5 GB/s a thread beats any codec
        (2, 0.7 * GB, 0.66, 2.5 * GB, math.inf, False),
        (8, 0.7 * GB, 0.01, 2.5 * GB, math.inf, False),
        # a disk of 1 GB/s, two threads: raw takes 1 s a GB, encoded max(1/1.4 + 0.66/5, 0.66)
        (2, 0.7 * GB, 0.66, 2.5 * GB, 1.0 * GB, True),
        # the same, one thread: max(1/0.7 + ..., ...) > 1
        (1, 0.7 * GB, 0.66, 2.5 * GB, 1.0 * GB, False),
        # a network file system of 0.2 GB/s: storage decides, and gets less
        (1, 0.7 * GB, 0.83, 2.5 * GB, 0.2 * GB, True),
        # nothing is won where nothing shrinks
        (8, 5.0 * GB, 1.0, 2.5 * GB, 0.2 * GB, False),
        # not measured yet, or cannot be: compress
        (2, 0.0, 1.0, 0.0, 0.0, True),
        (2, 0.7 * GB, 0.66, 2.5 * GB, 0.0, True),
        (2, 0.0, 1.0, 2.5 * GB, math.inf, True),
    ],
)
def test_compression_pays_where_the_slower_of_workers_and_storage_gains(
    num_threads: int, encode: float, share: float, copy: float, storage: float, expected: bool
) -> None:
    figures = Figures(
        num_threads=num_threads,
        encode_bytes_per_sec=encode,
        stored_share=share,
        copy_bytes_per_sec=copy,
        storage_bytes_per_sec=storage,
    )
    assert compression_pays(figures) is expected


@pytest.mark.parametrize(
    ("target", "raw_bytes", "stored_bytes", "expected"),
    [
        (None, 100, 100, False),
        (0.8, 100, 81, True),
        (0.8, 100, 80, False),
        (0.0, 100, 1, True),
        (1.0, 100, 100, False),
        (0.5, 0, 0, False),
    ],
)
def test_a_size_target_asks_for_more_while_the_file_is_larger(
    target: float | None, raw_bytes: int, stored_bytes: int, expected: bool
) -> None:
    assert is_over_target(target, raw_bytes, stored_bytes) is expected


class GaugedFile:
    """Takes everything, forgets it, and settles as slowly as told."""

    def __init__(self, settle_bytes_per_sec: float, *, settles: bool = True) -> None:
        self._rate = settle_bytes_per_sec
        self._settles = settles
        self._lock = threading.Lock()
        self.position = 0
        self.settled: list[tuple[int, int]] = []

    def write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        self.write_at(self.position, parts)

    def write_at(self, position: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        with self._lock:
            self.position = max(self.position, position + sum(map(len, parts)))

    def write_pieces(self, position: int, part: memoryview, seen: Callable[[memoryview], object]) -> None:
        self.write_at(position, [part])
        seen(part)

    def settle(self, start: int, num_bytes: int) -> bool:
        assert start + num_bytes <= self.position
        self.settled.append((start, num_bytes))
        time.sleep(num_bytes / self._rate)
        return self._settles

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass


def save(file: GaugedFile, size_target: float | None = None) -> ShardReceipt:
    torch.manual_seed(0)
    tensor = torch.randn(24 << 20)
    settings = dataclasses.replace(options(codec="auto", bytes_in_flight=16 << 20), size_target=size_target)
    with WorkerPool(2) as pool:
        return write_to(file, [source_of("t", tensor)], settings, pool)


def test_in_memory_auto_leaves_most_blocks_raw() -> None:
    file = GaugedFile(1e15)
    receipt = save(file)
    assert receipt.raw_bytes_by_codec["raw"] > receipt.raw_bytes // 2
    starts = [start for start, _ in file.settled]
    assert starts == sorted(starts)
    assert all(start + length == after for (start, length), after in zip(file.settled, starts[1:], strict=False))


def test_what_a_save_has_learnt_of_one_file_holds_for_the_next() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(12 << 20)
    files = {f"{name}-00000.shard": GaugedFile(1e15) for name in ("large", "next")}
    specs = [
        ShardSpec(component=name.split("-")[0], rank=0, world_size=1, nonce=NONCE, sources=[source_of("t", tensor[: len(tensor) // part])])
        for part, name in enumerate(files, start=1)
    ]
    with WorkerPool(1) as pool:
        settings = options(codec="auto", bytes_in_flight=64 << 20)
        receipts = write_files(specs, lambda name: files[name], settings, pool=pool, written=lambda file: None)

    assert receipts[0].raw_bytes_by_codec["planes"] > 0
    assert receipts[1].raw_bytes_by_codec == {"raw": receipts[1].raw_bytes}


def test_a_file_that_was_closed_too_early_to_be_measured_says_nothing_of_the_storage() -> None:
    with CodecGauge(2, None) as gauge:
        for settles in (True, False, True):
            file = GaugedFile(1e15, settles=settles)
            file.write([bytes(4096), bytes(8 << 20)])
            work = Work(raw_bytes=8 << 20, stored_bytes=8 << 20, encode_secs=1.0, written_bytes=8 << 20, write_secs=0.001)
            gauge.add(work, 8 << 20, 8 << 20, file, file.position)
            deadline = time.monotonic() + 60
            # A file that comes while another one is measured is not: each must wait for the end of the one before.
            while not file.settled or gauge.compresses() or gauge._settling is not None:
                assert time.monotonic() < deadline
            assert file.settled == [(4096, 8 << 20)]


def test_on_a_slow_storage_auto_compresses_all() -> None:
    receipt = save(GaugedFile(100e6))
    assert receipt.raw_bytes_by_codec == {"planes": receipt.raw_bytes}


def test_a_size_target_makes_auto_compress_in_memory_too() -> None:
    receipt = save(GaugedFile(1e15), size_target=0.0)
    assert receipt.raw_bytes_by_codec == {"planes": receipt.raw_bytes}
