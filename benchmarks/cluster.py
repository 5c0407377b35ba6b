"""A save of many ranks without the ranks: their plans are made one after the other, and what would travel is encoded and decoded.

Everything goes through the calls that DCP makes, in DCP's order; messages are pickled as its collectives pickle them. No tensor is written:
files are as long as they would be, and empty. One process per simulation, so that none finds the memory of another.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.files import remove, size_of
from benchmarks.memory import available_bytes, peak_during
from benchmarks.parts import Part
from benchmarks.private import DCPStorageInfo
from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.storage.dtypes import of_tensor_dtype
from dcp_engine.storage.envelope import FOOTER_MAGIC, pack_record
from dcp_engine.storage.footer import Footer, encode_footer
from dcp_engine.storage.limits import HEADER_BYTES, RECORD_BYTES
from dcp_engine.storage.packed_table import PackedTable
from dcp_engine.storage.records import ShardReceipt
from dcp_engine.storage.table import TableBuilder

__all__ = ["Cluster", "simulate"]

_ROWS = 64
_COLUMNS = 512
_CHUNK_BYTES = 4 * _ROWS * _COLUMNS
_BYTES_A_CHUNK = {"ours": 600, "dcp": 5_500}
"""Peak memory of a simulation, as measured, and a little more: it is refused where the machine has less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What to simulate.

    Attributes:
        engine: "ours" or "dcp".
        collect: leave Python's garbage collector on.
        ranks: number of ranks.
        tensors: number of tensors, each sharded over all ranks along its first dimension: a chunk of 128 KiB for every rank.
        path: where the checkpoint goes; does not exist.
    """

    engine: str
    collect: bool
    ranks: int
    tensors: int
    path: str

    @property
    def num_chunks(self) -> int:
        """Of all ranks."""
        return self.ranks * self.tensors


def simulate(cluster: Cluster) -> dict[str, float]:
    """One save's plans and results, and the load plan of one rank of another topology.

    Returns:
        Seconds of the coordinator: ``secs``, which are ``plan_secs`` (decode the local plans, plan, encode the answers) and ``finish_secs``
        (decode the results, finish, encode the metadata for all). Of one rank: ``local_secs`` (make its plan, encode it),
        ``accept_secs`` (decode its answer), ``receive_secs`` (decode the metadata); of one rank of another topology: ``open_secs`` and
        ``load_plan_secs``. Bytes that travel: ``gathered_bytes``, ``scattered_bytes``, ``result_bytes``, ``broadcast_bytes``; that are
        stored: ``manifest_bytes``. ``peak_bytes``: memory of this process.

    Raises:
        MemoryError: the machine has too little available.
    """
    needed = _BYTES_A_CHUNK[cluster.engine] * cluster.num_chunks
    if needed > available_bytes():
        raise MemoryError(f"needs about {needed / 1e9:.1f} GB of memory, and {available_bytes() / 1e9:.1f} GB are available")
    facts: dict[str, float] = {}

    def run() -> None:
        if not cluster.collect:
            gc.disable()
        try:
            facts.update(_save(cluster))
            facts.update(_load(cluster))
        finally:
            gc.enable()

    try:
        facts["peak_bytes"] = peak_during(run)
    finally:
        remove(cluster.path)
    facts["secs"] = facts["plan_secs"] + facts["finish_secs"]
    return facts


@contextmanager
def _clock(facts: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    facts[name] = time.perf_counter() - begin


def _save(cluster: Cluster) -> dict[str, float]:
    facts: dict[str, float] = {}
    state = _state(cluster, cluster.ranks, [torch.empty(_ROWS, _COLUMNS) for _ in range(cluster.tensors)])  # address space alone
    gathered = []
    local_secs = 0.0
    for rank in reversed(range(cluster.ranks)):  # the coordinator's planner and writer are the last ones
        _take_place(state, rank)
        begin = time.perf_counter()
        planner, writer, plan = _local_plan(cluster, rank, state)
        gathered.append(_dumps(plan))
        local_secs += time.perf_counter() - begin
    gathered.reverse()
    facts["local_secs"] = local_secs / cluster.ranks
    facts["gathered_bytes"] = sum(map(len, gathered))
    del plan
    with _clock(facts, "plan_secs"):
        plans = [_loads(message) for message in gathered]
        del gathered
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
        scattered = [_dumps(plan) for plan in plans]
    del plans
    facts["scattered_bytes"] = sum(map(len, scattered))
    with _clock(facts, "accept_secs"):
        planner.finish_plan(_loads(scattered[0]))
    results = []
    for rank, message in enumerate(scattered):
        plan = _loads(message)
        written = _written_by_us(cluster, rank) if cluster.engine == "ours" else _written_by_dcp(plan, rank)
        results.append(_dumps(written))
    del scattered, plan
    facts["result_bytes"] = sum(map(len, results))
    with _clock(facts, "finish_secs"):
        decoded = [_loads(message) for message in results]
        del results
        writer.finish(metadata, decoded)
        broadcast = _dumps(metadata)
    facts["broadcast_bytes"] = len(broadcast)
    with _clock(facts, "receive_secs"):
        _loads(broadcast)
    facts["manifest_bytes"] = size_of(os.path.join(cluster.path, "MANIFEST" if cluster.engine == "ours" else ".metadata"))
    return facts


def _load(cluster: Cluster) -> dict[str, float]:
    """One rank in the middle of half as many."""
    facts: dict[str, float] = {}
    ranks = max(1, cluster.ranks // 2)
    target = torch.empty(_ROWS * cluster.ranks // ranks, _COLUMNS)
    state = _state(cluster, ranks, [target] * cluster.tensors)
    _take_place(state, ranks // 2)
    reader: Any = ShardReader(cluster.path) if cluster.engine == "ours" else FileSystemReader(cluster.path)
    planner: Any = ReshardLoadPlanner() if cluster.engine == "ours" else DefaultLoadPlanner()
    with _clock(facts, "open_secs"):
        metadata = reader.read_metadata()
    with _clock(facts, "load_plan_secs"):
        planner.set_up_planner(state, metadata, False)
        reader.set_up_storage_reader(metadata, False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
    if len(plan.items) < cluster.tensors:
        raise ValueError(f"a load plan of {len(plan.items)} items for {cluster.tensors} tensors")
    return facts


def _local_plan(cluster: Cluster, rank: int, state: dict[str, Any]) -> tuple[Any, Any, SavePlan]:
    planner: Any = BalancedSavePlanner() if cluster.engine == "ours" else DefaultSavePlanner()
    writer: Any = ShardWriter(cluster.path) if cluster.engine == "ours" else FileSystemWriter(cluster.path)
    planner.set_up_planner(state, writer.storage_meta(), rank == 0)
    if cluster.engine == "ours":
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    else:
        writer.set_up_storage_writer(rank == 0)
    return planner, writer, writer.prepare_local_plan(planner.create_local_plan())


def _state(cluster: Cluster, ranks: int, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """What the first of some ranks holds. Names as long as those of real models."""
    shape = torch.Size([_ROWS * cluster.ranks, _COLUMNS])
    parts = {}
    for number, tensor in enumerate(tensors):
        name = f"transformer.layers.{number // 20}.attention.projection_{number % 20}.weight"
        parts[name] = Part.of(tensor, whole=shape, offsets=torch.Size([0, 0]))
    return {"model": parts}


def _take_place(state: dict[str, Any], rank: int) -> None:
    """Make it what another rank holds: making the state of every rank anew would take as long as planning it."""
    for part in state["model"].values():
        part.offsets = torch.Size([part.local.shape[0] * rank, 0])


def _written_by_us(cluster: Cluster, rank: int) -> list[WriteResult]:
    """The receipt of a rank whose chunks were compressed a little, each of them a block, with digests that do not compress."""
    nonce = _nonce(cluster.path)
    noise = random.Random(rank)
    table = TableBuilder()
    dtype = of_tensor_dtype(torch.float32)
    stored_bytes = 0
    shape = (_ROWS * cluster.ranks, _COLUMNS)
    for number in range(cluster.tensors):
        name = f"model.transformer.layers.{number // 20}.attention.projection_{number % 20}.weight"
        stored = _CHUNK_BYTES * 5 // 6 - noise.randrange(2048)
        block = table.add_block(_CHUNK_BYTES, stored, 2, noise.getrandbits(64))
        table.add_chunk(name, dtype.code, shape, (_ROWS * rank, 0), (_ROWS, _COLUMNS), block, 0)
        stored_bytes += -(-stored // 64) * 64
    built = table.build()
    _, body = pack_record(FOOTER_MAGIC, encode_footer(Footer(nonce, "model", rank, cluster.ranks, built)))
    name = f"model-{rank:05d}.shard"
    size_bytes = HEADER_BYTES + stored_bytes + len(body) + RECORD_BYTES
    with open(os.path.join(_attempt(cluster.path), name), "xb") as file:
        file.truncate(size_bytes)
    receipt = ShardReceipt(
        name=name,
        component="model",
        rank=rank,
        world_size=cluster.ranks,
        nonce=nonce,
        size_bytes=size_bytes,
        table=PackedTable.of(built),
        footer_sha256=hashlib.sha256(body).digest(),
        raw_bytes=_CHUNK_BYTES * cluster.tensors,
        stored_bytes=stored_bytes,
    )
    return [WriteResult(index=MetadataIndex(name), size_in_bytes=size_bytes, storage_data=receipt)]


def _written_by_dcp(plan: SavePlan, rank: int) -> list[WriteResult]:
    """What DCP's file system writer reports: a record an item, with the place in the file."""
    return [
        WriteResult(item.index, _CHUNK_BYTES, DCPStorageInfo(f"__{rank}_0.distcp", number * (_CHUNK_BYTES + 1500), _CHUNK_BYTES + 1500))
        for number, item in enumerate(plan.items)
    ]


def _attempt(path: str) -> str:
    """The folder in which our writer prepares a checkpoint, as docs/format.md names it."""
    parent, name = os.path.split(path)
    (found,) = [entry for entry in os.listdir(parent) if entry.startswith(f".tmp-{name}-")]
    return os.path.join(parent, found)


def _nonce(path: str) -> str:
    return _attempt(path).rpartition("-")[2]


def _dumps(message: object) -> bytes:
    return pickle.dumps(message)


def _loads(message: bytes) -> Any:
    return pickle.loads(message)
