"""``Checkpointer`` on real ranks: what is saved is one step of all of them, or nothing is."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailure, RankPool
from support.runs import Run

from dcp_engine import Checkpointer, RestoreLevel, RunRoot, ShardReader
from dcp_engine.errors import (
    CheckpointExistsError,
    CoordinationError,
    DcpEngineError,
    FencedError,
    InvalidOptionError,
    MixedStepsError,
    RankDisagreementError,
    SaverBusyError,
    StateError,
    UnencodableObjectError,
    UsageError,
)


def outcome(call: Any) -> Any:
    """The error of a save, from its call or from its handle; None where there is none."""
    try:
        handle = call()
        return handle.exception(60)
    except DcpEngineError as error:
        return error


def train_and_save(root: str, num_steps: int, every: int, **options: Any) -> list[float]:
    run = Run()
    with Checkpointer(root, save_every=every, **options) as checkpointer:
        for _ in range(num_steps):
            run.step()
            checkpointer.maybe_save(run.counters.step, run.state, probe=run.probe)
    return run.losses


def come_back(root: str, num_steps: int, *, noise: bool = True) -> tuple[Any, list[float], list[list[int]], Any]:
    run = Run(seed=1, noise=noise)
    with Checkpointer(root) as checkpointer:
        report = checkpointer.restore(run.state, probe=run.probe)
    run.train(num_steps)
    return report, run.losses, run.ids, run.parameters()


def go_on(num_steps: int, *, noise: bool = True, sharded: bool = False) -> tuple[list[float], list[list[int]], Any]:
    run = Run(noise=noise, sharded=sharded)
    run.train(num_steps)
    return run.losses, run.ids, None if sharded else run.parameters()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_run_that_comes_back_is_the_run_that_never_stopped(ranks: RankPool, tmp_path: Path, executor: str) -> None:
    root = str(tmp_path / "run")
    ranks.run(2, train_and_save, root, 14, 7, executor=executor)
    unbroken = ranks.run(2, go_on, 20)
    for (report, losses, ids, parameters), (all_losses, all_ids, wanted) in zip(ranks.run(2, come_back, root, 6), unbroken, strict=True):
        assert (report.step, report.level, report.quality, report.why_not_more) == (14, RestoreLevel.TRAJECTORY, "bitwise", ())
        assert report.probe.equal_bits
        assert (losses, ids) == (all_losses[14:], all_ids[14:])
        assert all(torch.equal(value, wanted[name]) for name, value in parameters.items())
    assert RunRoot(root).hint().step == 14  # type: ignore[union-attr]


def train_quietly(root: str, num_steps: int, *, sharded: bool = False) -> None:
    run = Run(noise=False, sharded=sharded)
    with Checkpointer(root) as checkpointer:
        run.train(num_steps)
        checkpointer.save(run.counters.step, run.state, probe=run.probe, wait=True)


@pytest.mark.parametrize(("saved_by", "world_size"), [(2, 1), (1, 2), (4, 2)])
def test_on_other_ranks_the_run_goes_on_with_the_same_samples_and_nearly_the_same_loss(
    ranks: RankPool, tmp_path: Path, saved_by: int, world_size: int
) -> None:
    root = str(tmp_path / "run")
    ranks.run(saved_by, train_quietly, root, 5)
    losses, ids, _ = ranks.run(1, go_on, 11, noise=False)[0]
    found = ranks.run(world_size, come_back, root, 6, noise=False)
    batches = [[one for part in parts for one in part] for parts in zip(*(ids for _, _, ids, _ in found), strict=True)]
    assert batches == ids[5:]
    for report, here, _, _ in found:
        assert (report.saved_world_size, report.world_size) == (saved_by, world_size)
        assert report.probe.ok
        assert here == pytest.approx(losses[5:], rel=1e-4)
        assert report.quality != "bitwise"
        assert any("ranks" in text for text in report.why_not_more)


def come_back_sharded(root: str) -> Any:
    run = Run(seed=1, noise=False, sharded=True)
    with Checkpointer(root) as checkpointer:
        report = checkpointer.restore(run.state, probe=run.probe)
    run.train(6)
    return report, run.losses


def test_a_sharded_run_comes_back_bit_for_bit_and_from_a_replicated_one_nearly_so(ranks: RankPool, tmp_path: Path) -> None:
    sharded, replicated = str(tmp_path / "sharded"), str(tmp_path / "replicated")
    ranks.run(2, train_quietly, sharded, 5, sharded=True)
    ranks.run(2, train_quietly, replicated, 5)
    losses, _, _ = ranks.run(1, go_on, 11, noise=False)[0]
    unbroken = ranks.run(2, go_on, 11, noise=False, sharded=True)[0][0]
    for report, here in ranks.run(2, come_back_sharded, sharded):
        assert (report.level, report.quality) == (RestoreLevel.TRAJECTORY, "bitwise")
        assert report.probe.equal_bits
        assert here == unbroken[5:]
    for report, here in ranks.run(2, come_back_sharded, replicated):
        assert (report.level, report.quality) == (RestoreLevel.TRAJECTORY, "reproducible")
        assert "parameters lie" in "; ".join(report.why_not_more)
        assert here == pytest.approx(losses[5:], rel=1e-4)


def break_the_cut(root: str, what: str) -> Any:
    run = Run()
    with Checkpointer(root) as checkpointer:
        run.train(2)
        step = run.counters.step
        if dist.get_rank() == 1:
            if what == "scheduler":
                run.scheduler.step()
            elif what == "counters":
                run.counters.step += 1
            elif what == "optimizer":
                for state in run.optimizer.state.values():
                    state["step"] += 1
            elif what == "data":
                run.sampler.consumed(4)
            else:
                step += 1
        error = outcome(lambda: checkpointer.save(step, run.state))
        there = sorted(name for name in os.listdir(root) if name.startswith(("step", ".tmp")))
        return error, there


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("scheduler", ["scheduler is 2 on rank 0, 3 on rank 1", "the scheduler has taken 3 steps"]),
        ("counters", ["progress.step is 2 on rank 0, 3 on rank 1"]),
        ("optimizer", ["optimizer is 2 on rank 0, 3 on rank 1", "the optimizer has taken 3 steps"]),
        ("data", ["data.samples_consumed"]),
        ("step", ["step is 2 on rank 0, 3 on rank 1", "saved as step 3, and the counters are at step 2"]),
    ],
)
def test_ranks_that_are_not_at_one_step_publish_nothing_and_are_told_what_disagrees(
    ranks: RankPool, tmp_path: Path, what: str, names: list[str]
) -> None:
    for error, there in ranks.run(2, break_the_cut, str(tmp_path / "run"), what):
        assert isinstance(error, MixedStepsError)
        assert error.rank == 1
        told = "; ".join(error.disagreements)
        assert all(name in told for name in names), told
        assert there == []


def save_after_a_failure(root: str) -> Any:
    run = Run()
    with Checkpointer(root) as checkpointer:
        run.train(1)
        if dist.get_rank() == 0:
            run.counters.epoch += 1
        first = outcome(lambda: checkpointer.save(1, run.state))
        if dist.get_rank() == 0:
            run.counters.epoch -= 1
        second = outcome(lambda: checkpointer.save(1, run.state))
        return type(first).__name__, second, checkpointer.steps()


def test_a_save_that_failed_can_be_made_again(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, save_after_a_failure, str(tmp_path / "run")) == [("MixedStepsError", None, [1])] * 2


class Odd:
    """Its state cannot be stored."""

    def state_dict(self) -> dict[str, Any]:
        return {"it": object() if dist.get_rank() == 1 else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def refuse(root: str, what: str) -> Any:
    run = Run(extras={"odd": {"a": torch.ones(2)}})
    odd = Run(extras={"odd": Odd()})
    first = dist.get_rank() == 0
    with Checkpointer(root) as checkpointer:
        run.train(1)
        calls = {
            "object": lambda: checkpointer.save(1, {"odd": Odd()}),
            "object in the state": lambda: checkpointer.save(odd.counters.step, odd.state),
            "state": lambda: checkpointer.save(1, run.state if first else 3),
            "metadata": lambda: checkpointer.save(1, run.state, metadata={"a": 1 if first else object()}),
            "step": lambda: checkpointer.save(1 if first else -1, run.state),
            "probe": lambda: checkpointer.save(1, run.state, probe=run.probe if first else lambda: 1 / 0),
        }
        error = outcome(calls[what])
        there = sorted(name for name in os.listdir(root) if name.startswith(("step", ".tmp")))
        again = outcome(lambda: checkpointer.save(1, run.state))
        return error, there, again


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("object", UnencodableObjectError),
        ("object in the state", UnencodableObjectError),
        ("state", InvalidOptionError),
        ("metadata", UnencodableObjectError),
        ("step", InvalidOptionError),
        ("probe", DcpEngineError),
    ],
)
def test_what_one_rank_cannot_save_is_an_error_on_all_and_leaves_nothing(
    ranks: RankPool, tmp_path: Path, what: str, kind: type[DcpEngineError]
) -> None:
    found = ranks.run(2, refuse, str(tmp_path / "run"), what)
    for error, there, again in found:
        assert isinstance(error, kind)
        assert error.rank == 1
        assert there == []
        assert again is None


def go_backwards(root: str) -> list[str]:
    run = Run()
    told = []
    with Checkpointer(root) as checkpointer:
        run.train(2)
        checkpointer.save(2, run.state, wait=True)
        told.append(outcome(lambda: checkpointer.save(2, run.state)).kind)
    run = Run()
    run.train(1)
    with Checkpointer(root) as checkpointer:
        told.append(outcome(lambda: checkpointer.save(1, run.state)).kind)
    return told


def test_steps_never_go_backwards(ranks: RankPool, tmp_path: Path) -> None:
    kinds = [InvalidOptionError.kind, CheckpointExistsError.kind]
    assert ranks.run(2, go_backwards, str(tmp_path / "run")) == [kinds] * 2
    assert RunRoot(tmp_path / "run").steps() == [2]


def make(root: str) -> None:
    with Checkpointer(root):
        pass


def test_somebody_elses_directory_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, make, str(tmp_path))
    assert sorted(caught.value.failures) == [0, 1]
    for error in caught.value.failures.values():
        assert isinstance(error, InvalidOptionError)
        assert error.found == "'thesis.tex'"
    assert os.listdir(tmp_path) == ["thesis.tex"]


def save_while_busy(root: str, if_busy: str) -> Any:
    """Rank 1 writes 400 KB at 64 KiB/s; rank 0 has nothing to write, and might take itself for free."""
    slow = {"max_bytes_per_sec": 65536, "codec": "raw"}
    state = {f"own{dist.get_rank()}": torch.zeros(100_000 if dist.get_rank() == 1 else 1)}
    with Checkpointer(root, if_busy=if_busy, writer_options=slow) as checkpointer:
        first = checkpointer.save(1, state)
        try:
            handle = checkpointer.save(2, state, wait=True)
        except SaverBusyError as error:
            found: Any = error.step
        else:
            found = (handle.skipped, type(handle.exception(0)).__name__, repr(handle).split(", ")[-1])
        was_under_way = not first.done()
        first.result(60)
        third = checkpointer.save(3, {"w": torch.ones(1)}, wait=True)
        return found, was_under_way, third.skipped, checkpointer.steps()


@pytest.mark.parametrize(("if_busy", "found"), [("skip", (True, "SaverBusyError", "skipped)")), ("error", 2)])
def test_a_save_beside_another_one_is_skipped_or_refused_on_all_ranks_alike(
    ranks: RankPool, tmp_path: Path, if_busy: str, found: Any
) -> None:
    assert ranks.run(2, save_while_busy, str(tmp_path / "run"), if_busy) == [(found, True, False, [1, 3])] * 2


def save_apart(root: str) -> Any:
    run = Run()
    run.train(1)
    with Checkpointer(f"{root}/{dist.get_rank()}") as checkpointer:
        return outcome(lambda: checkpointer.save(1, run.state))


def test_ranks_that_save_to_other_places_publish_nothing(ranks: RankPool, tmp_path: Path) -> None:
    for error in ranks.run(2, save_apart, str(tmp_path)):
        assert isinstance(error, RankDisagreementError)
        assert error.rank == 1
    assert [RunRoot(tmp_path / place).steps() for place in "01"] == [[], []]


def be_overtaken(root: str) -> Any:
    run = Run()
    with Checkpointer(root, run_id="old") as checkpointer:
        run.train(1)
        checkpointer.save(1, run.state, wait=True)
        if dist.get_rank() == 0:
            RunRoot(root).claim("new")
        dist.barrier()
        run.train(1)
        return outcome(lambda: checkpointer.save(2, run.state)), checkpointer.steps()


def test_a_run_that_was_overtaken_publishes_nothing_more(ranks: RankPool, tmp_path: Path) -> None:
    for error, steps in ranks.run(2, be_overtaken, str(tmp_path / "run")):
        assert isinstance(error, FencedError)
        assert "run 'new'" in str(error.found)
        assert steps == [1]


def accumulate(root: str, grads: str) -> Any:
    run = Run(grads=grads)
    told: list[Any] = []
    with Checkpointer(root, save_every=2) as checkpointer:
        for micro in range(1, 9):  # cycles of 4: step 1 after 4, step 2 after 8
            run.step(update=micro % 4 == 0)
            if micro == 6:  # step 1 still; two micro-batches into its cycle
                told.append(outcome(lambda: checkpointer.save(1, run.state)))
            if micro > 6:
                handle = checkpointer.maybe_save(run.counters.step, run.state)
                told.append(None if handle is None else handle.step)
        checkpointer.wait()
        return told, checkpointer.steps()


@pytest.mark.parametrize("grads", ["refuse", "defer", "save"])
def test_a_save_inside_an_accumulation_cycle_goes_by_the_policy(ranks: RankPool, tmp_path: Path, grads: str) -> None:
    for told, steps in ranks.run(2, accumulate, str(tmp_path / "run"), grads):
        if grads == "save":
            assert told[0] is None
            assert steps == [1, 2]
        else:
            assert isinstance(told[0], StateError)
            assert "micro_step 2" in str(told[0].found)
            assert steps == [2]
        assert told[1:] == [None, 2]


def plain_state(root: str) -> Any:
    model = torch.nn.Linear(3, 3)
    state = {"model": model.state_dict(), "progress": {"step": 4, "name": "a"}}
    with Checkpointer(root, save_every=2) as checkpointer:
        assert checkpointer.maybe_save(3, state) is None
        checkpointer.maybe_save(4, state, metadata={"note": "b"})
        checkpointer.wait()
        other = {"model": torch.nn.Linear(3, 3).state_dict(), "progress": {"step": 0, "name": ""}}
        report = checkpointer.restore(other)
        return (
            report.step,
            report.level.name,
            other["progress"],
            torch.equal(other["model"]["weight"], model.weight),
            checkpointer.look(4).metadata,
        )


def test_what_is_no_training_state_is_saved_as_dcp_takes_it(ranks: RankPool, tmp_path: Path) -> None:
    for step, level, progress, is_equal, metadata in ranks.run(2, plain_state, str(tmp_path / "run")):
        assert (step, level, progress, is_equal) == (4, "PARAMETERS", {"step": 4, "name": "a"}, True)
        assert metadata["user"] == {"note": "b"}


def load_with_dcp(root: str) -> int:
    run = Run(seed=1)
    run.state.load(ShardReader(RunRoot(root).path_of(4)))
    return run.counters.step


def test_what_a_checkpointer_saved_loads_without_one(ranks: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    ranks.run(2, train_and_save, root, 4, 4)
    assert ranks.run(2, load_with_dcp, root) == [4, 4]


def save_on_one_rank_alone(root: str) -> Any:
    run = Run()
    run.train(1)
    with Checkpointer(root, timeout_secs=2.0) as checkpointer:
        if dist.get_rank() == 0:
            return outcome(lambda: checkpointer.save(1, run.state))
        time.sleep(4.0)
        return None


def test_a_save_to_which_not_all_ranks_come_says_that_all_have_to(ranks: RankPool, tmp_path: Path) -> None:
    error = ranks.run(2, save_on_one_rank_alone, str(tmp_path / "run"))[0]
    assert isinstance(error, CoordinationError)
    assert "the process group failed while ranks agreed on a save or a restore" in str(error)
    assert "call save() and restore() on all ranks alike" in str(error)


def train_where_the_checkpointer_was_made_first(root: str) -> list[Any]:
    run = Run()
    run.train(1)
    with mock.patch.object(dist, "is_initialized", return_value=False):  # as before init_process_group
        checkpointer = Checkpointer(root)
    with checkpointer:
        return [outcome(lambda: checkpointer.save(1, run.state)), outcome(lambda: checkpointer.restore(run.state, missing_ok=True))]


def test_a_checkpointer_made_before_the_process_group_says_so(ranks: RankPool, tmp_path: Path) -> None:
    for errors in ranks.run(2, train_where_the_checkpointer_was_made_first, str(tmp_path / "run")):
        for error in errors:
            assert isinstance(error, UsageError)
            assert "made before the process group" in str(error)
            assert "init_process_group(), then Checkpointer(...)" in str(error)
    assert not (tmp_path / "run").exists()


def notes_on_fewer_ranks(root: str) -> tuple[list[Any], list[str]]:
    run, told = Run(seed=1), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_engine").addHandler(handler)
    try:
        with Checkpointer(root) as checkpointer:
            report = checkpointer.restore(run.state)
    finally:
        logging.getLogger("dcp_engine").removeHandler(handler)
    assert report is not None
    return [finding for finding in report.findings if finding.kind == "resized"], [text for text in told if "rng" in text]


def test_random_numbers_that_fewer_ranks_drop_are_told_once(ranks: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    ranks.run(4, train_quietly, root, 1)
    text = "rng was saved by 4 ranks and there are 2: took by rank, dropped those of ranks [2, 3]"
    for findings, told in ranks.run(2, notes_on_fewer_ranks, root):
        assert [(finding.text, finding.rank) for finding in findings] == [(text, None)]
        assert told in ([], [f"note: rng: {text}"])  # the first rank's report, where that level is shown
