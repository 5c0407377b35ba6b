"""F9: replicas share the writing, and where asked the reading. Real processes over gloo."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.files import bytes_read, places, remove
from benchmarks.harness import Case, Facts, System, in_fresh_process
from benchmarks.options import Options
from benchmarks.results import CaseResult, Claim
from benchmarks.state import check_same, mixed_state, scramble
from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter

__all__ = ["Replicas"]

_LAYOUTS = {"DDP, 2 replicas": (2, 1), "DDP, 4 replicas": (4, 1), "HSDP, 2 replicas of 2 shards": (2, 2)}
_TIMEOUT = timedelta(seconds=120)


class Replicas:
    """The row."""

    NAME = "F9"
    TITLE = "DDP and HSDP: replicas share the work"

    def cases(self, options: Options) -> Iterator[Case]:
        """Each layout, saved and loaded."""
        small = replace(options, state_bytes=max(options.state_bytes // 10, 3_000_000))
        place = places(options)[0]
        for layout in _LAYOUTS:
            for save in (True, False):
                name = f"{layout}: {'save' if save else 'load'}"
                systems = [_system(label, layout, place.path(name, label), small, save=save) for label in _labels(save=save)]
                yield Case(
                    name=name,
                    systems=systems,
                    rounds=1 if options.quick else 2,  # the figures are bytes
                    nbytes=_nbytes(small),
                    measure_memory=False,
                    close=lambda name=name: remove(place.path(name)),  # type: ignore[misc]
                )

    def claims(self, results: list[CaseResult]) -> list[Claim]:
        """Bytes of the rank that moves most, against an even share."""
        claims = []
        for case in results:
            if case.name.endswith("save"):
                ours = case.best("ours")
                measured = ours.fact("largest_share") if ours else None
                claims.append(Claim(f"{case.name}: most that a rank writes, in even shares", 1.05, measured, at_most=True))
            else:
                asked = case.named("dcp-engine, broadcast")
                measured = asked.fact("times_read") if asked else None
                claims.append(Claim(f"{case.name}: times the whole is read, broadcast=True", 1.05, measured, at_most=True))
        return claims

    def notes(self, options: Options) -> list[str]:
        """What a reader has to know."""
        return [
            "All ranks run on this machine and share its cores: seconds compare engines, not numbers of ranks.",
            "Bytes written are those of the files that a rank leaves; bytes read those of its read calls, all ranks together.",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What one rank does.

    Attributes:
        label: the system.
        path: of the checkpoint.
        replicas: replicas of the state.
        shards: shards of each replica.
        rank: this rank.
        save: write it; otherwise read it.
        options: for the state and threads.
    """

    label: str
    path: str
    replicas: int
    shards: int
    rank: int
    save: bool
    options: Options


def _labels(*, save: bool) -> list[str]:
    return ["dcp-engine raw", "DCP"] if save else ["dcp-engine raw", "dcp-engine, broadcast", "DCP"]


def _nbytes(options: Options) -> int:
    return mixed_state(options).nbytes


def _system(label: str, layout: str, path: str, options: Options, *, save: bool) -> System:
    replicas, shards = _LAYOUTS[layout]

    def ranks(*, saving: bool) -> list[dict[str, float]]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        jobs = [
            _Job(label=label, path=path, replicas=replicas, shards=shards, rank=rank, save=saving, options=options)
            for rank in range(replicas * shards)
        ]
        remove(f"{path}.store")
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(lambda job: in_fresh_process(_rank, job), jobs))

    def run() -> Facts:
        told = ranks(saving=save)
        nbytes = told[0]["nbytes"]
        facts = {"secs": max(rank["secs"] for rank in told)}
        if save:
            written = _bytes_by_rank(path)
            facts["largest_share"] = max(written.values()) * len(told) / nbytes
        else:
            facts["times_read"] = sum(rank["bytes_by_calls"] for rank in told) / nbytes
        return facts

    def prepare() -> None:
        remove(path)
        ranks(saving=True)

    missing = label.endswith("broadcast") and "broadcast" not in inspect.signature(ShardReader).parameters
    return System(
        name=label,
        role="dcp" if label == "DCP" else "ours",
        run=run,
        prepare=(lambda: None) if save else prepare,
        before=(lambda: remove(path)) if save else (lambda: None),
        unavailable="ShardReader has no such option yet" if missing else "",
    )


def _bytes_by_rank(path: str) -> dict[int, int]:
    """Ours are ``<component>-<rank>.shard`` or ``<component>-<rank>.<stripe>.shard``, DCP's ``__<rank>_<number>.distcp``."""
    written: dict[int, int] = {}
    for entry in os.scandir(path):
        match = re.fullmatch(r"[a-z0-9_]+-(\d+)(?:\.\d+)?\.shard|__(\d+)_\d+\.distcp", entry.name)
        if match:
            rank = int(match[1] or match[2])
            written[rank] = written.get(rank, 0) + entry.stat().st_size
    return written


def _rank(job: _Job) -> dict[str, float]:
    """One rank's save, or load and comparison."""
    torch.set_num_threads(1)
    world_size = job.replicas * job.shards
    store = dist.FileStore(f"{job.path}.store", world_size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        expected = mixed_state(job.options)
        state = mixed_state(job.options)
        if not job.save:
            scramble(state)
        laid_out = _lay_out(state.nested, job)
        dist.barrier()
        before = bytes_read()[0]
        begin = time.perf_counter()
        _action(job)(laid_out)
        secs = time.perf_counter() - begin
        called = bytes_read()[0] - before
        dist.barrier()
        if job.shards == 1:
            check_same(state, expected)
        elif not job.save:
            _check_shards(laid_out, expected.nested)
        return {"secs": secs, "nbytes": expected.nbytes, "bytes_by_calls": called}
    finally:
        dist.destroy_process_group()


def _action(job: _Job) -> Callable[[dict[str, Any]], None]:
    ours = job.label != "DCP"
    threads = max(1, job.options.threads // (job.replicas * job.shards))
    if job.save and ours:
        return lambda state: _none(
            dcp.save(state, storage_writer=ShardWriter(job.path, codec="raw", threads=threads), planner=BalancedSavePlanner())
        )
    if job.save:
        return lambda state: _none(dcp.save(state, storage_writer=FileSystemWriter(job.path, thread_count=threads)))
    if ours:
        asked: dict[str, Any] = {"broadcast": True, "process_group": dist.group.WORLD} if job.label.endswith("broadcast") else {}
        return lambda state: dcp.load(state, storage_reader=ShardReader(job.path, threads=threads, **asked), planner=ReshardLoadPlanner())
    return lambda state: dcp.load(state, storage_reader=FileSystemReader(job.path))


def _none(_: object) -> None:
    """Drops a value where a call must return none."""


def _lay_out(nested: dict[str, Any], job: _Job) -> dict[str, Any]:
    """Plain tensors for DDP; for HSDP, DTensors of this rank's rows, copies of the whole ones' memory."""
    if job.shards == 1:
        return nested
    mesh = init_device_mesh("cpu", (job.replicas, job.shards), mesh_dim_names=("replicate", "shard"))
    number = mesh["shard"].get_local_rank()

    def place(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: place(inner) for key, inner in value.items()}
        parts = value.chunk(job.shards)
        local = parts[number].clone() if number < len(parts) else value[:0].clone()
        placements = (Replicate(), Shard(0))
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())

    return place(nested)  # type: ignore[no-any-return]


def _check_shards(found: Any, expected: Any) -> None:
    from benchmarks.harness import MismatchError

    if isinstance(found, dict):
        for key, inner in found.items():
            _check_shards(inner, expected[key])
        return
    parts = expected.chunk(found.device_mesh["shard"].size())
    number = found.device_mesh["shard"].get_local_rank()
    local = found.to_local()
    if local.numel() and not torch.equal(local.view(torch.int32), parts[number].view(torch.int32)):
        raise MismatchError("a shard is not what was saved")
