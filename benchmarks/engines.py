"""Every engine in the same form: save a state to a path, load it from there into tensors that exist. Only public calls."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import limits
from benchmarks.files import fsync_tree
from benchmarks.private import ZStandardExtension
from benchmarks.results import Role
from benchmarks.state import State
from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter

__all__ = [
    "PEERS",
    "Engine",
    "begin_single_rank_group",
    "dcp_engine",
    "dcp_process",
    "dcp_stock",
    "dcp_zstandard",
    "end_group",
    "peers",
    "physical_limit",
    "version_of",
]

PEERS = ("safetensors", "torch-checkpointing", "torchsnapshot", "zipnn")
"""Distributions that are measured where they are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine in one configuration.

    Attributes:
        name: as the tables show it.
        role: ours, DCP, another peer, or a physical limit.
        save: writes a state to a path that does not exist yet.
        load: fills the tensors of a state from a path.
        comparable: see :class:`benchmarks.results.SystemResult`.
        note: what a reader has to know.
        unavailable: why it cannot run; empty where it can.
        begin: before a run, outside the clock.
        end: after a run, outside the clock.
    """

    name: str
    role: Role
    save: Callable[[str, State], None]
    load: Callable[[str, State], None]
    comparable: bool = True
    note: str = ""
    unavailable: str = ""
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None


def version_of(distribution: str) -> str | None:
    """Its version; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def dcp_engine(*, codec: str, threads: int, name: str = "", verify: bool = True) -> Engine:
    """Ours, with our planners; always durable.

    Args:
        codec: of the writer.
        threads: of writer and reader.
        name: as the tables show it.
        verify: check the digests of what is loaded. Without them it has no part in the ratios of those that check.
    """

    def save(path: str, state: State) -> None:
        dcp.save(state.nested, storage_writer=ShardWriter(path, codec=codec, threads=threads), planner=BalancedSavePlanner())

    def load(path: str, state: State) -> None:
        dcp.load(state.nested, storage_reader=ShardReader(path, threads=threads, verify=verify), planner=ReshardLoadPlanner())

    note = "" if verify else "digests not compared, for peers that have none"
    return Engine(name=name or f"dcp-engine {codec}", role="ours", save=save, load=load, comparable=verify, note=note)


def dcp_stock(*, threads: int, sync: bool = True, durable: bool = True, checksums: bool = True) -> Engine:
    """The installed torch's DCP with its planners.

    Args:
        threads: of its writer; its reader has one.
        sync: its ``sync_files``.
        durable: fsync means something where it saves.
        checksums: CRC-32 over what it writes, as torch does unless it is told not to.
    """

    def save(path: str, state: State) -> None:
        torch.serialization.set_crc32_options(checksums)
        try:
            dcp.save(state.nested, storage_writer=FileSystemWriter(path, thread_count=threads, sync_files=sync))
        finally:
            torch.serialization.set_crc32_options(True)

    name = f"DCP, {threads} thread{'s' if threads > 1 else ''}" + ("" if not durable else ", fsync" if sync else ", no fsync")
    note = "" if sync or not durable else "not durable: no part in the ratios"
    if not checksums:
        name, note = f"{name}, no CRC-32", "no checksums: no part in the ratios"
    return Engine(name=name, role="dcp", save=save, load=_dcp_load, comparable=not note, note=note)


def dcp_zstandard(*, threads: int) -> Engine:
    """DCP with its ZStandard extension."""

    def save(path: str, state: State) -> None:
        dcp.save(state.nested, storage_writer=FileSystemWriter(path, thread_count=threads, _extensions=[ZStandardExtension()]))

    name = f"DCP + ZStandard, {threads} thread{'s' if threads > 1 else ''}"
    return Engine(name=name, role="dcp", save=save, load=_dcp_load, note="its reader has one thread")


def dcp_process(*, threads: int) -> Engine:
    """DCP's process executor, waited for: what a save takes that runs beside the training."""

    def save(path: str, state: State) -> None:
        writer = FileSystemWriter(path, thread_count=threads)
        response: Any = dcp.async_save(state.nested, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        response.result()

    note = "stages and then saves in a daemon; the first round starts it; memory of the daemon is not counted"
    return Engine(
        name=f"DCP process, {threads} threads, fsync",
        role="dcp",
        save=save,
        load=_dcp_load,
        note=note,
        begin=begin_single_rank_group,
        end=end_group,
    )


def begin_single_rank_group() -> None:
    """A process group of this process alone, which DCP's process executor asks for."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def end_group() -> None:
    """No process group any more. The daemon has one of its own, and stays."""
    if dist.is_initialized():
        dist.destroy_process_group()


def physical_limit(*, threads: int, sync: bool) -> Engine:
    """Plain calls by as many threads."""
    return Engine(
        name=f"plain pwrite{' + fsync' if sync else ''}, {threads} threads",
        role="limit",
        save=lambda path, state: limits.plain_write(path, state, threads=threads, sync=sync),
        load=lambda path, state: limits.plain_read(path, state, threads=threads),
        note="a file a thread, nothing checked",
    )


def peers(*, sync: bool) -> list[Engine]:
    """The engines that are not DCP, in their default configuration; a peer that is not installed says so.

    Args:
        sync: make what they saved durable, inside the clock, as a checkpoint has to be: none of them does.
    """
    makers = (_safetensors, _torch_save, _torch_save_mmap, _torch_checkpointing, _torchsnapshot)
    return [_synced(make()) if sync else make() for make in makers]


def _synced(engine: Engine) -> Engine:
    def save(path: str, state: State) -> None:
        engine.save(path, state)
        fsync_tree(path)

    return Engine(
        name=f"{engine.name} + fsync",
        role=engine.role,
        save=save,
        load=engine.load,
        note=engine.note,
        unavailable=engine.unavailable,
    )


def _dcp_load(path: str, state: State) -> None:
    dcp.load(state.nested, storage_reader=FileSystemReader(path))


def _safetensors() -> Engine:
    def save(path: str, state: State) -> None:
        from safetensors.torch import save_file

        save_file(state.flat, path)

    def load(path: str, state: State) -> None:
        from safetensors.torch import load_file

        loaded = load_file(path)  # views of the mapped file; a tenth quicker than asking for them one by one
        for name, tensor in state.flat.items():
            tensor.copy_(loaded[name])

    return Engine(name="safetensors", role="peer", save=save, load=load, unavailable=_missing("safetensors"))


def _torch_save() -> Engine:
    return Engine(name="torch.save", role="peer", save=_save_with_torch, load=lambda path, state: _load_with_torch(path, state, mmap=False))


def _torch_save_mmap() -> Engine:
    return Engine(
        name="torch.load mmap", role="peer", save=_save_with_torch, load=lambda path, state: _load_with_torch(path, state, mmap=True)
    )


def _save_with_torch(path: str, state: State) -> None:
    torch.save(state.flat, path)


def _load_with_torch(path: str, state: State, *, mmap: bool) -> None:
    loaded = torch.load(path, mmap=mmap, weights_only=True)
    for name, tensor in state.flat.items():
        tensor.copy_(loaded[name])


def _torch_checkpointing() -> Engine:
    def manager() -> Any:
        module = importlib.import_module("torch_checkpointing")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig(use_direct_io=False)
        return module.CheckpointManager(module.CheckpointManager.Config(save=module.SyncCheckpointSaverConfig(), storage_config=storage))

    def save(path: str, state: State) -> None:
        manager().save(path, state.nested)

    def load(path: str, state: State) -> None:
        manager().load(path, into=state.nested)

    note = "synchronous; without its direct I/O, which is slower on tmpfs and fails on ext4"
    return Engine(name="torch-checkpointing", role="peer", save=save, load=load, note=note, unavailable=_missing("torch-checkpointing"))


def _torchsnapshot() -> Engine:
    def module() -> Any:
        return importlib.import_module("torchsnapshot")

    def save(path: str, state: State) -> None:
        module().Snapshot.take(path=path, app_state={"state": module().StateDict(**state.flat)})

    def load(path: str, state: State) -> None:
        module().Snapshot(path).restore({"state": module().StateDict(**state.flat)})

    return Engine(name="torchsnapshot", role="peer", save=save, load=load, unavailable=_missing("torchsnapshot"))


def _missing(distribution: str) -> str:
    return "" if version_of(distribution) else f"not installed: pip install {distribution}"
