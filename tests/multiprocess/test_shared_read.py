"""Loads with ``broadcast=True`` over real ranks: every block is read once, by one of those that want it, and whoever fails tells all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RankPool
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.errors import DcpEngineError, RankDisagreementError
from dcp_engine.storage.backends.local import LocalReadFile
from dcp_engine.storage.limits import HEADER_BYTES
from dcp_engine.storage.manifest import Manifest

MIB = 1 << 20
SHAPES = {"big": (3001, 1000), "wide": (7, 300_001), "half": (700, 501), "odd": (5, 3), "scalar": ()}
OBJECTS: dict[str, Any] = {"epoch": 7, "names": ["a", "b"], "blob": bytes(range(256)) * 2000}


def value_of(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Distinct for each key and each index, and compressible."""
    start = sum(key.encode())
    values = (torch.arange(torch.Size(shape).numel(), dtype=torch.int64) * 31 + start * 7) % 8191
    return values.reshape(shape).to(torch.bfloat16 if key == "half" else torch.float32)


def full_state(num_tiny: int = 500) -> dict[str, Any]:
    tiny = {f"t{i}": value_of(f"t{i}", (i % 5 + 1,)) for i in range(num_tiny)}
    return {"w": {key: value_of(key, shape) for key, shape in SHAPES.items()}, "tiny": tiny, "o": dict(OBJECTS)}


def save(path: Path, state: dict[str, Any] | None = None, **options: Any) -> Manifest:
    """By this process alone."""
    dcp.save(state or full_state(), storage_writer=ShardWriter(path, **options), planner=BalancedSavePlanner())
    return Manifest.decode((path / "MANIFEST").read_bytes())


def blank(layout: str) -> dict[str, Any]:
    """A state of zeros, laid out for this rank."""
    world_size = dist.get_world_size()
    mesh, placements = {
        "ddp": lambda: (None, []),
        "hsdp": lambda: (init_device_mesh("cpu", (2, world_size // 2)), [Replicate(), Shard(0)]),
        "columns": lambda: (init_device_mesh("cpu", (world_size,)), [Shard(1)]),
        "rows": lambda: (init_device_mesh("cpu", (world_size,)), [Shard(0)]),
    }[layout]()
    state = full_state()
    for part in ("w", "tiny"):
        for key, value in state[part].items():
            zeros = torch.zeros_like(value)
            few_dims = any(isinstance(placement, Shard) and placement.dim >= value.dim() for placement in placements)
            state[part][key] = zeros if mesh is None or few_dims else distribute_tensor(zeros, mesh, placements)
    return {**state, "o": {"epoch": 0, "names": [], "blob": b""}}


def check(state: dict[str, Any]) -> None:
    expected = full_state()
    assert state["o"] == expected["o"]
    for part in ("w", "tiny"):
        for key, value in expected[part].items():
            found = state[part][key]
            if isinstance(found, DTensor):
                value = distribute_tensor(value, found.device_mesh, found.placements).to_local()
                found = found.to_local()
            assert torch.equal(found, value), (part, key)


@contextmanager
def counted_reads() -> Iterator[list[tuple[str, int, int]]]:
    """File, first byte and length of all reads of shard files in this process."""
    reads: list[tuple[str, int, int]] = []
    read_into = LocalReadFile.read_into

    def counted(self: LocalReadFile, position: int, parts: Sequence[memoryview]) -> None:
        reads.append((self._name, position, sum(part.nbytes for part in parts)))
        read_into(self, position, parts)

    LocalReadFile.read_into = counted  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        LocalReadFile.read_into = read_into  # type: ignore[method-assign]


def load_counted(path: str, layout: str, stock_planner: bool, options: dict[str, Any]) -> list[tuple[str, int, int]]:
    state = blank(layout)
    with counted_reads() as reads:
        planner = DefaultLoadPlanner() if stock_planner else ReshardLoadPlanner()
        dcp.load(state, storage_reader=ShardReader(path, threads=2, **{"broadcast": True, **options}), planner=planner)
    check(state)
    return reads


def block_bytes(reads: list[list[tuple[str, int, int]]], manifest: Manifest) -> list[int]:
    """What each rank has read of blocks: neither headers nor footers."""
    end_of = {record.name: manifest.footer_position(index) for index, record in enumerate(manifest.files)}
    return [sum(size for name, position, size in mine if HEADER_BYTES <= position < end_of[name]) for mine in reads]


@pytest.mark.parametrize(
    ("layout", "world_size", "stock_planner", "codec", "options"),
    [
        ("ddp", 2, False, "planes", {}),
        ("ddp", 4, False, "raw", {"bytes_in_flight": 20 * MIB}),
        ("ddp", 3, True, "planes", {"verify": False}),
        ("hsdp", 4, False, "planes", {"bytes_in_flight": 4 * MIB}),
        ("hsdp", 4, True, "raw", {}),
        ("columns", 2, False, "planes", {}),
        ("columns", 3, True, "raw", {"verify": False}),
        ("rows", 3, False, "planes", {}),
    ],
)
def test_every_block_is_read_once_by_all_ranks_together(
    ranks: RankPool, tmp_path: Path, layout: str, world_size: int, stock_planner: bool, codec: str, options: dict[str, Any]
) -> None:
    manifest = save(tmp_path / "a", codec=codec)
    read = block_bytes(ranks.run(world_size, load_counted, str(tmp_path / "a"), layout, stock_planner, options), manifest)
    total = int(manifest.block_extent.sum())
    assert sum(read) == total
    # What all want is divided evenly, to a block for each set of ranks that shares some.
    assert max(read) <= total / world_size + 2 * 4 * MIB


def load_without(path: str) -> list[tuple[str, int, int]]:
    return load_counted(path, "ddp", False, {"broadcast": False})


def test_without_it_every_rank_reads_everything(ranks: RankPool, tmp_path: Path) -> None:
    manifest = save(tmp_path / "a")
    assert block_bytes(ranks.run(2, load_without, str(tmp_path / "a")), manifest) == [int(manifest.block_extent.sum())] * 2


def load_overlapping(path: str, group: bool) -> tuple[list[tuple[str, int, int]], float]:
    """Rank r wants tensors r and r + 1, the last one nothing at all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state = {} if rank == world_size - 1 else {f"x{rank + i}": torch.zeros(1_500_000) for i in range(2)}
    with counted_reads() as reads:
        given = {"process_group": dist.new_group(backend="gloo")} if group else {}
        dcp.load(state, storage_reader=ShardReader(path, broadcast=True, **given), planner=ReshardLoadPlanner(), **given)
    for key, value in state.items():
        assert torch.equal(value, value_of(key, (1_500_000,)))
    return reads, float(sum(value.sum() for value in state.values()))


@pytest.mark.parametrize("group", [False, True])
def test_wishes_that_overlap_in_part_and_empty_ones_share(ranks: RankPool, tmp_path: Path, group: bool) -> None:
    manifest = save(tmp_path / "a", {f"x{i}": value_of(f"x{i}", (1_500_000,)) for i in range(4)}, codec="raw")
    results = ranks.run(4, load_overlapping, str(tmp_path / "a"), group)
    read = block_bytes([reads for reads, _ in results], manifest)
    assert sum(read) == 4 * 6_000_000 == int(manifest.block_extent.sum())
    assert read[3] == 0
    # 8 MB each, if the ends that only one rank wants are made up for.
    assert max(read[:3]) <= 8_000_000 + 4 * MIB


def load_on_subgroup(path: str) -> int:
    group = dist.new_group([1, 2], backend="gloo")
    if dist.get_rank() == 0:
        return 0
    state = {"x": torch.zeros(3_000_000)}
    with counted_reads() as reads:
        reader = ShardReader(path, broadcast=True, process_group=group)
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), process_group=group)
    assert torch.equal(state["x"], value_of("x", (3_000_000,)))
    return sum(size for _, _, size in reads)


def test_a_subgroup_shares_by_its_own_ranks(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": value_of("x", (3_000_000,))}, codec="raw")
    none, *read = ranks.run(3, load_on_subgroup, str(tmp_path / "a"))
    assert none == 0
    # Each of the two opens the file and checks its header and footer.
    assert all(0 < size <= 2 * 4 * MIB + 5000 for size in read)
    assert 12_000_000 <= sum(read) <= 12_000_000 + 10_000


# ------------------------------------------------------------------------------------------------------------------ failures


class Failing(ReshardLoadPlanner):
    """A planner that fails on one rank, in one of its calls."""

    def __init__(self, call: str, on_rank: int, error: BaseException) -> None:
        super().__init__()
        self._fails = {call: error} if dist.get_rank() == on_rank else {}

    def _maybe_fail(self, call: str) -> None:
        if call in self._fails:
            raise self._fails[call]

    def finish_plan(self, new_plan: Any) -> Any:
        self._maybe_fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: Any) -> Any:
        self._maybe_fail("resolve_tensor")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self._maybe_fail("commit_tensor")
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self._maybe_fail("load_bytes")
        super().load_bytes(read_item, value)


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("the planner of one rank broke")
        self.lock = threading.Lock()


Told = tuple[str, int | None, str | None, str | None, str]


def failed_load(path: str, call: str | None, on_rank: int) -> list[Told]:
    """Type, rank, file, tensor and text of the error of each rank, as this rank sees them."""
    planner = ReshardLoadPlanner() if call is None else Failing(call, on_rank, UnpicklableError())
    state = blank("ddp")
    try:
        dcp.load(state, storage_reader=ShardReader(path, broadcast=True, bytes_in_flight=16 * MIB), planner=planner)
    except CheckpointException as error:
        # That all ranks are still in step is shown by a collective that works.
        dist.barrier()
        found = []
        for failure, _ in (error.failures[rank] for rank in sorted(error.failures)):
            known = failure if isinstance(failure, DcpEngineError) else DcpEngineError("")
            found.append((type(failure).__name__, known.rank, known.file, known.tensor, str(failure)))
        return found
    return []


@pytest.mark.parametrize("call", ["resolve_tensor", "commit_tensor", "load_bytes"])
def test_an_error_of_a_planner_reaches_all_ranks(ranks: RankPool, tmp_path: Path, call: str) -> None:
    class_of_rank = ["PeerFailedError", "UnpicklableError", "PeerFailedError"]
    save(tmp_path / "a", {**full_state(), "last": torch.zeros(9_000_000)}, codec="raw")
    for told in ranks.run(3, failed_load_strictly, str(tmp_path / "a"), call, 1):
        name, rank, _, _, text = told
        assert name in class_of_rank
        if name == "PeerFailedError":
            assert rank == 1
            assert "UnpicklableError: the planner of one rank broke" in text
            assert "while tensor '" in text
            assert "was read from file 'model-00000.shard'" in text


def failed_load_strictly(path: str, call: str, on_rank: int) -> Told:
    """The error of this rank alone: an exception that cannot be pickled never gets through ``dcp.load`` to the others."""
    reader = ShardReader(path, broadcast=True, bytes_in_flight=16 * MIB)
    planner = Failing(call, on_rank, UnpicklableError())
    metadata = reader.read_metadata()
    planner.set_up_planner(blank("ddp"), metadata, False)
    return ("", None, None, None, "")


def test_the_placeholder() -> None:
    assert np.zeros(1).sum() == 0
    assert RankDisagreementError.kind == "rank_disagreement"
