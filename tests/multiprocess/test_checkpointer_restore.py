"""Coming back on real ranks: which step all of them take, and what they are told of those that they do not."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailure, RankPool
from support.runs import Run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_engine import Checkpointer, RestoreLevel, RunRoot
from dcp_engine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpEngineError,
    KeyMismatchError,
    PlanError,
    RankDisagreementError,
)
from dcp_engine.storage import root_decision


def save_steps(root: str, steps: int, **options: Any) -> None:
    """Every step from 1 on."""
    run = Run()
    with Checkpointer(root, **options) as checkpointer:
        for step in range(1, steps + 1):
            run.step()
            checkpointer.save(step, run.state, wait=True, metadata={"loss": abs(step - 2.5)})


def flip_a_bit(root: Path, step: int, component: str = "model") -> None:
    """In the data of a component, which only a read of it finds."""
    file = next((root / f"step-{step:08d}").glob(f"{component}-*.shard"))
    content = bytearray(file.read_bytes())
    content[4096] ^= 1
    file.write_bytes(content)


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def come_back(root: str, step: Any = "latest", **options: Any) -> Any:
    logged = Lines()
    logging.getLogger("dcp_engine.checkpointer").addHandler(logged)
    run = Run(seed=1)
    calls = {name: options.pop(name) for name in ("components", "missing_ok") if name in options}
    with Checkpointer(root, **options) as checkpointer:
        report = checkpointer.restore(run.state, step, **calls)
        if report is None:
            return None
        num_steps = run.counters.step
        run.step()
        handle = checkpointer.save(num_steps + 1, run.state) if step == "latest" and not calls else None
        return report, num_steps, logged.lines, None if handle is None else handle.exception(60)


def test_a_damaged_newest_step_is_told_loudly_and_the_one_before_is_taken(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks.run(2, save_steps, str(root), 4)
    flip_a_bit(root, 4)
    next((root / "step-00000003").glob("optimizer-*")).unlink()
    (root / "step-00000002" / "COMPLETE").write_text("?")
    found = ranks.run(2, come_back, str(root))
    for report, num_steps, _, failure in found:
        assert (report.step, num_steps, failure) == (1, 1, None)
        assert (report.level, report.quality) == (RestoreLevel.TRAJECTORY, "bitwise")
        assert [step for step, _ in report.passed_over] == [4, 3, 2]
        for (_, text), name in zip(report.passed_over, ["model-", "optimizer-", "COMPLETE"], strict=True):
            assert name in text
        assert report.lines()[1].startswith("passed over step 4: ")
    assert [line.split(" cannot")[0] for line in found[0][2]] == ["step 4", "step 3", "step 2"]
    assert RunRoot(root).steps() == [1, 2, 3, 4]  # step 2 was made again, in place of the damaged one
    assert Checkpointer(root).verify(2).faults == ()


def test_as_many_damaged_steps_as_allowed_are_passed_over_and_not_one_more(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks.run(2, save_steps, str(root), 3)
    for step in (2, 3):
        flip_a_bit(root, step)
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, come_back, str(root), max_fallbacks=1)
    assert sorted(caught.value.failures) == [0, 1]
    for error in caught.value.failures.values():
        assert isinstance(error, CorruptCheckpointError)
        assert error.step == 3
        assert "step 3: " in str(error.found)
        assert "step 2: " in str(error.found)
        assert "undefined" in str(error.remedy)
    assert [report.step for report, *_ in ranks.run(2, come_back, str(root), max_fallbacks=2)] == [1, 1]


@pytest.mark.parametrize("step", [2, 9])
def test_a_step_that_was_asked_for_is_that_one_or_an_error(ranks: RankPool, tmp_path: Path, step: int) -> None:
    root = tmp_path / "run"
    ranks.run(2, save_steps, str(root), 3)
    flip_a_bit(root, 2)
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, come_back, str(root), step)
    assert sorted(caught.value.failures) == [0, 1]
    for error in caught.value.failures.values():
        assert isinstance(error, CorruptCheckpointError if step == 2 else CheckpointNotFoundError)
        assert error.step == step
        assert step == 2 or error.expected == "one of [1, 2, 3]"


def test_a_first_start_is_no_error_only_where_that_was_said(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, come_back, str(tmp_path / "run"), missing_ok=True) == [None, None]
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, come_back, str(tmp_path / "run"))
    assert {type(error) for error in caught.value.failures.values()} == {CheckpointNotFoundError}


def save_weights_more_often(root: str) -> None:
    run = Run()
    with Checkpointer(root, save_every={"model": 1, "*": 3}) as checkpointer:
        for _ in range(5):
            run.step()
            checkpointer.maybe_save(run.counters.step, run.state)
            checkpointer.wait()


def test_a_step_of_weights_alone_is_never_resumed_from(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks.run(2, save_weights_more_often, str(root))
    assert RunRoot(root).steps() == [1, 2, 3, 4, 5]
    assert RunRoot(root).hint().step == 3  # type: ignore[union-attr]
    for report, num_steps, logged, failure in ranks.run(2, come_back, str(root)):
        # Steps 4 and 5 are no damage; and the run comes to step 4 again.
        assert (report.step, num_steps, report.passed_over, logged, failure) == (3, 3, (), [], None)
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, come_back, str(root), 5)
    for error in caught.value.failures.values():
        assert isinstance(error, KeyMismatchError)
        assert "state.optimizer" in error.missing
    for report, num_steps, _, _ in ranks.run(2, come_back, str(root), 5, components=["model"]):
        assert (report.step, report.level, num_steps) == (5, RestoreLevel.PARAMETERS, 0)


def come_back_with(root: str, extra: bool, scheduler: bool) -> Any:
    run = Run(extras={"more": {"a": torch.ones(1)}} if extra else None)
    if not scheduler:
        run.state._schedulers = {}
    with Checkpointer(root) as checkpointer:
        before = run.parameters()
        try:
            checkpointer.restore(run.state)
        except DcpEngineError as error:
            same = all(torch.equal(value, before[name]) for name, value in run.parameters().items())
            return error, same, checkpointer.save(9, {"a": torch.ones(1)}).exception(60), list(run.state.state_dict())
    return None


@pytest.mark.parametrize(("extra", "scheduler", "name"), [(True, True, "state.extra.more.a"), (False, False, "state.scheduler")])
def test_a_component_that_one_side_lacks_is_named_and_nothing_is_changed(
    ranks: RankPool, tmp_path: Path, extra: bool, scheduler: bool, name: str
) -> None:
    root = tmp_path / "run"
    ranks.run(2, save_steps, str(root), 2)
    for error, same, failure, components in ranks.run(2, come_back_with, str(root), extra, scheduler):
        assert isinstance(error, KeyMismatchError)
        assert name in (error.missing if extra else error.unexpected)
        assert same
        assert failure is None
        assert "model" in components


def come_back_impatiently(roots: list[str], **options: Any) -> Any:
    root_decision._VISIBILITY_SECS = 0.0
    try:
        return come_back(roots[dist.get_rank()], **options)
    finally:
        root_decision._VISIBILITY_SECS = 15.0


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_does_not_see_what_another_wrote_is_an_error_that_says_so(ranks: RankPool, tmp_path: Path, blind: int) -> None:
    root = tmp_path / "run"
    ranks.run(2, save_steps, str(root), 2)
    roots = [str(tmp_path / "elsewhere") if rank == blind else str(root) for rank in range(2)]
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, come_back_impatiently, roots, missing_ok=True)
    assert sorted(caught.value.failures) == [0, 1]
    for error in caught.value.failures.values():
        assert isinstance(error, RankDisagreementError)
        assert error.rank == 1
        assert "node_local=True" in str(error.remedy)


def on_nodes(function: Any, root: str, *args: Any, **options: Any) -> Any:
    """With two ranks a node, and a root on each node."""
    node = dist.get_rank() // 2
    os.environ["GROUP_RANK"] = str(node)
    return globals()[function](f"{root}/node{node}", *args, node_local=True, **options)


def test_nodes_with_roots_of_their_own_agree_on_the_newest_step_that_all_have(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "local"
    ranks.run(4, on_nodes, "save_steps", str(root), 4)
    assert [RunRoot(root / f"node{node}").steps() for node in (0, 1)] == [[1, 2, 3, 4]] * 2
    shutil.rmtree(root / "node0" / "step-00000004")
    flip_a_bit(root / "node1", 3)
    for rank, (report, num_steps, _, failure) in enumerate(ranks.run(4, on_nodes, "come_back", str(root))):
        assert (report.step, num_steps) == (2, 2)
        assert [step for step, _ in report.passed_over] == [3]
        assert report.path == str(root / f"node{rank // 2}" / "step-00000002")
        assert (report.level, report.quality) == (RestoreLevel.TRAJECTORY, "bitwise")
        assert failure is None
    shutil.rmtree(root / "node0")
    with pytest.raises(RankFailure) as caught:
        ranks.run(4, on_nodes, "come_back", str(root), missing_ok=True)
    for error in caught.value.failures.values():
        assert isinstance(error, CheckpointNotFoundError)
        assert "rank 0: none" in str(error.found)


def save_across_nodes(root: str, shard_inside: bool, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    whole = torch.arange(8.0)
    placements = [Replicate(), Shard(0)] if shard_inside else [Shard(0), Replicate()]
    state = {"w": distribute_tensor(whole, mesh, placements)}
    with Checkpointer(root, **options) as checkpointer:
        failure = checkpointer.save(1, state).exception(60)
        if failure is not None:
            return failure
        state = {"w": distribute_tensor(torch.zeros(8), mesh, placements)}
        checkpointer.restore(state)
        return state["w"].full_tensor().tolist()


@pytest.mark.parametrize("shard_inside", [True, False])
def test_a_node_saves_what_its_ranks_hold_or_says_that_it_is_not_the_whole(ranks: RankPool, tmp_path: Path, shard_inside: bool) -> None:
    for found in ranks.run(4, on_nodes, "save_across_nodes", str(tmp_path), shard_inside):
        if shard_inside:
            assert found == list(range(8))
        else:
            assert isinstance(found, PlanError)
            assert "node_local" in str(found.remedy)


def test_the_best_step_is_that_of_the_metric(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks.run(2, save_steps, str(root), 4)  # with losses 1.5, 0.5, 0.5, 1.5
    best = ("loss", "min")
    assert [report.step for report, *_ in ranks.run(2, come_back, str(root), "best", best=best)] == [3, 3]
    with Checkpointer(root) as checkpointer:
        checkpointer.record_evaluation(1, {"loss": 0.9, "accuracy": 0.1})
        checkpointer.record_evaluation(4, {"loss": 0.3, "accuracy": 0.4})
        assert [record.step for record in checkpointer.evaluations().records] == [1, 4]
    assert [report.step for report, *_ in ranks.run(2, come_back, str(root), "best", best=best)] == [4, 4]
    flip_a_bit(root, 4)
    for report, *_ in ranks.run(2, come_back, str(root), "best", best=("accuracy", "max")):
        assert (report.step, [step for step, _ in report.passed_over]) == (1, [4])
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, come_back, str(root), "best", best=("bleu", "max"))
    for error in caught.value.failures.values():
        assert isinstance(error, CheckpointNotFoundError)
