"""A whole save and load on every kind of storage, and copies between them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import s3
from support.values import full, same
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter, verify_checkpoint
from dcp_engine.errors import CheckpointExistsError

SHAPES = {"big": (600, 3000), "small": (7,), "scalar": ()}
Place = tuple[str, dict[str, Any]]


def local(tmp_path: Path) -> Place:
    return str(tmp_path / "step-00000004"), {}


def memory(tmp_path: Path) -> Place:
    return f"memory://{uuid.uuid4().hex}/step-00000004", {}


def object_store(tmp_path: Path) -> Place:
    return f"s3://{s3.make_bucket()}/runs/step-00000004", s3.storage_options()


PLACES = (local, memory, object_store)


def save(place: Place, **options: Any) -> None:
    path, storage_options = place
    state = {"model": {key: full(key, shape) for key, shape in SHAPES.items()}, "progress": {"epoch": 3}}
    writer = ShardWriter(path, storage_options=storage_options, **options)
    dcp.save(state, storage_writer=writer, planner=BalancedSavePlanner())


def assert_loads(place: Place) -> None:
    path, storage_options = place
    found: dict[str, Any] = {"model": {key: torch.zeros(shape) for key, shape in SHAPES.items()}, "progress": {"epoch": 0}}
    dcp.load(found, storage_reader=ShardReader(path, storage_options=storage_options), planner=ReshardLoadPlanner())
    assert all(same(found["model"][key], full(key, shape)) for key, shape in SHAPES.items())
    assert found["progress"] == {"epoch": 3}
    report = verify_checkpoint(path, storage_options=storage_options)
    assert (report.faults, report.step, report.num_tensors) == ((), 4, 4)


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_comes_back_from_every_storage(tmp_path: Path, place: Callable[[Path], Place]) -> None:
    where = place(tmp_path)
    save(where)
    assert_loads(where)
    with pytest.raises(CheckpointException) as caught:
        save(where)
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    assert_loads(where)
    save(where, overwrite=True)
    assert_loads(where)


def copy(source: Place, target: Place) -> None:
    """Every object below one path to the same name below another, by fsspec alone."""
    from_fs, root = fsspec.core.url_to_fs(source[0], **source[1])
    to_fs, to_root = fsspec.core.url_to_fs(target[0], **target[1])
    for name in from_fs.find(root):
        place = f"{to_root}/{name[len(root) :].lstrip('/')}"
        to_fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        to_fs.pipe_file(place, from_fs.cat_file(name))


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_a_copied_checkpoint_is_as_good_as_the_first(
    tmp_path: Path, source: Callable[[Path], Place], target: Callable[[Path], Place]
) -> None:
    first, second = source(tmp_path / "first"), target(tmp_path / "second")
    save(first)
    copy(first, second)
    assert_loads(second)
