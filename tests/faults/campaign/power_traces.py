"""The saves that are recorded for the campaign of power cuts: real ones, by DCP's calls in DCP's order, all ranks in one process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from faults.campaign.io_events import Change, Event, Note
from faults.campaign.recorded_calls import Fault, RecordedCalls
from torch import Tensor

from dcp_engine import BalancedSavePlanner, ShardWriter
from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.backends.calls import installed
from dcp_engine.storage.root import RunRoot

__all__ = ["SCENARIOS", "State", "Trace", "first_save", "move_latest", "next_save", "overwrite", "record", "retirement", "state_of"]

State = dict[str, dict[str, Tensor]]
ROOT = "runs/job"
_NUM_ELEMENTS = (700, 300)


@dataclass(frozen=True, slots=True)
class Trace:
    """What was recorded.

    Attributes:
        name: of the scenario and the number of ranks, for messages.
        events: in order.
        begin: crashes are put from this event on; those before belong to a save that another scenario covers.
        root: directory of the steps, relative to the top.
        contents: what was saved, by a name for it; all have the same keys and shapes.
        can_exchange: names were exchanged where one checkpoint replaces another.
        hit: a fault that was asked for was met.
    """

    name: str
    events: tuple[Event, ...]
    begin: int
    root: str
    contents: dict[str, State]
    can_exchange: bool
    hit: bool


def state_of(content: str, rank: int) -> State:
    """What a rank holds: every bit known from the content's name, so that each sector that is lost shows."""
    rng = torch.Generator().manual_seed(sum(content.encode()) * 1000 + rank)
    model, moment = (torch.randint(-(2**31), 2**31 - 1, (num,), generator=rng, dtype=torch.int32) for num in _NUM_ELEMENTS)
    return {"model": {f"weight{rank}": model}, "optimizer": {f"moment{rank}": moment}}


class Recording:
    """A directory that saves are recorded in.

    Args:
        world_size: ranks, each with a state of its own.
        can_exchange: the file system swaps two names in one step.
        fault: what goes wrong.
    """

    def __init__(self, top: str, world_size: int, *, can_exchange: bool = True, fault: Fault | None = None) -> None:
        self.calls = RecordedCalls(top, can_exchange=can_exchange, fault=fault)
        self.root = os.path.join(top, ROOT)
        self.world_size = world_size
        self.contents: dict[str, State] = {}
        self.shards: list[tuple[int, int]] = []
        self.begin = 0

    def save(self, step: int, content: str, *, overwrite: bool = False) -> None:
        """One checkpoint, with the notes of what its caller knows."""
        path = os.path.join(self.root, f"step-{step:08d}")
        self.begin, self.shards = len(self.calls.events), []
        self.calls.note("saving", path, content)
        states = [state_of(content, rank) for rank in range(self.world_size)]
        self.contents[content] = {part: {k: v for state in states for k, v in state[part].items()} for part in ("model", "optimizer")}
        try:
            self._save(path, states, overwrite)
        except DcpEngineError:
            self.calls.note("failed", path, content)
            if not self.calls.hit:
                raise
        else:
            self.calls.note("saved", path, content)

    def point(self, root: RunRoot, step: int) -> None:
        """LATEST names a step."""
        root.set_latest(step)
        self.calls.note("pointed", root.path_of(step))

    def _save(self, path: str, states: Sequence[State], overwrite: bool) -> None:
        writers = [ShardWriter(path, codec="raw", threads=1, overwrite=overwrite) for _ in states]
        planners = [BalancedSavePlanner() for _ in states]
        plans = []
        for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
            meta = writer.storage_meta()
            planner.set_up_planner(states[rank], meta, rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        self.calls.node = 0
        plans, metadata = planners[0].create_global_plan(plans)
        plans = writers[0].prepare_global_plan(plans)
        results: list[Any] = []
        for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
            begin, self.calls.node = len(self.calls.events), rank
            results.append(writer.write_data(planner.finish_plan(plans[rank]), planner).wait())
            self.shards.append((begin, len(self.calls.events)))
        self.calls.node = 0
        writers[0].finish(metadata, results)

    def events(self, seed: int | None) -> tuple[Event, ...]:
        """What was recorded; what the ranks of the last save did at the same time, each in its own order, is mixed by the seed, if any."""
        events = self.calls.events
        if not self.shards or seed is None:
            return tuple(events)
        rng = random.Random(seed)
        queues = [list(reversed(events[begin:end])) for begin, end in self.shards]
        mixed: list[Event] = []
        while any(queues):
            mixed.append(rng.choice([queue for queue in queues if queue]).pop())
        return (*events[: self.shards[0][0]], *mixed, *events[self.shards[-1][1] :])


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    # Nothing here waits for a device: what a flush does is the model's affair.
    place = tempfile.mkdtemp(prefix="dcp-engine-power-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        yield os.path.realpath(place)
    finally:
        shutil.rmtree(place)


def record(
    scenario: Callable[[Recording], None],
    world_size: int,
    *,
    seed: int | None = None,
    can_exchange: bool = True,
    fault: Fault | None = None,
) -> Trace:
    """Runs a scenario and returns what it did."""
    with _directory() as top:
        recording = Recording(top, world_size, can_exchange=can_exchange, fault=fault)
        with installed(recording.calls):
            scenario(recording)
    name = f"{scenario.__name__} of {world_size}" + ("" if can_exchange else " without exchange")
    if seed is not None and world_size > 1:
        name += f" in order {seed}"
    if fault is not None:
        name += f", EIO of {fault.call} {fault.index}" + (" swallowed" if fault.swallowed else "")
    events = recording.events(seed)
    return Trace(name, events, recording.begin, ROOT, recording.contents, can_exchange, recording.calls.hit)


def first_save(recording: Recording) -> None:
    """Into a directory that is made for it, and so are two above it."""
    recording.save(1, "one")


def next_save(recording: Recording) -> None:
    """Beside an older step."""
    recording.save(1, "one")
    recording.save(2, "two")


def overwrite(recording: Recording) -> None:
    """Over a step that is there."""
    recording.save(1, "one")
    recording.save(1, "other", overwrite=True)


def move_latest(recording: Recording) -> None:
    """A save, and then LATEST."""
    root = RunRoot(recording.root)
    recording.save(1, "one")
    recording.point(root, 1)
    recording.save(2, "two")
    recording.point(root, 2)


def retirement(recording: Recording) -> None:
    """Of an old step."""
    root = RunRoot(recording.root)
    claim = root.claim()
    recording.save(1, "one")
    recording.save(2, "two")
    recording.begin, recording.shards = len(recording.calls.events), []
    recording.calls.note("retiring", root.path_of(1))
    root.retire(1, claim)
    recording.calls.note("retired", root.path_of(1))


SCENARIOS: tuple[tuple[Callable[[Recording], None], bool], ...] = (
    (first_save, True),
    (next_save, True),
    (overwrite, True),
    (overwrite, False),
    (move_latest, True),
    (retirement, True),
)
"""Scenario, and whether names can be exchanged."""


def changes_anything(event: Event) -> bool:
    """Whether a crash after an event is another crash than the one before it."""
    return not isinstance(event, Note) or event.what in ("saved", "retired", "pointed", "claimed", "revoked")


def describe(event: Event) -> str:
    """An event in a few words."""
    return f"{event.what if isinstance(event, Change | Note) else type(event).__name__.lower()} {event.path}"
