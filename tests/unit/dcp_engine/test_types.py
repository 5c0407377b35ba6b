"""What planners and storage tell each other."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_engine.plan_columns import KeyTable, PlanColumns
from dcp_engine.types import EngineMetadata


def columns() -> PlanColumns:
    """``w`` of shape (4, 2) in two boxes, the object ``o``, the scalar ``s``, ``e`` without elements."""
    keys = KeyTable(
        ["w", "o", "s", "e"],
        (None, torch.float32, torch.int8),
        np.array([1, 0, 2, 1], dtype=np.uint8),
        np.array([2, 0, 0, 1], dtype=np.uint8),
        np.array([[4, 2], [1, 1], [1, 1], [0, 1]]),
    )
    return PlanColumns(keys, np.array([0, 0, 1, 2]), np.array([[0, 0], [3, 0], [0, 0], [0, 0]]), np.array([[3, 2], [1, 2], [1, 1], [1, 1]]))


def tensor(dtype: torch.dtype, shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


RECORDS: dict[str, Any] = {
    "w": tensor(torch.float32, (4, 2), ((0, 0), (3, 2)), ((3, 0), (1, 2))),
    "o": BytesStorageMetadata(),
    "s": tensor(torch.int8, (), ((), ())),
    "e": tensor(torch.float32, (0,)),
}


def metadata() -> EngineMetadata:
    return EngineMetadata(cast(Any, columns()), step=3)


def test_columns_become_dcp_records_when_somebody_looks() -> None:
    found = metadata()
    assert found.columns is not None
    assert type(found.state_dict_metadata) is dict
    assert found.state_dict_metadata == RECORDS
    assert found.state_dict_metadata is found.state_dict_metadata
    assert found.columns is None


def test_columns_survive_the_way_to_other_ranks_unlooked_at() -> None:
    for travelled in (pickle.loads(pickle.dumps(metadata())), copy.copy(metadata()), copy.deepcopy(metadata())):
        assert travelled.columns.same_as(columns())
        assert (travelled.step, travelled.state_dict_metadata) == (3, RECORDS)


def test_what_was_changed_after_a_look_is_what_travels() -> None:
    changed = metadata()
    del changed.state_dict_metadata["w"]
    assert set(pickle.loads(pickle.dumps(changed)).state_dict_metadata) == {"o", "s", "e"}
    changed.state_dict_metadata = {}
    assert changed.state_dict_metadata == {}


def test_it_is_a_dataclass_like_dcps_own() -> None:
    assert metadata() == metadata()
    copied = replace(metadata(), step=4)
    assert (copied.step, copied.state_dict_metadata) == (4, RECORDS)
    assert isinstance(copied, Metadata)
    assert EngineMetadata(RECORDS).state_dict_metadata is RECORDS
    assert "TensorStorageMetadata" in repr(metadata())
