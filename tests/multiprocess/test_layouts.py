"""Every layout saved, loaded on every other, bit for bit: parameters, buffers and AdamW state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.layouts import LAYOUTS, Layout, build, expected_state, full_state, state_of
from support.ranks import RankPool

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter

RESHARDED = (Layout("fsdp", 1), Layout("fsdp", 2), Layout("fsdp", 5), Layout("plain", 1))


def save(layout: Layout, path: str) -> None:
    model, optimizer = build(layout, filled=True)
    dcp.save(state_of(model, optimizer), storage_writer=ShardWriter(path), planner=BalancedSavePlanner())


def load(layout: Layout, path: str) -> tuple[int, list[str]]:
    """Number of tensors compared and the keys that differ, on this rank."""
    model, optimizer = build(layout, filled=False)
    state = state_of(model, optimizer)
    dcp.load(state, storage_reader=ShardReader(path), planner=ReshardLoadPlanner())
    return _compare(full_state(state), expected_state(state))


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> tuple[int, list[str]]:
    tensors = [(part, key) for part in expected for key, value in expected[part].items() if isinstance(value, torch.Tensor)]
    return len(tensors), [f"{part}.{key}" for part, key in tensors if not torch.equal(found[part][key], expected[part][key])]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Path of the checkpoint of a layout, saved when first asked for."""
    root = tmp_path_factory.mktemp("layouts")

    def path_of(layout: Layout) -> str:
        path: Path = root / str(layout)
        if not path.exists():
            ranks.run(layout.world_size, save, layout, str(path))
        return str(path)

    return path_of


@pytest.mark.parametrize("target", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_any_layout_loads_on_any_other(ranks: RankPool, saved: Any, source: Layout, target: Layout) -> None:
    results = ranks.run(target.world_size, load, target, saved(source))
    assert [differing for _, differing in results] == [[]] * target.world_size
    # 17 tensors of the model, 16 parameters with three tensors of state each; ranks of a pipeline or of experts hold fewer.
    most = max(number for number, _ in results)
    assert most == 65 if target.name not in ("pipeline", "experts") else most > 0


@pytest.mark.parametrize("target", RESHARDED, ids=str)
def test_four_ranks_load_on_any_number(ranks: RankPool, saved: Any, target: Layout) -> None:
    results = ranks.run(target.world_size, load, target, saved(Layout("fsdp", 4)))
    assert results == [(65, [])] * target.world_size
