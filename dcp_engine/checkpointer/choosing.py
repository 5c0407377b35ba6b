"""Which step is the best: by what evaluations have said of it, or what it was saved with."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from dcp_engine.checkpointer.evaluation import EvaluationLog, best_first
from dcp_engine.checkpointer.options import Mode
from dcp_engine.checkpointer.record import SaveRecord
from dcp_engine.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_engine.storage import RunRoot
from dcp_engine.storage.step_info import StepInfo

__all__ = ["ranked"]


def ranked(root: RunRoot, steps: Collection[int], metric: str, mode: Mode, *, storage_options: Mapping[str, Any]) -> list[int]:
    """Steps of which the metric is known, the best first; of equally good ones the newest first.

    Args:
        root: whose steps they are.
        steps: to choose from.
        metric: its name.
        mode: ``"min"``: the least value is the best. ``"max"``: the greatest.
        storage_options: of the root.

    Raises:
        StorageError kinds: it cannot be read.
    """
    looks = {step: info for step in steps if (info := _look(root, step)) is not None}
    nonces = {step: info.nonce for step, info in looks.items()}
    records = EvaluationLog(root.path, storage_options).read().records
    evaluated = [record.step for record in best_first(records, metric, mode) if nonces.get(record.step) == record.nonce]
    if evaluated:
        return evaluated
    values = {step: value for step, info in looks.items() if (value := _saved_with(info, metric)) is not None}
    sign = 1 if mode == "min" else -1
    return sorted(values, key=lambda step: (sign * values[step], -step))


def _look(root: RunRoot, step: int) -> StepInfo | None:
    try:
        return root.look(step)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None  # retired meanwhile; or damaged, so that nothing is known of it


def _saved_with(info: StepInfo, metric: str) -> float | None:
    try:
        value = SaveRecord.read(info.metadata, path=info.path).user.get(metric)
    except CorruptCheckpointError:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)
