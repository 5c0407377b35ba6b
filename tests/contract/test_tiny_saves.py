"""Tiny tensors are written by columns: with the values, errors and extension points that all tensors have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.engine import load, refused, save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from dcp_engine import BalancedSavePlanner, ShardReader, ShardWriter
from dcp_engine.errors import PlanError
from dcp_engine.plan_columns import PlanColumns
from dcp_engine.storage import planner_values
from dcp_engine.storage.limits import PACK_BYTES
from dcp_engine.storage.manifest import Manifest


def manifest_of(path: Path) -> Manifest:
    metadata: Any = ShardReader(path).read_metadata()
    manifest: Manifest = metadata.storage_data.manifest
    return manifest


class Asked:
    """Counts the keys that the writer asks a planner for, one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        resolve = planner_values.TensorBytes.__call__

        def noting(tensor: planner_values.TensorBytes) -> Any:
            self.keys.append(tensor.item.index.fqn)
            return resolve(tensor)

        monkeypatch.setattr(planner_values.TensorBytes, "__call__", noting)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def odd_state() -> tuple[dict[str, torch.Tensor], list[str]]:
    """Small tensors of all kinds, and the keys of those whose bytes do not lie in one run as their values are."""
    base = torch.arange(24, dtype=torch.float32)
    whole = torch.complex(base, base + 0.5)
    tensors = {
        "scalar": torch.tensor(3.5),
        "vector": base[3:7],  # a view at an odd place
        "matrix": torch.arange(6).reshape(2, 3),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.full((3,), 7.0)),
        "complex": whole[1:3],
        "edge": torch.full(((PACK_BYTES - 4) // 4,), 2.0),
        "empty": torch.zeros(0, 4),
        "transposed": base.reshape(4, 6).T,
        "strided": base[::5],
        "expanded": torch.tensor([9.0]).expand(4),
        "conjugate": whole[2:5].conj(),
        "negative": whole[:3].conj().imag,
        "large": torch.full((PACK_BYTES // 4,), 1.0),
    }
    return tensors, ["transposed", "strided", "expanded", "conjugate", "negative", "large"]


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
def test_every_kind_of_small_tensor_keeps_its_values(tmp_path: Path, codec: str, asked: Asked) -> None:
    tensors, general = odd_state()
    state = {"model": tensors, "steps": [1, 2]}
    save(state, tmp_path / "a", codec=codec)
    assert sorted(set(asked.keys)) == sorted(f"model.{key}" for key in general)
    found = {"model": {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in tensors.items()}, "steps": None}
    load(found, tmp_path / "a")
    for key, value in tensors.items():
        assert torch.equal(found["model"][key], value.detach()), key
    assert found["steps"] == [1, 2]


def test_other_planners_write_the_same_table(tmp_path: Path) -> None:
    tensors, _ = odd_state()
    save({"model": tensors}, tmp_path / "columns")
    dcp.save({"model": tensors}, storage_writer=ShardWriter(tmp_path / "stock"))
    found = []
    for name in ("columns", "stock"):
        manifest = manifest_of(tmp_path / name)
        entries = {key: (manifest.entry(number).dtype.name, manifest.entry(number).shape) for key, number in manifest.ids.items()}
        found.append((entries, sorted((name, offsets, sizes) for name, _, offsets, sizes in manifest.table.chunks())))
    assert found[0] == found[1]
    assert found[0][0]["model.scalar"] == ("float32", ())
    assert ("model.matrix", (0, 0), (2, 3)) in found[0][1]


def test_small_tensors_fill_blocks_up_and_go_on_in_the_next(tmp_path: Path) -> None:
    num = 200
    state = {f"layer.{number}": torch.full((15_000,), float(number)) for number in range(num)}  # 60,000 bytes each: 69 to a block
    save(state, tmp_path / "a", codec="raw")
    assert manifest_of(tmp_path / "a").table.block_raw_bytes.tolist() == [69 * 60_000, 69 * 60_000, 62 * 60_000]
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    load(found, tmp_path / "a")
    assert all(torch.equal(found[key], value) for key, value in state.items())


class Doubling(BalancedSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value * 2 if isinstance(value, torch.Tensor) else value


class Resolving(BalancedSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        return value * 2 if isinstance(value, torch.Tensor) else value


class LookingUp(BalancedSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return value * 2 if isinstance(value, torch.Tensor) else value


class Wrapping(SavePlanner):
    """Hands everything on to one of ours, and has its own say in values."""

    def __init__(self) -> None:
        self._inner = BalancedSavePlanner()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self._inner.create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        return self._inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self._inner.resolve_data(write_item)
        return value * 2 if isinstance(value, torch.Tensor) else value


def patched() -> BalancedSavePlanner:
    planner = BalancedSavePlanner()
    inner = planner.resolve_data
    planner.resolve_data = lambda item: inner(item) * 2  # type: ignore[method-assign]
    return planner


@pytest.mark.parametrize("make", [Doubling, Resolving, LookingUp, Wrapping, patched])
def test_whoever_has_a_say_in_values_is_asked_for_each(tmp_path: Path, make: Any) -> None:
    state = {f"layer.{number}": torch.full((3,), float(number)) for number in range(50)}
    dcp.save(state, storage_writer=ShardWriter(tmp_path / "a"), planner=make())
    found = {key: torch.zeros(3) for key in state}
    load(found, tmp_path / "a")
    assert found["layer.7"].tolist() == [14.0] * 3
    assert all(torch.equal(found[key], 2 * value) for key, value in state.items())


def test_a_reused_plan_writes_the_values_of_the_new_state(tmp_path: Path, asked: Asked) -> None:
    planner = BalancedSavePlanner()
    for step in range(3):
        state = {f"layer.{number}": torch.full((number % 4,), float(step)) for number in range(50)}
        dcp.save(state, storage_writer=ShardWriter(tmp_path / str(step)), planner=planner)
        found = {key: torch.full_like(value, -1) for key, value in state.items()}
        load(found, tmp_path / str(step))
        assert all(torch.equal(found[key], value) for key, value in state.items())
    assert asked.keys == []


def test_ties_among_tiny_tensors_are_stored_once(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    state = {"model": {"a": shared, "b": torch.ones(2), "c": shared, "part": shared[:2]}}
    save(state, tmp_path / "a")
    manifest = manifest_of(tmp_path / "a")
    assert manifest.aliases == {"model.c": "model.a"}
    assert sorted(manifest.names) == ["model.a", "model.b", "model.part"]
    found = {"model": {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(4), "part": torch.zeros(2)}}
    load(found, tmp_path / "a")
    assert {key: value.tolist() for key, value in found["model"].items()} == {
        "a": [0.0, 1.0, 2.0, 3.0],
        "b": [1.0, 1.0],
        "c": [0.0, 1.0, 2.0, 3.0],
        "part": [0.0, 1.0],
    }


def test_a_tensor_that_was_resized_after_the_plan_is_refused(tmp_path: Path) -> None:
    class Resizing(ShardWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            tensor.resize_(1)
            return super().write_data(plan, planner)

    tensor = torch.arange(8.0)
    error = refused(dcp.save, {"a": tensor}, storage_writer=Resizing(tmp_path / "a"), planner=BalancedSavePlanner())
    assert isinstance(error, PlanError)
    assert error.tensor == "a"


def test_a_planner_of_another_state_is_asked_row_by_row(tmp_path: Path) -> None:
    planner, other = BalancedSavePlanner(), BalancedSavePlanner()
    meta = ShardWriter(tmp_path / "a").storage_meta()
    planner.set_up_planner({"a": torch.zeros(3)}, meta)
    other.set_up_planner({"b": torch.zeros(3)}, meta)
    planner.create_local_plan()
    columns: Any = other.create_local_plan().items
    assert planner.row_memory(columns.columns()) is None


def test_the_parts_of_replicas_that_a_rank_writes_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    """A row that is a part of a tensor is asked for: an address of the whole would store its first bytes."""
    planner = BalancedSavePlanner()
    planner.set_up_planner({"a": torch.arange(8.0), "b": torch.arange(4.0)}, ShardWriter(tmp_path / "a").storage_meta())
    columns: Any = planner.create_local_plan().items
    whole = columns.columns()
    sizes = whole.sizes.copy()
    sizes[0] = 4
    memory = planner.row_memory(PlanColumns(whole.keys, whole.entries, whole.offsets, sizes))
    assert memory is not None
    assert np.flatnonzero(memory.addresses).tolist() == [1]
