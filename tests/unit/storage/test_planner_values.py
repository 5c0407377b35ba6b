"""What a planner resolves becomes bytes or an error that names it, and what was read reaches the planner."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem, WriteItemType

from dcp_engine.errors import (
    DtypeMismatchError,
    KindMismatchError,
    LimitExceededError,
    PlanError,
    ShapeMismatchError,
    UnsupportedTensorError,
)
from dcp_engine.objects import encode_object
from dcp_engine.storage.planner_values import ObjectTarget, TensorBytes, TensorTarget
from dcp_engine.types import EncodedObject

READ = ReadItem(LoadItemType.TENSOR, MetadataIndex("w"), torch.Size([0]), MetadataIndex("w"), torch.Size([0]), torch.Size([3]))
WRITE = WriteItem(MetadataIndex("w"), WriteItemType.TENSOR)


class Planner:
    """Holds one value, and notes what it is told."""

    def __init__(self, value: Any, *, encoded: bool = False) -> None:
        self.value = value
        self.accepts_encoded_objects = encoded
        self.told: list[Any] = []

    def resolve_data(self, item: WriteItem) -> Any:
        return self.value

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        value: torch.Tensor = self.value
        return value

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        self.told.append(tensor)

    def load_bytes(self, item: ReadItem, value: Any) -> None:
        self.told.append(value)


def resolved(value: Any) -> Any:
    planner: Any = Planner(value)
    return TensorBytes(planner, WRITE, (3,), torch.int16)()


def test_a_tensor_becomes_its_row_major_bytes() -> None:
    whole = torch.tensor([[1, 9], [2, 9], [3, 9]], dtype=torch.int16)
    assert bytes(resolved(whole[:, 0])) == bytes([1, 0, 2, 0, 3, 0])


def test_contiguous_memory_is_not_copied_where_it_is_more_than_a_few_bytes() -> None:
    tensor = torch.zeros(8193, dtype=torch.int16)
    planner: Any = Planner(tensor)
    view = TensorBytes(planner, WRITE, (8193,), torch.int16)()
    tensor[1] = 7
    assert bytes(view[:4]) == bytes([0, 0, 7, 0])
    assert view.nbytes == 16386


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1, 2, 3], dtype=torch.int16), [1, 2, 3]),
        (torch.nn.Parameter(torch.tensor([1, 2, 3], dtype=torch.int16), requires_grad=False), [1, 2, 3]),
        (torch.arange(8, dtype=torch.int16)[1:4], [1, 2, 3]),
        (torch.arange(8, dtype=torch.int16)[:6:2], [0, 2, 4]),
        (torch.tensor([7], dtype=torch.int16).expand(3), [7, 7, 7]),
    ],
    ids=["plain", "parameter", "slice", "strided", "expanded"],
)
def test_few_bytes_are_those_of_the_values(value: torch.Tensor, expected: list[int]) -> None:
    found = resolved(value)
    assert (found.dtype, found.shape) == (np.uint8, (6,))
    assert found.view(np.int16).tolist() == expected


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_conjugate_and_negative_views_are_resolved_however_few_the_bytes(shape: tuple[int, ...]) -> None:
    base = torch.full(shape, 1 + 2j, dtype=torch.complex64)
    planner: Any = Planner(base.conj())
    assert set(TensorBytes(planner, WRITE, shape, torch.complex64)().view(np.complex64).tolist()) == {1 - 2j}
    planner = Planner(base.reshape(-1)[:1].conj().imag)
    assert planner.value.is_neg()
    assert TensorBytes(planner, WRITE, (1,), torch.float32)().view(np.float32).tolist() == [-2]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("text", KindMismatchError),
        (torch.zeros(4, dtype=torch.int16), PlanError),
        (torch.zeros(3, dtype=torch.int32), PlanError),
        (torch.zeros(3, dtype=torch.int16, device="meta"), UnsupportedTensorError),
        (torch.zeros(3, dtype=torch.int16).to_sparse(), UnsupportedTensorError),
    ],
    ids=["no tensor", "sizes", "dtype", "meta", "sparse"],
)
def test_what_cannot_be_stored_is_named(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        resolved(value)
    assert caught.value.tensor == "w"  # type: ignore[attr-defined]


def target(value: torch.Tensor) -> tuple[Any, TensorTarget]:
    planner: Any = Planner(value)
    return planner, TensorTarget(READ, planner, torch.complex64, threading.Lock())


def test_plain_memory_is_filled_in_place_and_given_back() -> None:
    value = torch.zeros(3, dtype=torch.complex64)
    planner, into = target(value)
    into.open()[:] = torch.tensor([1, 2j, 3], dtype=torch.complex64).view(torch.int64).numpy()
    assert value.tolist() == [1, 2j, 3]
    assert planner.told == []
    into.commit()
    assert [told is value for told in planner.told] == [True]


def test_a_conjugate_view_gets_values_and_not_bits() -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    _, into = target(base.conj())
    into.open()[:] = torch.tensor([1, 2j, 3], dtype=torch.complex64).view(torch.int64).numpy()
    into.commit()
    assert base.conj().tolist() == [1, 2j, 3]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.zeros(4, dtype=torch.complex64), ShapeMismatchError),
        (torch.zeros(3), DtypeMismatchError),
        (torch.zeros(3, dtype=torch.complex64, device="meta"), UnsupportedTensorError),
    ],
    ids=["sizes", "dtype", "meta"],
)
def test_a_target_that_cannot_take_the_box_is_named(value: torch.Tensor, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        target(value)[1].open()
    assert caught.value.tensor == "w"  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoded", [True, False], ids=["encoded", "opaque"])
def test_an_object_reaches_the_planner_once_it_is_whole(encoded: bool) -> None:
    data = encode_object((1, "x"), key="o")
    planner: Any = Planner(None, encoded=True)
    into = ObjectTarget(READ, planner, "o", len(data), threading.Lock(), encoded=encoded)
    into.open()[:] = list(data)
    into.commit()
    assert [(told.getvalue(), isinstance(told, EncodedObject)) for told in planner.told] == [(data, encoded)]


def test_a_stock_planner_gets_what_torch_load_takes() -> None:
    data = encode_object({1: (2, 3)}, key="o")
    planner: Any = Planner(None)
    into = ObjectTarget(READ, planner, "o", len(data), threading.Lock(), encoded=True)
    into.open()[:] = list(data)
    into.commit()
    assert torch.load(planner.told[0], weights_only=True) == {1: (2, 3)}


def test_an_object_beyond_memory_is_refused_before_it_is_asked_for() -> None:
    planner: Any = Planner(None)
    with pytest.raises(LimitExceededError) as caught:
        ObjectTarget(READ, planner, "o", 1 << 56, threading.Lock(), encoded=True)
    assert (caught.value.tensor, caught.value.found) == ("o", f"{1 << 56} bytes")
