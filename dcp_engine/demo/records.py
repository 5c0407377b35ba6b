"""What a training process tells the driver: one JSON object a line, written by rank 0 and read while it still runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

from dcp_engine.testing.records import StepRecord, step_record_of

__all__ = ["LegRecords", "RecordWriter", "SaveRecord", "StartRecord", "StepRecord", "read_records"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """The job is ready to train.

    Attributes:
        world_size: ranks of the job.
        layout: how the model lies over them, in words.
        resumed_from: step of the checkpoint that was loaded; None for a fresh start.
        num_parameters: parameters of the model.
        corpus_bytes: bytes of text that training draws from.
        load_secs: from choosing the checkpoint to the state being in place; 0 for a fresh start.
    """

    world_size: int
    layout: str
    resumed_from: int | None
    num_parameters: int
    corpus_bytes: int
    load_secs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """One published checkpoint.

    Attributes:
        step: training step that it holds.
        path: where it lies.
        save_secs: from the call until it was published.
        stall_secs: how long the training loop stood still for it: the call itself and, where the save before was not finished, the wait.
        raw_bytes: tensors and objects before compression, replicas and ties counted once.
        stored_bytes: all files of the checkpoint.
    """

    step: int
    path: str
    save_secs: float
    stall_secs: float
    raw_bytes: int
    stored_bytes: int


Record = StartRecord | StepRecord | SaveRecord

_KINDS: dict[str, Callable[..., Record]] = {"start": StartRecord, "step": step_record_of, "save": SaveRecord}
_NAMES: dict[type[Record], str] = {StartRecord: "start", StepRecord: "step", SaveRecord: "save"}


@dataclass(frozen=True, slots=True)
class LegRecords:
    """All that one job wrote, in its order."""

    start: StartRecord | None
    steps: tuple[StepRecord, ...]
    saves: tuple[SaveRecord, ...]


class RecordWriter:
    """Appends records to a new file. One thread at a time.

    Raises:
        FileExistsError: the file is there already: records of two jobs must not mix.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "x", encoding="utf-8"):
            pass

    def write(self, record: Record) -> None:
        """Writes one line, whole, so that a process killed later has still told it."""
        # json writes the shortest digits that give the same float back, so that a comparison bit for bit survives the file.
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": _NAMES[type(record)], **asdict(record)}) + "\n")


def read_records(path: str) -> LegRecords:
    """Reads what is there so far; a file that does not exist yet is empty, and a last line still being written is left for later."""
    start: StartRecord | None = None
    steps: list[StepRecord] = []
    saves: list[SaveRecord] = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")[:-1]
        for line in lines:
            fields = json.loads(line)
            record = _KINDS[fields.pop("kind")](**fields)
            match record:
                case StartRecord():
                    start = record
                case StepRecord():
                    steps.append(record)
                case SaveRecord():
                    saves.append(record)
    return LegRecords(start, tuple(steps), tuple(saves))
