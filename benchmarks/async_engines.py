"""The engines that save beside training, in the form of :class:`benchmarks.beside.AsyncEngine`. Only public calls."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.beside import AsyncEngine, Started
from benchmarks.engines import begin_single_rank_group, end_group
from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.background import BackgroundSaver, Priority
from dcp_engine.staging import DoubleBufferStager

__all__ = ["background_saver", "dcp_async", "plain_async_save"]

_State = Mapping[str, Any]


def background_saver(
    *, executor: str, threads: int, priority: Priority | None = None, name: str = "", optimizer: Any = None
) -> AsyncEngine:
    """Ours: a stager with two buffers and a saver beside training.

    Args:
        executor: ``"thread"`` or ``"process"``.
        threads: of the writer.
        priority: of the background work.
        name: in the tables.
        optimizer: whose steps wait, on the device, until the state has been copied; None where the state is on the CPU.
    """
    held: dict[str, Any] = {}

    def open_() -> None:
        held["saver"] = saver = BackgroundSaver(executor=executor, priority=priority)
        if optimizer is not None:
            held["hook"] = saver.stager.protect(optimizer)

    def start(path: str, state: _State) -> Started:
        return Started(durable=held["saver"].submit(state, writer=ShardWriter(path, codec="raw", threads=threads)).durable)

    def close() -> None:
        if "hook" in held:
            held.pop("hook").remove()
        if "saver" in held:
            held.pop("saver").close()

    return AsyncEngine(name=name or f"dcp-engine {executor}", role="ours", open=open_, start=start, load=_our_load(threads), close=close)


def plain_async_save(*, threads: int, optimizer: Any = None) -> AsyncEngine:
    """``dcp.async_save`` with our stager, planner and writer, for who does not want our saver."""
    held: dict[str, Any] = {}
    planner = BalancedSavePlanner()

    def open_() -> None:
        held["stager"] = DoubleBufferStager()
        if optimizer is not None:
            held["hook"] = held["stager"].protect(optimizer)

    def start(path: str, state: _State) -> Started:
        writer = ShardWriter(path, codec="raw", threads=threads)
        answer = dcp.async_save(dict(state), storage_writer=writer, planner=planner, async_stager=held["stager"])
        return Started(durable=answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer)

    def close() -> None:
        if "hook" in held:
            held.pop("hook").remove()
        if "stager" in held:
            held.pop("stager").close()

    return AsyncEngine(name="dcp.async_save, our stager", role="ours", open=open_, start=start, load=_our_load(threads), close=close)


def dcp_async(
    *, threads: int, process: bool = False, kept: StagingOptions | None = None, name: str, needs_cuda: bool = False
) -> AsyncEngine:
    """DCP's ``async_save``, durable.

    Args:
        name: in the tables.
        threads: of its writer.
        process: save in its daemon process, else in a thread.
        kept: options of a ``DefaultStager`` that all saves use, and that so keeps its memory; None: what ``async_save`` makes for each.
        needs_cuda: the options ask for a CUDA device.
    """
    held: dict[str, Any] = {}

    def open_() -> None:
        if kept is not None:
            held["stager"] = DefaultStager(kept)

    def start(path: str, state: _State) -> Started:
        answer = dcp.async_save(
            dict(state),
            storage_writer=FileSystemWriter(path, thread_count=threads),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD,
            async_stager=held.get("stager"),
        )
        if isinstance(answer, AsyncSaveResponse):
            return Started(durable=answer.upload_completion, staged=answer.staging_completion)
        assert isinstance(answer, Future)
        return Started(durable=answer)

    def close() -> None:
        if "stager" in held:
            held.pop("stager").close()

    return AsyncEngine(
        name=name,
        role="dcp",
        open=open_,
        start=start,
        load=lambda path, state: dcp.load(dict(state), storage_reader=FileSystemReader(path)),
        close=close,
        begin=begin_single_rank_group if process else lambda: None,
        end=end_group if process else lambda: None,
        unavailable="asks for a CUDA device" if needs_cuda and not torch.cuda.is_available() else "",
    )


def _our_load(threads: int) -> Any:
    return lambda path, state: dcp.load(dict(state), storage_reader=ShardReader(path, threads=threads), planner=ReshardLoadPlanner())
