"""A planner shared by saves at one time: the older ones fail, whatever they were doing, and never save the newer one's state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardReader, ShardWriter
from dcp_engine.errors import UsageError
from dcp_engine.planners.save_turns import SaveTurns


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_save_is_the_newest_until_another_thread_begins_one() -> None:
    turns = SaveTurns()
    turns.require_newest()
    turns.begin()
    turns.require_newest()
    turns.begin()
    turns.require_newest()
    in_another_thread(turns.begin)
    with pytest.raises(UsageError, match="the state of another save"):
        turns.require_newest()
    turns.begin()
    turns.require_newest()


def test_a_thread_that_never_began_a_save_is_not_asked() -> None:
    turns = SaveTurns()
    turns.begin()
    in_another_thread(turns.require_newest)


@pytest.mark.parametrize("call", ["create_local_plan", "finish_plan"])
def test_planning_on_the_state_of_another_save_is_refused(call: str) -> None:
    planner, writer = BalancedSavePlanner(), ShardWriter("a")
    planner.set_up_planner({"w": torch.ones(2)}, writer.storage_meta(), True)
    (plan,), _ = planner.create_global_plan([planner.create_local_plan()])
    in_another_thread(lambda: planner.set_up_planner({"w": torch.zeros(2)}, writer.storage_meta(), True))
    with pytest.raises(UsageError):
        planner.create_local_plan() if call == "create_local_plan" else planner.finish_plan(plan)


class Interrupted(BalancedSavePlanner):
    """Another save begins while this one writes, once."""

    other: dict[str, Any] | None = {"w": torch.full((40_000,), 2.0)}

    def resolve_data(self, write_item: Any) -> Any:
        other, self.other = self.other, None
        if other is not None:
            in_another_thread(lambda: self.set_up_planner(other, ShardWriter("b").storage_meta(), True))
        return super().resolve_data(write_item)


def test_a_save_whose_planner_begins_another_one_while_it_writes_is_not_published(tmp_path: Path) -> None:
    planner = Interrupted()
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(40_000)}, storage_writer=ShardWriter(tmp_path / "a"), planner=planner)
    assert isinstance(caught.value.failures[0][0], UsageError)
    assert not (tmp_path / "a").exists()

    dcp.save({"w": torch.ones(40_000)}, storage_writer=ShardWriter(tmp_path / "a"), planner=planner)
    state = {"w": torch.zeros(40_000)}
    dcp.load(state, storage_reader=ShardReader(tmp_path / "a"), planner=ReshardLoadPlanner())
    assert torch.equal(state["w"], torch.ones(40_000))
