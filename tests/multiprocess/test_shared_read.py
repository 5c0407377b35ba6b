"""Loads with ``broadcast=True`` over real ranks: every block is read once, by one of those that want it, and whoever fails tells all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import RankFailure, RankPool
from support.shards import options
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.errors import DcpEngineError, RankDisagreementError, StorageError
from dcp_engine.storage.backends.local import LocalReadFile
from dcp_engine.storage.limits import HEADER_BYTES
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.rank_group import RankGroup
from dcp_engine.storage.read_shared import read_shared
from dcp_engine.storage.workers import WorkerPool

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


@dataclass(frozen=True)
class Told:
    """An error, as it reached a rank."""

    name: str
    rank: int | None
    file: str | None
    tensor: str | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Told:
        known = error if isinstance(error, DcpEngineError) else DcpEngineError("")
        return cls(type(error).__name__, known.rank, known.file, known.tensor, str(error))


def failed_load(path: str, planner: Any = None, **options: Any) -> dict[int, Told]:
    """The error of every rank, as this rank is told."""
    try:
        reader = ShardReader(path, **{"broadcast": True, "bytes_in_flight": 16 * MIB, **options})
        dcp.load(blank("ddp"), storage_reader=reader, planner=planner or ReshardLoadPlanner())
    except CheckpointException as error:
        # Ranks out of step would not come through this.
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
        return {rank: Told.of(failure) for rank, (failure, _) in error.failures.items()}
    return {}


def load_with_failing_planner(path: str, call: str) -> dict[int, Told]:
    return failed_load(path, Failing(call, 1, UnpicklableError()))


@pytest.mark.parametrize("call", ["resolve_tensor", "commit_tensor", "load_bytes"])
def test_an_error_of_a_planner_in_the_middle_is_one_error_on_all_ranks(ranks: RankPool, tmp_path: Path, call: str) -> None:
    save(tmp_path / "a", codec="raw")
    for failures in ranks.run(3, load_with_failing_planner, str(tmp_path / "a"), call):
        assert sorted(failures) == [0, 1, 2]
        (told,) = set(failures.values())
        assert (told.name, told.rank) == ("RankFailedError", 1)
        assert "UnpicklableError: the planner of one rank broke; while tensor '" in told.text
        assert "was read from file '" in told.text


def load_with_planner_that_fails_before(path: str) -> dict[int, Told]:
    return failed_load(path, Failing("finish_plan", 1, ValueError("no plan of mine")))


def test_a_rank_that_fails_before_it_comes_to_read_does_not_keep_the_others_waiting(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a")
    expected = {1: Told("ValueError", None, None, None, "no plan of mine")}
    assert ranks.run(3, load_with_planner_that_fails_before, str(tmp_path / "a"), timeout_secs=60) == [expected] * 3


class Forging(ReshardLoadPlanner):
    """A planner that asks for a tensor that is not there."""

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        return replace(plan, items=[replace(plan.items[0], storage_index=MetadataIndex("nobody"))])


def load_with_two_that_fail_before_and_in_the_plan(path: str) -> dict[int, Told]:
    planner = Failing("finish_plan", 1, ValueError("no plan of mine"))
    return failed_load(path, Forging() if dist.get_rank() == 0 else planner)


def test_a_rank_that_fails_before_it_comes_to_read_is_told_before_any_other(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a")
    expected = {1: Told("ValueError", None, None, None, "no plan of mine")}
    assert ranks.run(3, load_with_two_that_fail_before_and_in_the_plan, str(tmp_path / "a"), timeout_secs=60) == [expected] * 3


def load_forged_plan(path: str) -> dict[int, Told]:
    return failed_load(path, Forging() if dist.get_rank() == 1 else None)


def test_a_plan_that_does_not_fit_is_one_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a")
    for failures in ranks.run(2, load_forged_plan, str(tmp_path / "a")):
        (told,) = set(failures.values())
        assert (sorted(failures), told.name, told.rank, told.tensor) == ([0, 1], "PlanError", 1, "nobody")


def load_with_read_error(path: str) -> dict[int, Told]:
    """Rank 1 cannot read its second block."""
    read_into = LocalReadFile.read_into
    num_left = [1]

    def broken(self: LocalReadFile, position: int, parts: Sequence[memoryview]) -> None:
        if sum(part.nbytes for part in parts) > 3 * MIB:
            num_left[0] -= 1
            if num_left[0] < 0:
                raise StorageError("read failed", errno=5, file=self._name, found=threading.Lock())
        read_into(self, position, parts)

    if dist.get_rank() == 1:
        LocalReadFile.read_into = broken  # type: ignore[method-assign]
    try:
        return failed_load(path)
    finally:
        LocalReadFile.read_into = read_into  # type: ignore[method-assign]


def test_a_read_error_of_one_rank_is_raised_by_all(ranks: RankPool, tmp_path: Path) -> None:
    manifest = save(tmp_path / "a", codec="raw")
    for failures in ranks.run(2, load_with_read_error, str(tmp_path / "a")):
        (told,) = set(failures.values())
        assert sorted(failures) == [0, 1]
        assert (told.name, told.rank, told.file) == ("StorageError", 1, manifest.files[0].name)
        assert told.tensor in manifest.names
        assert "read failed" in told.text
        assert "<unlocked _thread.lock" in told.text


@pytest.mark.parametrize(("key", "world_size"), [("w.big", 2), ("w.wide", 4), ("tiny.t0", 2), ("o.blob", 3)])
def test_a_flipped_bit_is_found_and_named_on_all_ranks(ranks: RankPool, tmp_path: Path, key: str, world_size: int) -> None:
    manifest = save(tmp_path / "a")
    entry = manifest.entry_id(key)
    assert entry is not None
    chunk = manifest.chunk(int(manifest.entry(entry).chunks[0]))
    file = tmp_path / "a" / manifest.files[chunk.file].name
    data = bytearray(file.read_bytes())
    data[int(manifest.block_position[chunk.first_block]) + 5] ^= 4
    file.write_bytes(data)
    for failures in ranks.run(world_size, failed_load, str(tmp_path / "a")):
        (told,) = set(failures.values())
        assert sorted(failures) == list(range(world_size))
        assert (told.name, told.rank, told.file) == ("DigestMismatchError", 0, file.name)
        # Whoever packs tiny tensors into a block is named by the first of them.
        assert told.tensor == key or key == "tiny.t0"
        assert "the stored bytes of block " in told.text


def test_a_missing_file_is_named_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    manifest = save(tmp_path / "a")
    (tmp_path / "a" / manifest.files[0].name).unlink()
    for failures in ranks.run(2, failed_load, str(tmp_path / "a")):
        (told,) = set(failures.values())
        assert (told.name, told.file) == ("MissingFileError", manifest.files[0].name)
        assert told.rank in (0, 1)


def broadcast_on_one_rank(path: str) -> dict[int, Told]:
    return failed_load(path, broadcast=dist.get_rank() == 1, process_group=dist.group.WORLD)


def test_sharing_on_some_ranks_only_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a")
    for failures in ranks.run(3, broadcast_on_one_rank, str(tmp_path / "a")):
        assert {told.name for told in failures.values()} == {"RankDisagreementError"}
        assert {told.rank for told in failures.values()} == {1}


def load_with_other_group(path: str) -> dict[int, Told]:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True, backend="gloo")
    return failed_load(path, process_group=group)


def test_a_group_of_other_size_than_that_of_the_load_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a")
    for failures in ranks.run(2, load_with_other_group, str(tmp_path / "a")):
        assert {told.name for told in failures.values()} == {"RankDisagreementError"}
        assert "give dcp.load and ShardReader the same process_group" in failures[0].text


def read_as_if_other_checkpoint(path: str) -> Told:
    manifest = Manifest.decode((Path(path) / "MANIFEST").read_bytes())
    opened: list[str] = []
    seen = "another" if dist.get_rank() == 2 else "one"
    try:
        with WorkerPool(1) as pool:
            read_shared(
                manifest,
                opened.append,  # type: ignore[arg-type]
                lambda: ([], None),
                options=options(),
                pool=pool,
                ranks=RankGroup(dist.group.WORLD),
                seen=seen,
                path=path,
            )
    except RankDisagreementError as error:
        assert opened == []
        return Told.of(error)
    raise AssertionError("nobody noticed")


def test_ranks_that_opened_different_checkpoints_are_told_before_anything_is_read(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": torch.ones(3)})
    (told,) = set(ranks.run(3, read_as_if_other_checkpoint, str(tmp_path / "a")))
    assert told.rank == 2
    assert "expected what rank 0 saw: one; found another" in told.text


class Dying(ReshardLoadPlanner):
    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        if dist.get_rank() == 1:
            os._exit(3)
        super().commit_tensor(read_item, tensor)


def load_and_die(path: str) -> None:
    dcp.load(blank("ddp"), storage_reader=ShardReader(path, broadcast=True, bytes_in_flight=16 * MIB), planner=Dying())


def test_a_rank_that_dies_ends_the_others_waiting(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a", codec="raw")
    with pytest.raises(RankFailure) as caught:
        ranks.run(3, load_and_die, str(tmp_path / "a"))
    assert caught.value.failures[1] == "its process ended with exit status 3\n"
    # An exception, not the report of a hang.
    assert isinstance(caught.value.failures[0], BaseException)
    assert isinstance(caught.value.failures[2], BaseException)


# -------------------------------------------------------------------------------------------------------------------- memory


def peak_of_load(path: str, bytes_in_flight: int) -> int:
    """Highest resident memory during a load into touched memory, beyond what was resident before, in bytes. The second load of two."""
    state = {"x": torch.ones(64 * MIB // 4 * 3)}
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        reader = ShardReader(path, broadcast=True, threads=2, bytes_in_flight=bytes_in_flight)
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
        peak = resident("VmHWM") - before
    return peak


def resident(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def test_memory_beyond_the_targets_stays_within_the_bound(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": torch.arange(64.0 * MIB / 4 * 3)}, codec="raw")
    # 192 MiB are loaded. The rest of the allowance is for the interpreter and gloo.
    assert max(ranks.run(2, peak_of_load, str(tmp_path / "a"), 32 * MIB)) <= (32 + 16) * MIB
