"""What the write pipeline puts into a file, in what order, with how much memory, and what an error leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import shards
from support.shards import NONCE, options, source_of, write

from dcp_engine.errors import PlanError, StorageFullError
from dcp_engine.storage.backends import WriteFile
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.codecs import RAW
from dcp_engine.storage.digest import XXH3
from dcp_engine.storage.dtypes import OBJECT
from dcp_engine.storage.envelope import FOOTER_MAGIC, open_body, parse_record
from dcp_engine.storage.footer import decode_footer
from dcp_engine.storage.limits import ALIGN_BYTES, BLOCK_BYTES, HEADER_BYTES, PACK_BYTES, RECORD_BYTES
from dcp_engine.storage.records import ChunkSource, ShardReceipt
from dcp_engine.storage.shard_write import ShardSpec
from dcp_engine.storage.table import ShardTable, merge_tables
from dcp_engine.storage.workers import WorkerPool
from dcp_engine.storage.write_pipeline import write_files

SHARD = "model-00000.shard"
BLOCK_ITEMS = BLOCK_BYTES // 4


def numbers(num_elements: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + num_elements, dtype=torch.int32)


def object_source(name: str, data: bytes) -> ChunkSource:
    array = np.frombuffer(data, np.uint8)
    return ChunkSource(name, OBJECT, (len(data),), (0,), (len(data),), len(data), lambda: array)


class MemoryFile:
    """Keeps what is written, and the calls; runs ``before`` first, so that a test can fail or look around in the middle."""

    def __init__(self, before: Callable[[int], None] = lambda call: None) -> None:
        self.data = bytearray()
        self.calls: list[int] = []
        self._before = before
        self._lock = threading.Lock()

    @property
    def position(self) -> int:
        return len(self.data)

    def write(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        self.write_at(len(self.data), parts)

    def write_at(self, position: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        with self._lock:
            self._before(len(self.calls))
            self.calls.append(len(parts))
            data = b"".join(parts)
            self.data.extend(bytes(max(0, position + len(data) - len(self.data))))
            self.data[position : position + len(data)] = data

    def write_pieces(self, position: int, part: memoryview, seen: Callable[[memoryview], object]) -> None:
        self.write_at(position, [part])
        seen(part)

    def settle(self, start: int, num_bytes: int) -> bool:
        return False

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass


def write_to(file: WriteFile, sources: Sequence[ChunkSource], pool: WorkerPool, **settings: Any) -> ShardReceipt:
    return shards.write_to(file, sources, options(**settings), pool)


def table_of(receipt: ShardReceipt) -> ShardTable:
    return merge_tables([receipt.table.unpack()])[0]


def test_large_chunks_come_first_then_small_ones_by_dtype(tmp_path: Path) -> None:
    sources = [
        source_of("tiny.a", numbers(3)),
        source_of("large", numbers(BLOCK_ITEMS + 5)),
        source_of("half", torch.ones(2, dtype=torch.float16)),
        source_of("medium", numbers(PACK_BYTES // 4)),
        source_of("scalar", torch.tensor(7, dtype=torch.int32)),
        source_of("tiny.b", numbers(2)),
    ]
    receipt = write(tmp_path, sources, options())
    table = table_of(receipt)
    places = {
        table.names[entry]: (int(first), int(count), int(offset))
        for entry, first, count, offset in zip(
            table.chunk_entries, table.chunk_first_block, table.chunk_num_blocks, table.chunk_block_offset, strict=True
        )
    }
    assert places == {
        "large": (0, 2, 0),
        "medium": (2, 1, 0),
        "tiny.a": (3, 1, 0),
        "scalar": (3, 1, 12),
        "tiny.b": (3, 1, 16),
        "half": (4, 1, 0),
    }
    assert table.block_raw_bytes.tolist() == [BLOCK_BYTES, 20, PACK_BYTES, 24, 4]


def test_the_bytes_of_a_raw_file_are_header_blocks_padding_footer(tmp_path: Path) -> None:
    large, small = numbers(BLOCK_ITEMS + 5, 100), numbers(3, 7)
    receipt = write(tmp_path, [source_of("large", large), source_of("small", small)], options())
    data = (tmp_path / SHARD).read_bytes()
    assert receipt.size_bytes == len(data)
    assert data[:8] == b"DCPESHRD"
    at = HEADER_BYTES
    assert data[at : at + BLOCK_BYTES + 20] == large.numpy().tobytes()
    at += BLOCK_BYTES + 20
    assert data[at : at + 44] == bytes(44)
    at += 44
    assert data[at : at + 12] == small.numpy().tobytes()
    assert data[at + 12 : at + ALIGN_BYTES] == bytes(52)
    at += ALIGN_BYTES
    assert data[-64:-56] == b"DCPEFOOT"
    assert hashlib.sha256(data[at:-64]).digest() == receipt.footer_sha256 == data[-32:]
    assert (receipt.raw_bytes, receipt.stored_bytes) == (BLOCK_BYTES + 32, BLOCK_BYTES + 32)
    assert table_of(receipt).block_digests.tolist() == [
        XXH3.of(large.numpy().tobytes()[:BLOCK_BYTES]),
        XXH3.of(large.numpy().tobytes()[BLOCK_BYTES:]),
        XXH3.of(small.numpy().tobytes()),
    ]


def test_the_footer_says_whose_file_it_is(tmp_path: Path) -> None:
    receipt = write(tmp_path, [source_of("a", numbers(4))], options(), component="optimizer", rank=3, world_size=5)
    data = (tmp_path / "optimizer-00003.shard").read_bytes()
    record = parse_record(data[-RECORD_BYTES:], FOOTER_MAGIC, file=receipt.name)
    footer = decode_footer(open_body(record, data[-RECORD_BYTES - record.stored_bytes : -RECORD_BYTES], file=receipt.name))
    assert footer.table.to_document() == table_of(receipt).to_document()
    assert footer.table.block_digests.tolist() == [XXH3.of(numbers(4).numpy().tobytes())]
    assert (footer.name, footer.rank, footer.world_size, footer.nonce) == ("optimizer-00003.shard", 3, 5, NONCE)
    assert (receipt.name, receipt.component, receipt.rank, receipt.nonce) == ("optimizer-00003.shard", "optimizer", 3, NONCE)


def test_fifty_thousand_tiny_tensors_take_one_block_and_a_handful_of_writes() -> None:
    file = MemoryFile()
    sources = [source_of(f"t{index}", torch.full((16,), index, dtype=torch.int32)) for index in range(50_000)]
    with WorkerPool(2) as pool:
        receipt = write_to(file, sources, pool)
    table = table_of(receipt)
    assert (len(table.chunk_entries), len(table.block_codecs)) == (50_000, 1)
    assert len(file.calls) <= 2 + 16 * 50_000 * 4 // (256 << 10) + 1
    assert np.frombuffer(file.data, np.int32, 16 * 50_000, HEADER_BYTES).reshape(-1, 16)[:, 3].tolist() == list(range(50_000))


def test_small_chunks_fill_blocks_up_to_the_limit(tmp_path: Path) -> None:
    per_block = BLOCK_BYTES // 60_000
    sources = [source_of(f"t{index}", numbers(15_000, index)) for index in range(per_block + 2)]
    table = table_of(write(tmp_path, sources, options()))
    assert table.block_raw_bytes.tolist() == [per_block * 60_000, 120_000]


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes", "auto"])
def test_nothing_to_write_is_a_valid_file(tmp_path: Path, codec: str) -> None:
    receipt = write(tmp_path, [], options(codec=codec))
    assert receipt.raw_bytes == receipt.stored_bytes == 0
    assert len(table_of(receipt).names) == 0


def test_empty_chunks_make_their_entry_known_and_store_nothing(tmp_path: Path) -> None:
    sources = [source_of("none", torch.empty(0, 5)), source_of("tail", torch.empty(0, 4), shape=(6, 4), offsets=(6, 0))]
    table = table_of(write(tmp_path, sources, options()))
    assert table.names == ["none", "tail"]
    assert [table.shape(0), table.shape(1)] == [(0, 5), (6, 4)]
    assert len(table.chunk_entries) == len(table.block_codecs) == 0


def test_objects_are_stored_as_bytes_of_their_own_kind(tmp_path: Path) -> None:
    sources = [object_source("o", b"abc"), source_of("t", torch.tensor([1, 2], dtype=torch.uint8))]
    table = table_of(write(tmp_path, sources, options()))
    assert table.entry_dtypes.tolist() == [254, 2]
    assert table.block_raw_bytes.tolist() == [3, 2]


def test_raw_blocks_of_contiguous_tensors_are_written_from_the_tensors_memory() -> None:
    tensor = numbers(3 * BLOCK_ITEMS)
    seen: dict[int, int] = {}

    class AddressFile(MemoryFile):
        def write_at(self, position: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
            super().write_at(position, parts)
            for part in parts:
                if HEADER_BYTES <= position < HEADER_BYTES + tensor.nbytes:
                    seen[position - HEADER_BYTES] = np.frombuffer(part, np.uint8).ctypes.data - tensor.data_ptr()
                position += len(part)

    with WorkerPool(2) as pool:
        write_to(AddressFile(), [source_of("a", tensor)], pool)
    assert len(seen) >= 3
    assert all(position == offset for position, offset in seen.items())


@pytest.mark.parametrize("codec", ["zstd", "auto"])
@pytest.mark.parametrize("threads", [1, 4])
def test_the_file_does_not_depend_on_threads_or_memory(codec: str, threads: int) -> None:
    torch.manual_seed(0)
    sources = [source_of(f"w{index}", torch.randn(300_000 + 40_000 * index)) for index in range(4)]
    sources += [source_of(f"s{index}", torch.randn(17)) for index in range(50)] + [source_of("z", torch.zeros(3 * BLOCK_ITEMS))]
    files = []
    for num_threads, bytes_in_flight in ((2, 256 << 20), (threads, BLOCK_BYTES)):
        file = MemoryFile()
        with WorkerPool(num_threads) as pool:
            write_to(file, sources, pool, codec=codec, bytes_in_flight=bytes_in_flight)
        files.append(bytes(file.data))
    assert files[0] == files[1]


def test_compressed_blocks_are_smaller_and_incompressible_ones_raw(tmp_path: Path) -> None:
    noise = torch.frombuffer(bytearray(os.urandom(BLOCK_BYTES)), dtype=torch.int32)
    receipt = write(tmp_path, [source_of("zeros", torch.zeros(BLOCK_ITEMS)), source_of("noise", noise)], options(codec="auto"))
    table = table_of(receipt)
    assert table.block_codecs[0] != RAW
    assert table.block_codecs[1] == RAW
    assert receipt.stored_bytes < BLOCK_BYTES * 1.1


class Loads:
    """Sources that count how many of the bytes that they handed out are still alive."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.alive = 0
        self.most = 0
        self.num_loads = 0

    def source(self, name: str, num_bytes: int) -> ChunkSource:
        source = source_of(name, torch.zeros(num_bytes, dtype=torch.uint8))

        def load() -> np.ndarray:
            array = np.random.default_rng(num_bytes).integers(0, 255, num_bytes, np.uint8)
            with self.lock:
                self.num_loads += 1
                self.alive += num_bytes
                self.most = max(self.most, self.alive)
            weakref.finalize(array, self._free, num_bytes)
            return array

        return dataclasses.replace(source, load=load)

    def _free(self, num_bytes: int) -> None:
        with self.lock:
            self.alive -= num_bytes


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("sizes", [[1 << 20] * 60, [9 << 20] * 6, [100_000] * 200, [9 << 20, 1 << 20, 70_000, 1000] * 5])
def test_bytes_in_flight_are_bounded(codec: str, sizes: list[int]) -> None:
    bound = 20 << 20
    loads = Loads()
    with WorkerPool(4) as pool:
        write_to(
            MemoryFile(),
            [loads.source(f"t{index}", size) for index, size in enumerate(sizes)],
            pool,
            codec=codec,
            bytes_in_flight=bound,
        )
    assert loads.num_loads == len(sizes)
    assert max(sizes) <= loads.most <= bound
    assert loads.alive == 0


def test_a_chunk_larger_than_the_bound_is_loaded_once_and_written() -> None:
    loads = Loads()
    file = MemoryFile()
    with WorkerPool(2) as pool:
        write_to(file, [loads.source("huge", 30 << 20), loads.source("next", 30 << 20)], pool, bytes_in_flight=BLOCK_BYTES)
    assert loads.num_loads == 2
    assert len(file.data) > 60 << 20


class Unexpected(BaseException):
    """Not an Exception, as DCP's CheckpointException is not."""


def failing(source: ChunkSource, error: BaseException) -> ChunkSource:
    def load() -> np.ndarray:
        raise error

    return dataclasses.replace(source, load=load)


@pytest.mark.parametrize("error", [ValueError("no tensor"), Unexpected("no tensor"), KeyboardInterrupt("no tensor")])
@pytest.mark.parametrize("num_elements", [4, 200_000, BLOCK_ITEMS + 10])
def test_an_error_of_load_reaches_the_caller_and_the_pool_stays_usable(tmp_path: Path, error: BaseException, num_elements: int) -> None:
    sources = [source_of(f"t{index}", numbers(num_elements)) for index in range(20)]
    sources[10] = failing(sources[10], error)
    file = LocalDirectory(str(tmp_path)).create(SHARD)
    with WorkerPool(2) as pool:
        with pytest.raises(type(error), match="no tensor"):
            write_to(file, sources, pool, codec="zstd")
        file.abort()
        assert list(tmp_path.iterdir()) == []
        again = MemoryFile()
        write_to(again, sources[:10], pool, codec="zstd")
        assert again.data[:8] == b"DCPESHRD"


def test_after_an_error_no_source_is_loaded_any_more() -> None:
    loads = Loads()
    sources = [loads.source(f"t{index}", 1 << 20) for index in range(200)]
    sources[0] = failing(sources[0], ValueError("first"))
    with WorkerPool(2) as pool:
        with pytest.raises(ValueError, match="first"):
            write_to(MemoryFile(), sources, pool)
        seen = loads.num_loads
        pool.submit(lambda: None).result(60)
        assert loads.num_loads == seen < 200


def test_an_error_of_the_file_reaches_the_caller_and_no_worker_goes_on() -> None:
    def full(call: int) -> None:
        if call == 3:
            raise StorageFullError("no space", file=SHARD)

    loads = Loads()
    with WorkerPool(2) as pool:
        with pytest.raises(StorageFullError, match="no space"):
            write_to(MemoryFile(full), [loads.source(f"t{index}", 4 << 20) for index in range(40)], pool)
        assert loads.num_loads < 40
        write_to(MemoryFile(), [loads.source("again", 1000)], pool)


def test_a_source_of_another_length_is_refused_by_name() -> None:
    good = [source_of(f"t{index}", numbers(4)) for index in range(3)]
    bad = dataclasses.replace(good[1], load=lambda: np.zeros(15, np.uint8))
    with WorkerPool(1) as pool, pytest.raises(PlanError, match="16 bytes") as caught:
        write_to(MemoryFile(), [good[0], bad, good[2]], pool)
    assert caught.value.tensor == "t1"


def spec_of(name: str, sources: Sequence[ChunkSource]) -> ShardSpec:
    return ShardSpec(component=name, rank=0, world_size=1, nonce=NONCE, sources=sources)


def write_many(specs: Sequence[ShardSpec], files: dict[str, Any], threads: int, **settings: Any) -> list[str]:
    """Writes the specs; returns the names of the files in the order in which they became whole."""
    whole: list[str] = []
    names = {id(file): name for name, file in files.items()}
    with WorkerPool(threads) as pool:
        receipts = write_files(
            specs, lambda name: files[name], options(**settings), pool=pool, written=lambda file: whole.append(names[id(file)])
        )
    assert [receipt.name for receipt in receipts] == [spec.name for spec in specs]
    return whole


def test_large_files_come_first_and_receipts_in_the_given_order() -> None:
    sizes = {"a": 1, "b": 5, "c": 3, "d": 0}
    specs = [spec_of(name, [source_of("t", numbers(size * BLOCK_ITEMS))] if size else []) for name, size in sizes.items()]
    files = {spec.name: MemoryFile() for spec in specs}
    whole = write_many(specs, files, threads=1)

    assert [name[0] for name in whole] == ["b", "c", "a", "d"]
    assert all(file.data[-64:-56] == b"DCPEFOOT" for file in files.values())


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_workers_without_a_file_of_their_own_help_with_the_largest(codec: str) -> None:
    # The first load of a batch of the large file waits for that of another: one worker alone would never write it.
    meeting = threading.Barrier(2)
    loads: list[str] = []

    def meeting_others(source: ChunkSource) -> ChunkSource:
        def load() -> np.ndarray:
            loads.append(source.name)
            if len(loads) <= 2:
                meeting.wait(60)
            return source.load()

        return dataclasses.replace(source, load=load)

    large = [meeting_others(source_of(f"t{index}", numbers(BLOCK_ITEMS))) for index in range(12)]
    specs = [spec_of("small", [source_of("s", numbers(10))]), spec_of("large", large)]
    files = {spec.name: MemoryFile() for spec in specs}
    whole = write_many(specs, files, threads=2, codec=codec, bytes_in_flight=256 << 20)

    assert sorted(whole) == ["large-00000.shard", "small-00000.shard"]
    assert len(loads) == 12


def test_an_error_in_one_file_ends_all_and_removes_those_that_are_not_whole(tmp_path: Path) -> None:
    bad = failing(source_of("bad", numbers(BLOCK_ITEMS)), ValueError("no tensor"))
    loads = Loads()
    specs = [
        spec_of("first", [loads.source("t", 40 << 20)]),
        spec_of("second", [loads.source("u", 9 << 20), bad]),
        *(spec_of(f"later{index}", [loads.source("v", 1 << 20)]) for index in range(50)),
    ]
    whole: list[WriteFile] = []
    with WorkerPool(2) as pool:
        with pytest.raises(ValueError, match="no tensor"):
            write_files(specs, LocalDirectory(str(tmp_path)).create, options(), pool=pool, written=whole.append)
        for file in whole:
            file.commit()
        assert len(os.listdir(tmp_path)) == len(whole) < 50
        assert loads.num_loads <= 2 + len(whole)
        assert pool.submit(lambda: 5).result(60) == 5


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_the_bound_on_memory_holds_for_all_files_together(codec: str) -> None:
    bound = 24 << 20
    loads = Loads()
    specs = [spec_of(f"c{number}", [loads.source(f"t{index}", 1 << 20) for index in range(12)]) for number in range(6)]
    write_many(specs, {spec.name: MemoryFile() for spec in specs}, threads=4, codec=codec, bytes_in_flight=bound)

    assert loads.num_loads == 72
    assert loads.most <= bound
    assert loads.alive == 0


def test_several_files_are_written_by_one_pool_at_once() -> None:
    files = [MemoryFile() for _ in range(4)]
    sources = [source_of(f"t{index}", torch.randn(700_000)) for index in range(6)]
    with WorkerPool(2) as pool:
        writers = [threading.Thread(target=write_to, args=(file, sources, pool), kwargs={"codec": "auto"}) for file in files]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    assert len({bytes(file.data) for file in files}) == 1
    assert len(files[0].data) > HEADER_BYTES
