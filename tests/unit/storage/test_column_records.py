"""Plans by columns held against what was written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.manifests import manifest_of, receipt_of

from dcp_engine.errors import PlanError
from dcp_engine.plan_columns import KeyTable, PlanColumns
from dcp_engine.storage.dcp_records import check_delivered
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.table import TableBuilder
from dcp_engine.types import EngineMetadata, PlannerData

F32 = 18


def planned(*boxes: tuple[int, int]) -> EngineMetadata:
    """One tensor ``w`` of four elements, to be written as these boxes: offset and size."""
    keys = KeyTable(["w"], (None, torch.float32), np.array([1], np.uint8), np.array([1], np.uint8), np.array([[4]]))
    rows = np.array(boxes, dtype=np.int64)
    columns = PlanColumns(keys, np.zeros(len(boxes), dtype=np.int64), rows[:, :1], rows[:, 1:])
    return EngineMetadata(columns, planner_data=PlannerData())  # type: ignore[arg-type]


def written(*, beside: tuple[int, ...] | None = None) -> Manifest:
    """The tensor ``w`` as one chunk, and perhaps another tensor of this shape."""
    builder = TableBuilder()
    builder.add_block(16 if beside is None else 20, 16 if beside is None else 20, 0, 1)
    builder.add_chunk("w", F32, (4,), (0,), (4,), 0, 0)
    if beside is not None:
        builder.add_chunk("b", F32, beside, (0,) * len(beside), beside, 0, 16)
    return manifest_of([receipt_of(builder.build(), 0, 1)], world_size=1)


def test_what_was_planned_and_written_is_accepted() -> None:
    check_delivered(planned((0, 4)), written())


@pytest.mark.parametrize("beside", [(), (1,), (1, 1, 1)])
def test_as_many_chunks_of_another_tensor_are_not_what_was_planned(beside: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="exactly what was planned") as caught:
        check_delivered(planned((0, 2), (2, 2)), written(beside=beside))
    assert (caught.value.tensor, caught.value.found) == ("b", "2 missing, 2 not planned")
