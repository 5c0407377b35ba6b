"""Tensors whose storage was freed by ``untyped_storage().resize_(0)``, as sharding wrappers do: numpy gives them other memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.errors import UnsupportedTensorError

SIZES = pytest.mark.parametrize("num_elements", [5, 500_000])


def freed(num_elements: int) -> torch.Tensor:
    tensor = torch.ones(num_elements)
    tensor.untyped_storage().resize_(0)
    return tensor


def error_of(caught: pytest.ExceptionInfo[CheckpointException]) -> UnsupportedTensorError:
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsupportedTensorError)
    return error


@SIZES
@pytest.mark.parametrize("planner", [BalancedSavePlanner, DefaultSavePlanner])
def test_what_has_no_memory_is_not_saved(planner: type[DefaultSavePlanner], num_elements: int, tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "gone": freed(num_elements)}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=ShardWriter(tmp_path / "step"), planner=planner())
    assert error_of(caught).tensor == "gone"
    assert not (tmp_path / "step").exists()


@SIZES
@pytest.mark.parametrize("planner", [ReshardLoadPlanner, DefaultLoadPlanner])
def test_nothing_is_loaded_where_there_is_no_memory(planner: type[DefaultLoadPlanner], num_elements: int, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "gone": torch.ones(num_elements)}, storage_writer=ShardWriter(tmp_path / "step"))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"a": torch.ones(2), "gone": freed(num_elements)}, storage_reader=ShardReader(tmp_path / "step"), planner=planner())
    assert error_of(caught).tensor == "gone"


def test_what_has_no_elements_needs_no_memory(tmp_path: Path) -> None:
    dcp.save({"none": torch.empty(0, 3)}, storage_writer=ShardWriter(tmp_path / "step"), planner=BalancedSavePlanner())
    found = {"none": torch.empty(0, 3)}
    dcp.load(found, storage_reader=ShardReader(tmp_path / "step"), planner=ReshardLoadPlanner())
    assert found["none"].shape == (0, 3)
    assert ShardReader(tmp_path / "step").read_metadata().state_dict_metadata["none"].size == (0, 3)
