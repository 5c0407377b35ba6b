"""What of DCP's plans and metadata becomes chunks and entries, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.manifests import manifest_of, receipt_of
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_engine.errors import PlanError, UnsupportedTensorError
from dcp_engine.storage.dcp_records import check_delivered, check_tensors, empty_entries
from dcp_engine.storage.manifest import Manifest
from dcp_engine.storage.table import TableBuilder
from dcp_engine.types import PlannerData

F32, OBJECT, OPAQUE = 18, 254, 255


def tensor(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)


def manifest(code: int = OBJECT) -> Manifest:
    builder = TableBuilder()
    builder.add_block(16, 16, 0, 1)
    builder.add_chunk("w", F32, (4,), (0,), (2,), 0, 0)
    builder.add_chunk("w", F32, (4,), (2,), (2,), 0, 8)
    builder.add_block(5, 5, 0, 2)
    builder.add_chunk("o", code, (5,), (0,), (5,), 1, 0)
    return manifest_of([receipt_of(builder.build(), 0, 1)], world_size=1, empty_entries=[("nothing", OPAQUE, (0,))])


PLANNED: dict[str, Any] = {"w": tensor((4,), ((0,), (2,)), ((2,), (2,))), "o": BytesStorageMetadata()}


def test_what_was_planned_and_written_is_accepted() -> None:
    # An empty box and the alias of a tie are stored nowhere of their own.
    more = {"empty": tensor((0, 3), ((0, 0), (0, 3))), "alias": PLANNED["w"]}
    check_delivered(Metadata({**PLANNED, **more}, planner_data=PlannerData({}, ties={"alias": "w"})), manifest())


@pytest.mark.parametrize(
    ("planned", "odd", "found"),
    [
        ({**PLANNED, "b": tensor((2,), ((0,), (2,)))}, "b", "1 missing, 0 not planned"),
        ({"w": PLANNED["w"]}, "o", "0 missing, 1 not planned"),
        ({**PLANNED, "w": tensor((4,), ((0,), (4,)))}, "w", "1 missing, 2 not planned"),
        # A scalar tensor is no object, though neither has offsets.
        ({**PLANNED, "o": tensor((), ((), ()))}, "o", "1 missing, 1 not planned"),
    ],
    ids=["missing", "not planned", "other boxes", "other kind"],
)
def test_files_that_are_not_the_plan_are_refused(planned: dict[str, Any], odd: str, found: str) -> None:
    with pytest.raises(PlanError, match="exactly what was planned") as caught:
        check_delivered(Metadata(planned), manifest())
    assert (caught.value.tensor, caught.value.found) == (odd, found)


def test_empty_tensors_are_entries_and_their_aliases_are_not() -> None:
    state = {"e": tensor((0, 3)), "tied": tensor((0, 3)), "w": PLANNED["w"], "o": PLANNED["o"]}
    assert list(empty_entries(Metadata(state, planner_data=PlannerData({}, ties={"tied": "e"})))) == [("e", F32, (0, 3))]


def item(key: str, *, shape: tuple[int, ...] = (3,), **properties: Any) -> WriteItem:
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape)),
        properties=TensorProperties(**properties),
        size=torch.Size(shape),
    )
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.TENSOR, tensor_data=data)


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (item("bad", dtype=torch.quint8), "torch.quint8"),
        (item("bad", dtype=torch.float32, layout=torch.sparse_coo), "layout torch.sparse_coo, 1 dimensions"),
        (item("bad", dtype=torch.float32, shape=(1,) * 65), "layout torch.strided, 65 dimensions"),
    ],
    ids=["dtype", "layout", "dimensions"],
)
def test_tensors_that_cannot_be_stored_are_named_before_anything_is_written(bad: WriteItem, found: str) -> None:
    check_tensors(SavePlan([item("good", dtype=torch.float32), item("deep", dtype=torch.float32, shape=(1,) * 64)]))
    with pytest.raises(UnsupportedTensorError) as caught:
        check_tensors(SavePlan([item("good", dtype=torch.float32), bad]))
    assert (caught.value.tensor, caught.value.found) == ("bad", found)
