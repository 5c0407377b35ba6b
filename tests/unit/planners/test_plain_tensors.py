from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dcp_engine.planners.column_builder import ColumnBuilder
from dcp_engine.planners.local_shards import describe
from dcp_engine.planners.plain_tensors import take_plain
from dcp_engine.planners.ties import repeated


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore")  # torch is taking quantised tensors out, and nested ones are a prototype
def test_plain_tensors_in_host_memory_are_taken_and_all_else_is_left_in_its_place() -> None:
    with_fields = torch.zeros(2)
    with_fields.global_shape = (4,)  # type: ignore[attr-defined]
    freed = torch.zeros(100)[5:]
    freed.untyped_storage().resize_(0)
    leaves: dict[str, Any] = {
        "a": torch.zeros(2, 3),
        "object": [1],
        "b": torch.nn.Parameter(torch.zeros(())),
        "c": torch.zeros(3, dtype=torch.int8)[::2],
        "meta": torch.zeros(2, device="meta"),
        "sparse": torch.zeros(2).to_sparse(),
        "subclass": torch.zeros(2).as_subclass(Subclass),
        "quantised": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        "fields": with_fields,
        "freed": freed,
        "empty": torch.zeros(0),
    }
    plain, rest = take_plain(leaves)
    assert plain.keys == ["a", "b", "c"]
    assert plain.dtypes == [torch.float32, torch.float32, torch.int8]
    assert [tuple(shape) for shape in plain.shapes] == [(2, 3), (), (2,)]
    assert plain.addresses == [leaves[key].data_ptr() for key in "abc"]
    assert rest == [(1, "object"), *((3, key) for key in ("meta", "sparse", "subclass", "quantised", "nested", "fields", "freed", "empty"))]


def test_one_is_described_as_any_tensor_is() -> None:
    value = torch.nn.Parameter(torch.arange(3.0))
    plain, _ = take_plain({"a": value})
    found, expected = plain.describe("a"), describe("a", value)
    assert found is not None
    assert expected is not None
    assert found[:3] == expected[:3] == ("a", torch.float32, (3,))
    assert found.shards[0].tensor.data_ptr() == value.data_ptr()
    assert not found.shards[0].tensor.requires_grad
    assert plain.describe("b") is None


def test_rows_that_are_a_whole_tensor_in_one_run_of_memory_have_an_address() -> None:
    values = {"run": torch.zeros(4), "columns": torch.zeros(2, 3).T, "conjugate": torch.zeros(2, dtype=torch.complex64).conj()}
    plain, _ = take_plain(values)
    builder = ColumnBuilder()
    builder.add_plain(plain.keys, plain.dtypes, plain.shapes)
    builder.add_object("object")
    columns = builder.build()
    assert columns is not None
    memory = plain.memory(columns, np.array([0, 1, 2, -1]))
    assert memory.addresses.tolist() == [values["run"].data_ptr(), 0, 0, 0]
    assert memory.owners is plain.values


def test_addresses_that_occur_twice_are_found() -> None:
    tensor = torch.zeros(4)
    plain, _ = take_plain(dict(enumerate([tensor, tensor[1:], tensor.view(2, 2), torch.zeros(1)])))  # type: ignore[arg-type]
    addresses = np.array(plain.addresses)
    assert repeated(addresses).tolist() == [True, False, True, False]
    assert repeated(addresses[1:3]).tolist() == [False, False]
