"""What the read pipeline reads, where the bytes end up, and how damage is found."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shards import CountingFile, Target, manifest_of, options, read, source_of, write

from dcp_engine.errors import (
    CorruptCheckpointError,
    DcpEngineError,
    DigestMismatchError,
    MalformedCheckpointError,
    MissingFileError,
    PlanError,
    TruncatedFileError,
    UnsupportedVersionError,
)
from dcp_engine.storage import dtypes
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.limits import BLOCK_BYTES, HEADER_BYTES, PACK_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.read_pipeline import read_chunks
from dcp_engine.storage.records import ReadRequest
from dcp_engine.storage.workers import WorkerPool

SHARD = "model-00000.shard"
BLOCK_ITEMS = BLOCK_BYTES // 4
CODECS = ["raw", "zstd", "planes", "auto"]
DTYPES = [info.torch_dtype for info in (dtypes.of_code(code) for code in (*range(1, 10), *range(16, 20), *range(24, 29), 32, 33, 34))]


def weights(*sizes: int, seed: int = 0) -> torch.Tensor:
    """Values that compress like weights do, of a known seed."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) * 0.02


def blank(array: np.ndarray) -> np.ndarray:
    return np.full_like(array, 3)


def slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, codec: str, dtype: torch.dtype) -> None:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    patterns = np.arange(200_000, dtype=np.uint32).astype(np.uint8)
    bits = torch.from_numpy(patterns % 2 if dtype == torch.bool else patterns)
    large = bits.view(dtype).reshape(-1, 10)
    tensors = {"large": large, "small": large[:3].clone(), "scalar": large[4, 2].clone(), "one": large[5:6, 1:2].clone()}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec=codec)))
    targets = {name: Target(blank(dtypes.carrier(tensor))) for name, tensor in tensors.items()}
    read(tmp_path, manifest, [target.request(manifest, name) for name, target in targets.items()], options())
    for name, tensor in tensors.items():
        expected = dtypes.carrier(tensor.contiguous())
        assert targets[name].array.tobytes() == expected.tobytes(), name
        assert (targets[name].opened, targets[name].committed) == (1, 1)
    assert large.nbytes // itemsize == 200_000 // itemsize


@pytest.fixture(scope="module")
def cube(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, np.ndarray]:
    """A chunk of several blocks whose rows are shorter than one and planes longer, beside a packed one."""
    tensor = torch.arange(5 * 700 * 900, dtype=torch.int32).reshape(5, 700, 900)
    small = torch.arange(4 * 5 * 6, dtype=torch.int32).reshape(4, 5, 6)
    directory = tmp_path_factory.mktemp("cube")
    receipt = write(directory, [source_of("cube", tensor), source_of("small", small), source_of("beside", small[0])], options(codec="auto"))
    return directory, manifest_of(receipt), tensor.numpy()


@st.composite
def box_and_layout(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Offsets, sizes, order of the target's dimensions in memory, and its margins there."""
    offsets, sizes = [], []
    for extent in shape:
        begin = draw(st.integers(0, extent))
        offsets.append(begin)
        sizes.append(draw(st.one_of(st.integers(0, extent - begin), st.just(extent - begin))))
    return tuple(offsets), tuple(sizes), tuple(draw(st.permutations(range(len(shape))))), tuple(draw(st.integers(0, 1)) for _ in shape)


def laid_out(sizes: tuple[int, ...], order: tuple[int, ...], margins: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """An array of ``sizes`` in a larger memory, and that memory."""
    memory = np.full([sizes[dim] + margins[dim] for dim in order], -1, np.int32)
    inner = memory.transpose(np.argsort(order))
    return inner[tuple(slice(0, size) for size in sizes)], memory


@settings(max_examples=25, deadline=None)
@given(cases=st.lists(box_and_layout((5, 700, 900)), min_size=1, max_size=4))
def test_any_boxes_of_one_chunk_arrive_in_any_layout(cube: tuple[Path, Manifest, np.ndarray], cases: list[Any]) -> None:
    directory, manifest, dense = cube
    targets = []
    for offsets, sizes, order, margins in cases:
        array, memory = laid_out(sizes, order, margins)
        targets.append((Target(array), memory, offsets, sizes))
    read(directory, manifest, [target.request(manifest, "cube", offsets) for target, _, offsets, _ in targets], options())
    for target, memory, offsets, sizes in targets:
        expected = dense[slices(offsets, sizes)]
        assert (target.array == expected).all()
        assert (memory == -1).sum() == memory.size - expected.size, "nothing beside the target was touched"
        assert target.committed == 1
        assert target.opened == (1 if expected.size else 0)


@settings(max_examples=50, deadline=None)
@given(cases=st.lists(box_and_layout((4, 5, 6)), min_size=1, max_size=6))
def test_any_boxes_of_a_packed_chunk_arrive_in_any_layout(cube: tuple[Path, Manifest, np.ndarray], cases: list[Any]) -> None:
    directory, manifest, _ = cube
    dense = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    targets = [(Target(laid_out(sizes, order, margins)[0]), offsets, sizes) for offsets, sizes, order, margins in cases]
    reads: list[tuple[int, int]] = []
    read(directory, manifest, [target.request(manifest, "small", offsets) for target, offsets, _ in targets], options(), reads=reads)
    for target, offsets, sizes in targets:
        assert (target.array == dense[slices(offsets, sizes)]).all()
        assert (target.opened, target.committed) == (1 if math.prod(sizes) else 0, 1)
    assert len(block_reads(manifest, reads)) == (1 if any(target.array.size for target, _, _ in targets) else 0)


def block_reads(manifest: Manifest, reads: list[tuple[int, int]]) -> list[int]:
    """Ids of the blocks that were read from the one file, in order; header and footer are left out. Every read must be whole blocks."""
    blocks = []
    by_position = {int(position): block for block, position in enumerate(manifest.block_position)}
    for position, num_bytes in sorted(reads):
        if position == 0 or position >= manifest.footer_position(0):
            continue
        end = position + num_bytes
        while position < end:
            blocks.append(by_position[position])
            position += int(manifest.block_extent[blocks[-1]])
        assert position == end
    return blocks


@pytest.fixture(params=["raw", "auto"])
def matrix(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Manifest, np.ndarray]:
    """A chunk of 8 blocks, 2 rows of 4 blocks each."""
    tensor = weights(2, 4 * BLOCK_ITEMS)
    return tmp_path, manifest_of(write(tmp_path, [source_of("m", tensor)], options(codec=request.param))), tensor.numpy().view(np.int32)


@pytest.mark.parametrize(
    ("offsets", "sizes", "blocks"),
    [
        ((0, 0), (2, 4 * BLOCK_ITEMS), [0, 1, 2, 3, 4, 5, 6, 7]),
        ((1, 0), (1, 4 * BLOCK_ITEMS), [4, 5, 6, 7]),
        ((0, BLOCK_ITEMS), (2, BLOCK_ITEMS), [1, 5]),
        ((0, BLOCK_ITEMS - 1), (2, 2), [0, 1, 4, 5]),
        ((1, 2 * BLOCK_ITEMS + 7), (1, 1), [6]),
        ((0, 4 * BLOCK_ITEMS - 1), (2, 1), [3, 7]),
    ],
)
def test_just_the_touched_blocks_are_read_each_once(
    matrix: tuple[Path, Manifest, np.ndarray], offsets: tuple[int, ...], sizes: tuple[int, ...], blocks: list[int]
) -> None:
    directory, manifest, dense = matrix
    reads: list[tuple[int, int]] = []
    target = Target(np.zeros(sizes, np.int32))
    read(directory, manifest, [target.request(manifest, "m", offsets)], options(), reads=reads)
    assert (target.array == dense[slices(offsets, sizes)]).all()
    assert block_reads(manifest, reads) == blocks


def test_a_block_that_many_requests_want_is_read_once(matrix: tuple[Path, Manifest, np.ndarray]) -> None:
    directory, manifest, dense = matrix
    targets = [Target(np.zeros((2, 1 + index), np.int32)) for index in range(20)]
    requests = [target.request(manifest, "m", (0, BLOCK_ITEMS + 100 * index)) for index, target in enumerate(targets)]
    whole = Target(np.zeros((2, 4 * BLOCK_ITEMS), np.int32))
    reads: list[tuple[int, int]] = []
    read(directory, manifest, requests, options(), reads=reads)
    assert block_reads(manifest, reads) == [1, 5]
    read(directory, manifest, [*requests, whole.request(manifest, "m"), *requests], options(), reads=reads)
    assert (whole.array == dense).all()
    for index, target in enumerate(targets):
        begin = BLOCK_ITEMS + 100 * index
        assert (target.array == dense[:, begin : begin + 1 + index]).all()
        assert target.committed == 3


def test_adjacent_blocks_are_read_by_one_call_in_file_order(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((PACK_BYTES // 4,), index, dtype=torch.int32) for index in range(60)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options()))
    targets = {name: Target(np.zeros(PACK_BYTES // 4, np.int32)) for name in reversed(tensors)}
    reads: list[tuple[int, int]] = []
    read(tmp_path, manifest, [target.request(manifest, name) for name, target in targets.items()], options(threads=1), reads=reads)
    assert all((target.array == int(name[1:])).all() for name, target in targets.items())
    assert len(reads) == 4  # header, trailer, footer, and one for 60 blocks
    assert block_reads(manifest, reads) == list(range(60))


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_large_blocks_are_read_in_pieces_and_small_ones_together(tmp_path: Path, codec: str) -> None:
    piece_bytes = 100_000
    sizes = {"large": BLOCK_ITEMS + 1000, "a": 20_000, "b": 20_001, "c": 20_002}
    tensors = {name: weights(size) for name, size in sizes.items()}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec=codec)))
    targets = {name: Target(np.zeros(size, np.int32)) for name, size in sizes.items()}
    reads: list[tuple[int, int]] = []
    place = LocalDirectory(str(tmp_path))
    with WorkerPool(2) as pool:
        read_chunks(
            manifest,
            lambda name: CountingFile(place.open(name), reads, [], piece_bytes=piece_bytes),
            [target.request(manifest, name) for name, target in targets.items()],
            options=options(),
            pool=pool,
            path=str(tmp_path),
        )
    for name, target in targets.items():
        assert target.array.tobytes() == tensors[name].numpy().tobytes()
    footer = manifest.footer_position(0)
    blocks = sorted(read for read in reads if HEADER_BYTES <= read[0] < footer)
    assert blocks[0][0] == HEADER_BYTES
    assert all(0 <= length <= piece_bytes for _, length in blocks)
    assert sum(length for _, length in blocks) == footer - HEADER_BYTES


class AddressFile(CountingFile):
    """Records the memory that is read into."""

    addresses: list[tuple[int, int]]

    def read_into(self, position: int, parts: Any) -> None:
        self.addresses += [(np.frombuffer(part, np.uint8).ctypes.data, part.nbytes) for part in parts]
        super().read_into(position, parts)


def addresses_of(directory: Path, manifest: Manifest, requests: list[ReadRequest]) -> list[tuple[int, int]]:
    place = LocalDirectory(str(directory))
    found: list[tuple[int, int]] = []

    def open_file(name: str) -> AddressFile:
        file = AddressFile(place.open(name), [], [])
        file.addresses = found
        return file

    with WorkerPool(2) as pool:
        read_chunks(manifest, open_file, requests, options=options(), pool=pool, path=None)
    return found


@pytest.mark.parametrize("row_margin", [0, 5])
def test_raw_blocks_are_read_into_the_targets_memory(tmp_path: Path, row_margin: int) -> None:
    tensor = weights(2, 2 * BLOCK_ITEMS)
    manifest = manifest_of(write(tmp_path, [source_of("m", tensor)], options(codec="raw")))
    array = np.zeros((2, 2 * BLOCK_ITEMS + row_margin), np.int32)[:, : 2 * BLOCK_ITEMS]
    found = addresses_of(tmp_path, manifest, [Target(array).request(manifest, "m")])
    starts = [array[row, BLOCK_ITEMS * half :].ctypes.data for row in range(2) for half in range(2)]
    assert {(start, BLOCK_BYTES) for start in starts} <= set(found)
    assert (array == tensor.numpy().view(np.int32)).all()


def test_part_of_a_raw_block_is_read_into_the_targets_memory(tmp_path: Path) -> None:
    tensor = weights(3 * BLOCK_ITEMS // 2)
    manifest = manifest_of(write(tmp_path, [source_of("v", tensor)], options(codec="raw")))
    array = np.zeros(BLOCK_ITEMS, np.int32)
    found = addresses_of(tmp_path, manifest, [Target(array).request(manifest, "v", (100,))])
    assert (array.ctypes.data, BLOCK_BYTES - 400) in found
    assert (array[BLOCK_ITEMS - 100 :].ctypes.data, 400) in found
    assert (array == tensor.numpy().view(np.int32)[100 : 100 + BLOCK_ITEMS]).all()


def test_requests_without_elements_are_committed_and_read_nothing(tmp_path: Path) -> None:
    manifest = manifest_of(write(tmp_path, [source_of("a", weights(4, 5))], options()))
    targets = [Target(np.zeros((0, 5), np.int32)), Target(np.zeros((4, 0), np.int32)), Target(np.zeros((0, 0), np.int32))]
    reads: list[tuple[int, int]] = []
    read(
        tmp_path,
        manifest,
        [target.request(manifest, "a", offsets) for target, offsets in zip(targets, [(4, 0), (0, 5), (2, 2)], strict=True)],
        options(),
        reads=reads,
    )
    assert reads == []
    assert [(target.opened, target.committed) for target in targets] == [(0, 1)] * 3


def test_no_requests_open_no_file(tmp_path: Path) -> None:
    reads: list[tuple[int, int]] = []
    read(tmp_path, manifest_of(write(tmp_path, [source_of("a", weights(4))], options())), [], options(), reads=reads)
    assert reads == []


def test_thousands_of_tiny_tensors_take_one_read(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((2, 3), index, dtype=torch.int32) for index in range(5000)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec="auto")))
    targets = {name: Target(np.zeros((2, 3), np.int32)) for name in tensors}
    transposed = Target(np.zeros((3, 2), np.int32).T)
    requests = [target.request(manifest, name) for name, target in targets.items()]
    reads: list[tuple[int, int]] = []
    read(tmp_path, manifest, [*requests, transposed.request(manifest, "t77")], options(), reads=reads)
    assert [int(target.array[1, 2]) for target in targets.values()] == list(range(5000))
    assert (transposed.array == 77).all()
    assert {(target.opened, target.committed) for target in targets.values()} == {(1, 1)}
    assert len(reads) == 4


def test_several_files_are_opened_once_and_closed(tmp_path: Path) -> None:
    chunks = [weights(2, BLOCK_ITEMS, seed=rank) for rank in range(3)]
    manifest = manifest_of_ranks(tmp_path, chunks)
    targets = [Target(np.zeros((2, BLOCK_ITEMS), np.int32)) for _ in range(3)]
    closed: list[int] = []
    requests = [target.request(manifest, "w", chunk=rank) for rank, target in enumerate(targets)]
    read(tmp_path / "ranks", manifest, requests, options(), closed=closed)
    for target, chunk in zip(targets, chunks, strict=True):
        assert (target.array == chunk.numpy().view(np.int32)).all()
    assert len(closed) == 3


def manifest_of_ranks(tmp_path: Path, chunks: list[torch.Tensor]) -> Manifest:
    directory = tmp_path / "ranks"
    directory.mkdir()
    shape = (2 * len(chunks), BLOCK_ITEMS)
    return manifest_of(
        *(
            write(
                directory,
                [source_of("w", chunk, shape=shape, offsets=(2 * rank, 0))],
                options(codec="auto"),
                rank=rank,
                world_size=len(chunks),
            )
            for rank, chunk in enumerate(chunks)
        )
    )


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(params=["raw", "auto"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Manifest, list[ReadRequest]]:
    """A file with a packed block, a block of one chunk and a chunk of two blocks, and requests for all of it."""
    tensors = {"long": weights(BLOCK_ITEMS + 5), "medium": weights(30_001), "tiny.a": weights(3, 3), "tiny.b": weights(5)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec=request.param)))
    requests = [Target(np.zeros(tensor.shape, np.int32)).request(manifest, name) for name, tensor in tensors.items()]
    return tmp_path, manifest, requests


def positions_to_flip(manifest: Manifest) -> dict[str, int]:
    """One byte of every kind that the file has."""
    places = {"magic": 0, "version": 8, "rank": 12, "nonce": 16, "name": 40, "end of header": HEADER_BYTES - 1}
    for block in range(len(manifest.block_file)):
        position, stored = int(manifest.block_position[block]), int(manifest.table.block_stored_bytes[block])
        places |= {f"start of block {block}": position, f"end of block {block}": position + stored - 1}
        if stored < int(manifest.block_extent[block]):
            places |= {
                f"first padding of block {block}": position + stored,
                f"last padding of block {block}": position + int(manifest.block_extent[block]) - 1,
            }
    footer, size = manifest.footer_position(0), manifest.files[0].size_bytes
    places |= {"start of footer": footer, "end of footer": size - 65}
    places |= {f"trailer {offset}": size - 64 + offset for offset in (0, 8, 12, 16, 24, 32, 63)}
    return places


def test_every_flipped_bit_is_found_and_named(damaged: tuple[Path, Manifest, list[ReadRequest]]) -> None:
    directory, manifest, requests = damaged
    shard = directory / SHARD
    intact = shard.read_bytes()
    for (place, position), bit in itertools.product(positions_to_flip(manifest).items(), (0, 7)):
        broken = bytearray(intact)
        broken[position] ^= 1 << bit
        shard.write_bytes(broken)
        with pytest.raises(DcpEngineError) as caught:
            read(directory, manifest, requests, options())
        assert isinstance(caught.value, CorruptCheckpointError | UnsupportedVersionError), (place, bit, caught.value)
        assert (caught.value.file, caught.value.path) == (SHARD, str(directory)), (place, bit)
    shard.write_bytes(intact)
    read(directory, manifest, requests, options())


def test_no_byte_of_a_file_is_unchecked(tmp_path: Path) -> None:
    tensors = {"a": weights(50), "b": torch.arange(7), "c": torch.ones(3, dtype=torch.uint8)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec="auto")))
    requests = [Target(np.zeros(t.shape, dtypes.carrier(t).dtype)).request(manifest, name) for name, t in tensors.items()]
    intact = (tmp_path / SHARD).read_bytes()
    place = LocalDirectory(str(tmp_path))
    # The zeros of the header are one comparison: every 97th of them will do.
    positions = [*range(0, 64), *range(64, HEADER_BYTES, 97), *range(HEADER_BYTES, len(intact))]
    with WorkerPool(1) as pool:
        for position in positions:
            broken = bytearray(intact)
            broken[position] ^= 1 << position % 8
            (tmp_path / SHARD).write_bytes(broken)
            with pytest.raises(DcpEngineError) as caught:
                read_chunks(manifest, place.open, requests, options=options(threads=1), pool=pool, path=str(tmp_path))
            assert caught.value.file == SHARD, position


@pytest.mark.parametrize(("tensor", "block", "others"), [("long", 1, ""), ("medium", 2, ""), ("tiny.a", 3, "1 more")])
def test_a_damaged_block_is_named_with_its_tensor(
    damaged: tuple[Path, Manifest, list[ReadRequest]], tensor: str, block: int, others: str
) -> None:
    directory, manifest, requests = damaged
    with (directory / SHARD).open("r+b") as file:
        file.seek(int(manifest.block_position[block]) + 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 16]))
    with pytest.raises(DigestMismatchError, match=f"block {block}.*{others}") as caught:
        read(directory, manifest, requests, options())
    assert (caught.value.file, caught.value.tensor) == (SHARD, tensor)


def test_damage_outside_the_wanted_blocks_is_not_read(damaged: tuple[Path, Manifest, list[ReadRequest]]) -> None:
    directory, manifest, requests = damaged
    with (directory / SHARD).open("r+b") as file:
        file.seek(int(manifest.block_position[0]))
        file.write(b"\xff" * 100)
    read(directory, manifest, requests[1:], options())
    with pytest.raises(DigestMismatchError):
        read(directory, manifest, requests[:1], options())


def test_padding_that_is_not_zero_is_refused_without_digests_too(damaged: tuple[Path, Manifest, list[ReadRequest]]) -> None:
    directory, manifest, requests = damaged
    with (directory / SHARD).open("r+b") as file:
        file.seek(int(manifest.block_position[2]) - 1)
        file.write(b"\1")
    with pytest.raises(MalformedCheckpointError, match="padding after block 1") as caught:
        read(directory, manifest, requests, options(verify=False))
    assert caught.value.tensor == "long"


def test_without_verification_digests_are_not_compared(tmp_path: Path) -> None:
    manifest = manifest_of(write(tmp_path, [source_of("v", weights(50_000))], options()))
    with (tmp_path / SHARD).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"\xff\xff\xff\xff")
    target = Target(np.zeros(50_000, np.int32))
    read(tmp_path, manifest, [target.request(manifest, "v")], options(verify=False))
    assert target.array[0] == -1


@pytest.mark.parametrize("change", [-1, -64, -5000, 1, 64])
def test_a_file_of_another_length_is_named(damaged: tuple[Path, Manifest, list[ReadRequest]], change: int) -> None:
    directory, manifest, requests = damaged
    data = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(TruncatedFileError, match="another size") as caught:
        read(directory, manifest, requests, options())
    assert caught.value.file == SHARD
    assert caught.value.expected == f"{len(data)} bytes"


def test_a_missing_file_is_named(damaged: tuple[Path, Manifest, list[ReadRequest]]) -> None:
    directory, manifest, requests = damaged
    (directory / SHARD).unlink()
    with pytest.raises(MissingFileError) as caught:
        read(directory, manifest, requests, options())
    assert caught.value.file == SHARD
    assert caught.value.tensor == "long"


def test_swapped_files_are_found(tmp_path: Path) -> None:
    manifest = manifest_of_ranks(tmp_path, [weights(2, BLOCK_ITEMS, seed=1), weights(2, BLOCK_ITEMS, seed=1)])
    first, second = (tmp_path / "ranks" / f"model-0000{rank}.shard" for rank in range(2))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    target = Target(np.zeros((2, BLOCK_ITEMS), np.int32))
    with pytest.raises(CorruptCheckpointError) as caught:
        read(tmp_path / "ranks", manifest, [target.request(manifest, "w")], options())
    assert caught.value.file == "model-00000.shard"
    assert target.committed == 0


# --------------------------------------------------------------------------------------------------------------- errors of the caller


class Unexpected(BaseException):
    """Not an Exception, as DCP's CheckpointException is not."""


@pytest.mark.parametrize("error", [ValueError("target"), Unexpected("target"), KeyboardInterrupt("target")])
@pytest.mark.parametrize("where", ["open", "commit"])
@pytest.mark.parametrize("num_elements", [10, 20_000, BLOCK_ITEMS + 10])
def test_an_error_of_a_request_reaches_the_caller_and_the_pool_stays_usable(
    tmp_path: Path, error: BaseException, where: str, num_elements: int
) -> None:
    tensors = {f"t{index}": weights(num_elements, seed=index) for index in range(6)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec="zstd")))
    targets = {name: Target(np.zeros(num_elements, np.int32)) for name in tensors}
    requests = [target.request(manifest, name) for name, target in targets.items()]

    def fail() -> Any:
        raise error

    requests[3] = dataclasses.replace(requests[3], **{where: fail})
    place = LocalDirectory(str(tmp_path))
    closed: list[int] = []
    with WorkerPool(2) as pool:

        def run(chosen: list[ReadRequest]) -> None:
            read_chunks(
                manifest, lambda name: CountingFile(place.open(name), [], closed), chosen, options=options(), pool=pool, path=str(tmp_path)
            )

        with pytest.raises(type(error), match="target"):
            run(requests)
        assert len(closed) == 1, "the file was closed"
        assert all(target.committed <= 1 for target in targets.values())
        run(requests[:3])
    for name in ("t0", "t1", "t2"):
        assert (targets[name].array == tensors[name].numpy().view(np.int32)).all()


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0, 0), (5, 5)), ((1, 0), (4, 5)), ((0, 1), (4, 5)), ((-1, 0), (2, 2)), ((0,), (20,)), ((0, 0), (5, 4))]
)
def test_a_request_outside_its_chunk_is_refused_by_name(tmp_path: Path, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    manifest = manifest_of(write(tmp_path, [source_of("a", weights(4, 5))], options()))
    request = Target(np.zeros(sizes, np.int32)).request(manifest, "a", offsets)
    with pytest.raises(PlanError, match="not inside") as caught:
        read(tmp_path, manifest, [request], options())
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("num_elements", [10, 20_000, 2 * BLOCK_ITEMS])
@pytest.mark.parametrize("beside", [0, 1])
def test_a_target_of_another_form_is_refused_by_name(tmp_path: Path, num_elements: int, beside: int) -> None:
    tensors = {f"t{index}": weights(num_elements) for index in range(2)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options()))
    good = [Target(np.zeros(num_elements, np.int32)).request(manifest, "t0")] * beside
    for wrong in (np.zeros(num_elements + 1, np.int32), np.zeros(num_elements, np.int64), np.zeros((1, num_elements), np.int32)):
        request = dataclasses.replace(Target(np.zeros(num_elements, np.int32)).request(manifest, "t1"), open=lambda wrong=wrong: wrong)
        with pytest.raises(PlanError, match="planned form") as caught:
            read(tmp_path, manifest, [*good, request], options())
        assert caught.value.tensor == "t1"


def test_commits_come_one_at_a_time_and_after_the_last_block(tmp_path: Path) -> None:
    tensors = {f"t{index}": weights(BLOCK_ITEMS * 2 + index, seed=index) for index in range(6)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec="auto")))
    busy = threading.Lock()
    complete: list[bool] = []
    requests = []
    for name, tensor in tensors.items():
        array = np.zeros(tensor.numel(), np.int32)

        def check(array: np.ndarray = array, tensor: torch.Tensor = tensor) -> None:
            assert busy.acquire(blocking=False)
            complete.append(bool((array == tensor.numpy().view(np.int32)).all()))
            busy.release()

        requests.append(Target(array, on_commit=check).request(manifest, name))
    read(tmp_path, manifest, requests, options(threads=4))
    assert complete == [True] * 6


class BusyFile(CountingFile):
    """Counts the bytes that are being read at the same time."""

    lock = threading.Lock()
    now_bytes = 0
    most_bytes = 0

    def read_into(self, position: int, parts: Any) -> None:
        num_bytes = sum(part.nbytes for part in parts)
        with self.lock:
            BusyFile.now_bytes += num_bytes
            BusyFile.most_bytes = max(BusyFile.most_bytes, BusyFile.now_bytes)
        super().read_into(position, parts)
        with self.lock:
            BusyFile.now_bytes -= num_bytes


@pytest.mark.parametrize(("bytes_in_flight", "most_bytes"), [(BLOCK_BYTES, BLOCK_BYTES), (5 * BLOCK_BYTES, 2 * BLOCK_BYTES)])
def test_the_bound_on_memory_holds_and_everything_is_read(tmp_path: Path, bytes_in_flight: int, most_bytes: int) -> None:
    tensors = {f"t{index}": weights(1_500_000, seed=index) for index in range(4)}
    manifest = manifest_of(write(tmp_path, [source_of(name, tensor) for name, tensor in tensors.items()], options(codec="auto")))
    targets = {name: Target(np.zeros(1_500_000, np.int32)) for name in tensors}
    requests = [target.request(manifest, name) for name, target in targets.items()]
    place = LocalDirectory(str(tmp_path))
    BusyFile.most_bytes = 0
    with WorkerPool(4) as pool:
        chosen = options(threads=4, bytes_in_flight=bytes_in_flight)
        read_chunks(manifest, lambda name: BusyFile(place.open(name), [], []), requests, options=chosen, pool=pool, path=None)
    assert 0 < BusyFile.most_bytes <= most_bytes
    for name, tensor in tensors.items():
        assert (targets[name].array == tensor.numpy().view(np.int32)).all()
