"""What the ranks of a run tell of it: one JSON object a line and a file for each rank, whole however the process ends. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["RecordWriter", "Scalar", "StepRecord", "read_records", "step_record_of"]

Scalar = float | int | bool | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step on one rank. What the run does not tell is None or empty.

    Attributes:
        step: its number; steps of a run follow each other.
        loss: of this rank, or of all.
        grad_norm: of the gradients.
        lr: learning rate of each parameter group.
        scaler: what decides the scale of the loss, by name.
        batch: ids of the samples of this rank; or a digest, where there are no ids.
        draws: random numbers that were drawn in this step, as a text that is equal for equal numbers.
        generators: digest of the state of each global generator at the end of the step, by name.
        counters: progress, by name.
        values: anything else that the run recorded, by name.
        state: digest of each value of the whole training state at the end of the step, by key.
        at_secs: when it was recorded, by the machine's monotonic clock; not compared.
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: tuple[float, ...] = ()
    scaler: Mapping[str, Scalar] = field(default_factory=dict)
    batch: tuple[int, ...] | str | None = None
    draws: str | None = None
    generators: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, Scalar] = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    at_secs: float = 0.0


class RecordWriter:
    """Appends records to a new file. One thread at a time.

    Raises:
        FileExistsError: the file is there already: records of two legs must not mix.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "x", encoding="utf-8"):
            pass

    def write(self, record: StepRecord) -> None:
        """Writes one line, whole, so that a process that is killed later has still told it."""
        # json writes the shortest digits that give the same float back, so that a comparison bit for bit survives the file.
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: str) -> tuple[StepRecord, ...]:
    """Reads what is there so far; a file that does not exist is empty, and a last line still being written is left for later."""
    if not os.path.exists(path):
        return ()
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")[:-1]
    return tuple(step_record_of(**json.loads(line)) for line in lines)


def step_record_of(**fields: Any) -> StepRecord:
    """The record of what JSON made of its fields: it has no tuples."""
    batch = fields["batch"]
    return StepRecord(**{**fields, "lr": tuple(fields["lr"]), "batch": tuple(batch) if isinstance(batch, list) else batch})
