"""How the training process saves and loads: asynchronously into a directory per step, and back from the newest complete one."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_engine.background import BackgroundSaver, SaveHandle
from dcp_engine.demo.records import SaveRecord
from dcp_engine.errors import CheckpointNotFoundError
from dcp_engine.planners.save import BalancedSavePlanner
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.publish import open_checkpoint
from dcp_engine.storage.steps import committed_steps, step_name
from dcp_engine.storage.writer import ShardWriter

__all__ = ["AsyncSaver", "DyingSavePlanner", "newest_step"]


class DyingSavePlanner(BalancedSavePlanner):
    """Kills its own process, as the kernel or an operator would, when half of the rank's tensors have been handed to the writer.

    Args:
        witness_path: file in which it leaves word of itself just before, so that a death of another kind is not taken for this one.
    """

    def __init__(self, witness_path: str) -> None:
        super().__init__()
        self._witness_path = witness_path
        self._lock = threading.Lock()
        self._num_tensors = 0
        self._handed_over: set[MetadataIndex] = set()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._num_tensors = sum(item.type is not WriteItemType.BYTE_IO for item in plan.items)
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        # Objects are resolved before the first file exists: a death among them would leave no shard half-written.
        if write_item.type is not WriteItemType.BYTE_IO:
            with self._lock:
                if len(self._handed_over) >= self._num_tensors // 2:
                    self._die()
                self._handed_over.add(write_item.index)
        return super().resolve_data(write_item)

    def _die(self) -> None:
        words = {"rank": dist.get_rank(), "num_tensors": self._num_tensors, "num_handed_over": len(self._handed_over)}
        with open(self._witness_path, "w", encoding="utf-8") as file:
            json.dump(words, file)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _PendingSave:
    handle: SaveHandle
    started_secs: float
    stall_secs: float
    ended_secs: Future[float]


class AsyncSaver:
    """Saves beside training, each into ``<root>/step-<8 digits>``. All ranks call it alike. Not thread-safe.

    Args:
        root: folder of the steps.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._saver = BackgroundSaver()
        self._pending: _PendingSave | None = None

    def save(self, state: dict[str, Any], *, step: int, planner: BalancedSavePlanner | None = None) -> SaveRecord | None:
        """Starts a save and returns when the state has been copied.

        Args:
            state: state dict; may be changed as soon as this returns.
            step: training step that it holds.
            planner: planner of this save; by default the saver's own.

        Returns:
            The save before, if there was one that nobody had waited for yet.
        """
        started_secs = time.perf_counter()
        before = self._await_pending()
        handle = self._saver.submit(state, writer=ShardWriter(os.path.join(self._root, step_name(step))), planner=planner, step=step)
        stall_secs = time.perf_counter() - started_secs
        ended_secs: Future[float] = Future()
        handle.durable.add_done_callback(lambda _: ended_secs.set_result(time.perf_counter()))
        self._pending = _PendingSave(handle, started_secs, stall_secs, ended_secs)
        return None if before is None else _record(before)

    def close(self) -> SaveRecord | None:
        """Waits for the pending save, if there is one, and raises what went wrong in it. None can begin afterwards."""
        before = self._await_pending()
        self._saver.close()
        return None if before is None else _record(before)

    def _await_pending(self) -> _PendingSave | None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.handle.result()
        return pending


def _record(save: _PendingSave) -> SaveRecord:
    step, path = save.handle.step, save.handle.path
    assert step is not None, "every save here has one"
    raw_bytes, stored_bytes = _sizes(path)
    return SaveRecord(
        step=step,
        path=path,
        save_secs=save.ended_secs.result() - save.started_secs,
        stall_secs=save.stall_secs,
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
    )


def _sizes(path: str) -> tuple[int, int]:
    """Bytes of a checkpoint's content, and of its files."""
    opened = open_checkpoint(path)
    manifest = Manifest.decode(opened.manifest_bytes, path=path)
    return int(manifest.table.block_raw_bytes.sum()), len(opened.manifest_bytes) + sum(file.size_bytes for file in manifest.files)


def newest_step(root: str) -> int:
    """The newest complete step. All ranks call it; the first decides.

    Raises:
        CheckpointNotFoundError: there is none, on every rank.
    """
    newest = [max(committed_steps(root), default=None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(newest)
    if newest[0] is None:
        raise CheckpointNotFoundError("there is no complete step to resume from", path=root)
    return newest[0]
