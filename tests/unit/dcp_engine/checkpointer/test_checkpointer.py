"""``Checkpointer`` in one process: what it saves, refuses, and brings back."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import Run

from dcp_engine import Checkpointer, RestoreLevel, RunRoot
from dcp_engine.errors import (
    CheckpointNotFoundError,
    ClosedError,
    DigestMismatchError,
    InvalidOptionError,
    MixedStepsError,
    ShapeMismatchError,
    StateError,
    StorageError,
    UnencodableObjectError,
)
from dcp_engine.train_state import PartOfState


def save_steps(root: Path, *steps: int, **options: Any) -> Run:
    run = Run()
    with Checkpointer(root, **options) as checkpointer:
        for step in steps:
            run.train(step - run.counters.step)
            checkpointer.save(step, run.state)
    return run


@pytest.mark.parametrize("stop_at", [5, 12, 17])  # within the first epoch, at its end, within the second
def test_a_run_that_comes_back_is_the_run_that_never_stopped(tmp_path: Path, stop_at: int) -> None:
    unbroken = Run()
    unbroken.train(23)
    save_steps(tmp_path, stop_at)
    run = Run(seed=1)
    with Checkpointer(tmp_path) as checkpointer:
        report = checkpointer.restore(run.state)
        assert report is not None
        run.train(23 - stop_at)
        checkpointer.save(23, run.state)
    assert (report.level, report.quality, report.why_not_more) == (RestoreLevel.TRAJECTORY, "bitwise", ())
    assert (run.losses, run.ids) == (unbroken.losses[stop_at:], unbroken.ids[stop_at:])
    assert list(report.phases) == ["decide", "read", "apply", "check", "probe"]
    assert RunRoot(tmp_path).steps() == [stop_at, 23]


def test_a_probe_that_gives_something_else_is_told_and_no_error(tmp_path: Path) -> None:
    run = Run()
    with Checkpointer(tmp_path) as checkpointer:
        run.train(1)
        checkpointer.save(1, run.state, probe=run.probe, wait=True)
        other = Run(seed=1)
        good = checkpointer.restore(other.state, probe=other.probe)
        bad = checkpointer.restore(other.state, probe=lambda: other.probe() + 1)
        unasked = checkpointer.restore(other.state)
    assert good is not None
    assert bad is not None
    assert unasked is not None
    assert (good.level, good.quality, good.probe is not None and good.probe.equal_bits) == (RestoreLevel.TRAJECTORY, "bitwise", True)
    assert (bad.level, bad.findings[-1].kind, bad.findings[-1].severity) == (RestoreLevel.NONE, "probe", "error")
    assert (unasked.probe, [finding.kind for finding in unasked.findings]) == (None, ["probe"])


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("scheduler", MixedStepsError),
        ("step", MixedStepsError),
        ("cycle", StateError),
        ("object", UnencodableObjectError),
        ("backwards", InvalidOptionError),
        ("negative", InvalidOptionError),
        ("state", InvalidOptionError),
        ("key", InvalidOptionError),
        ("metadata", InvalidOptionError),
        ("metadata value", UnencodableObjectError),
        ("probe", InvalidOptionError),
    ],
)
def test_what_cannot_be_saved_is_an_error_of_the_call_and_leaves_nothing(tmp_path: Path, what: str, kind: type[Exception]) -> None:
    run = save_steps(tmp_path, 2)
    run.train(1)
    step: Any = 3
    state: Any = run.state
    options: dict[str, Any] = {}
    if what == "scheduler":
        run.scheduler.step()
    elif what == "step":
        step = 4
    elif what == "cycle":
        run.step(update=False)
    elif what == "object":
        state = {"state": run.state, "extra": {"it": object()}}
    elif what == "backwards":
        step = 3
    elif what == "negative":
        step = -1
    elif what == "state":
        state = [1]
    elif what == "key":
        state = {1: torch.ones(1)}
    elif what == "metadata":
        options = {"metadata": [1]}
    elif what == "metadata value":
        options = {"metadata": {"a": object()}}
    else:
        options = {"probe": 3}
    with Checkpointer(tmp_path) as checkpointer:
        if what == "backwards":
            checkpointer.save(3, run.state, wait=True)
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(kind):
            checkpointer.save(step, state, **options).result()
        assert [name for name in sorted(os.listdir(tmp_path)) if name not in (*before, ".epochs")] == []
        assert checkpointer.save(9, {"a": torch.ones(1)}).exception() is None


def test_a_state_of_another_shape_is_refused_and_no_older_step_is_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2)
    run = Run(seed=1)
    run.net[0].weight.data = torch.zeros(8, 5)
    run.net[0].weight.requires_grad_(True)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ShapeMismatchError):
        checkpointer.restore(run.state)
    assert [record for record in caplog.records if record.name.startswith("dcp_engine.checkpointer")] == []


def test_after_a_failed_restore_the_state_can_be_saved(tmp_path: Path) -> None:
    save_steps(tmp_path / "one", 1)
    file = next((tmp_path / "one" / "step-00000001").glob("model-*"))
    content = bytearray(file.read_bytes())
    content[4096] ^= 1
    file.write_bytes(content)
    run = Run(seed=1)
    with Checkpointer(tmp_path / "one") as checkpointer, pytest.raises(DigestMismatchError):
        checkpointer.restore(run.state, 1)
    fresh = Run(seed=1)
    fresh.train(1)
    with Checkpointer(tmp_path / "two") as checkpointer:
        checkpointer.save(1, fresh.state, wait=True)
        assert checkpointer.restore(run.state).step == 1  # type: ignore[union-attr]
    run.train(1)
    with Checkpointer(tmp_path / "three") as checkpointer:
        checkpointer.save(2, run.state, wait=True)


def test_some_components_alone_come_back_and_the_rest_is_left(tmp_path: Path) -> None:
    saved = save_steps(tmp_path, 3)
    run = Run(seed=1)
    with Checkpointer(tmp_path) as checkpointer:
        report = checkpointer.restore(run.state, components=["model", "optimizer"])
        assert report is not None
        assert (report.level, report.quality, run.counters.step) == (RestoreLevel.OPTIMIZER, "recoverable", 0)
        with pytest.raises(InvalidOptionError, match="no such components"):
            checkpointer.restore(run.state, components=["weights"])
        with pytest.raises(InvalidOptionError, match="of one TrainState"):
            checkpointer.restore({"a": torch.ones(1)}, components=["model"])
    assert all(torch.equal(value, saved.parameters()[name]) for name, value in run.parameters().items())


def test_a_part_that_is_saved_by_hand_is_none_to_resume_from(tmp_path: Path) -> None:
    run = save_steps(tmp_path, 1)
    run.train(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, PartOfState(run.state, ["model", "progress"]), wait=True)
        assert checkpointer.steps() == [1, 2]
        report = checkpointer.restore(Run(seed=1).state)
        assert report is not None
        assert (report.step, report.passed_over) == (1, ())
        part = Run(seed=1)
        report = checkpointer.restore(PartOfState(part.state, ["model", "progress"]))
        assert report is not None
        assert (report.step, part.counters.step) == (2, 2)


def test_a_root_with_parts_alone_is_no_fresh_start(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, PartOfState(run.state, ["model"]), wait=True)
        with pytest.raises(CheckpointNotFoundError, match="none of them is a whole state"):
            checkpointer.restore(run.state, missing_ok=True)


def test_a_mapping_may_hold_a_training_state_beside_other_values(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    state: dict[str, Any] = {"run": run.state, "note": {"text": "a", "tensor": torch.ones(2)}}
    with Checkpointer(tmp_path, save_every=1) as checkpointer:
        checkpointer.maybe_save(1, state)
        checkpointer.wait()
        other = Run(seed=1)
        target: dict[str, Any] = {"run": other.state, "note": {"text": "", "tensor": torch.zeros(2)}}
        report = checkpointer.restore(target)
        assert report is not None
        assert (report.level, target["note"]["text"], target["note"]["tensor"].tolist()) == (RestoreLevel.TRAJECTORY, "a", [1, 1])
        assert other.counters.step == 1


@pytest.mark.parametrize("step", ["newest", 1.5, True, None])
def test_what_is_no_step_is_told_what_there_is(tmp_path: Path, step: Any) -> None:
    save_steps(tmp_path, 1)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(InvalidOptionError, match="no step to restore"):
        checkpointer.restore(Run().state, step)


def test_a_closed_one_is_told_so(tmp_path: Path) -> None:
    run = save_steps(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(2, run.state),
        lambda: checkpointer.maybe_save(2, run.state),
        lambda: checkpointer.restore(run.state),
    ):
        with pytest.raises(ClosedError):
            call()
    assert checkpointer.steps() == [1]


def test_an_exception_of_the_body_is_the_one_that_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": {"it": object()}})
        raise ZeroDivisionError
    assert any("a save failed, too" in record.getMessage() for record in caplog.records)


def test_an_error_that_nobody_read_is_raised_by_the_next_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": {"it": object()}}).wait_done()
        with pytest.raises(UnencodableObjectError):
            checkpointer.save(2, {"a": torch.ones(1)})
        checkpointer.save(3, {"a": torch.ones(1)}, wait=True)
        assert checkpointer.steps() == [3]


@pytest.mark.parametrize("kind", ["file", "checkpoint", "foreign", "stock"])
def test_what_is_no_root_is_refused_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "run"
    if kind == "file":
        place.write_text("a")
    elif kind == "foreign":
        place.mkdir()
        (place / "photo.jpg").write_text("a")
    elif kind == "stock":
        place.mkdir()
        (place / ".metadata").write_text("a")
    else:
        save_steps(tmp_path / "other", 1)
        place = tmp_path / "other" / "step-00000001"
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InvalidOptionError):
        Checkpointer(place)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("names", [[], [".cache"], ["lost+found"], ["train.log", "step-00000001"], ["train.log", ".epochs"]])
def test_what_a_run_may_live_in_is_accepted(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, {"a": torch.ones(1)}, wait=True)
        assert checkpointer.steps() == [2]


def test_evaluation_leaves_the_random_numbers_of_training_alone(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    run = Run(generators={"mine": generator})
    run.train(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.state, wait=True)
        torch.manual_seed(0)
        with checkpointer.eval_rng():
            torch.rand(3)
            torch.rand(3, generator=generator)
        found = (torch.rand(1).item(), torch.rand(1, generator=generator).item())
        torch.manual_seed(0)
        generator.manual_seed(5)
        assert found == (torch.rand(1).item(), torch.rand(1, generator=generator).item())
        record = checkpointer.record_evaluation(1, {"loss": 0.25}, code="abc", data="test", config={"beams": 4})
        assert checkpointer.evaluations(1).records == (record,)
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.record_evaluation(2, {"loss": 0.25})


def test_keys_reach_writers_and_readers(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, signing_key=b"k" * 32)
    with Checkpointer(tmp_path, signing_key=b"k" * 32) as checkpointer:
        assert checkpointer.restore(Run(seed=1).state).step == 1  # type: ignore[union-attr]
        assert checkpointer.verify(1).faults == ()
    with Checkpointer(tmp_path, signing_key=b"x" * 32) as checkpointer, pytest.raises(Exception, match="signed"):
        checkpointer.restore(Run(seed=1).state)


def test_an_unwritable_root_is_an_error_of_the_first_save(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("a")
    with Checkpointer(tmp_path / "run") as checkpointer:
        (tmp_path / "run").write_text("a")  # after it was made
        with pytest.raises((StorageError, InvalidOptionError)):
            checkpointer.save(1, {"a": torch.ones(1)})


def test_a_root_may_be_in_an_object_store() -> None:
    root = f"memory://{uuid.uuid4().hex}/run"
    run = Run()
    with Checkpointer(root, save_every=1, best=("loss", "min")) as checkpointer:
        for _ in range(3):
            run.step()
            checkpointer.maybe_save(run.counters.step, run.state)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        checkpointer.record_evaluation(2, {"loss": 0.5})
        other = Run(seed=1)
        for step, found in (("latest", 3), ("best", 2), (1, 1)):
            report = checkpointer.restore(other.state, step)
            assert report is not None
            assert (report.step, report.quality, other.counters.step) == (found, "bitwise", found)


def test_data_that_are_iterated_past_their_position_are_refused(tmp_path: Path) -> None:
    run = Run()
    run.loader = run.loader._loader  # type: ignore[assignment]  # as in a script that forgets ResumableLoader
    run.train(3)
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(MixedStepsError, match="data has handed out no sample, and the counters say that there were 24 samples"),
    ):
        checkpointer.save(3, run.state)
    assert RunRoot(tmp_path).steps() == []


def test_the_last_step_is_saved_once_however_often_it_is_forced(tmp_path: Path) -> None:
    run = Run()
    with Checkpointer(tmp_path, save_every=2) as checkpointer:
        for _ in range(3):
            run.train(1)
            checkpointer.maybe_save(run.counters.step, run.state, force=run.counters.step == 3)
        assert checkpointer.maybe_save(3, run.state, force=True) is None
    assert RunRoot(tmp_path).steps() == [2, 3]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore(run.state)
        assert checkpointer.maybe_save(3, run.state, force=True) is None
        run.train(1)
        assert checkpointer.maybe_save(4, run.state, force=True) is not None
    assert RunRoot(tmp_path).steps() == [2, 3, 4]
