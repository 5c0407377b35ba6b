"""What a handle says of a save that does not take place, and what runs between a durable checkpoint and its handle."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dcp_engine import ShardWriter, committed_steps
from dcp_engine.background import BackgroundSaver, SaveHandle
from dcp_engine.background.cut import Cut
from dcp_engine.errors import ClosedError, MixedStepsError, SaverBusyError

STATE = {"a": torch.ones(3)}


def test_a_skipped_save_is_over_tells_why_and_is_raised_by_nobody() -> None:
    handle = SaveHandle.of_skipped(SaverBusyError("not now"), step=3, path="run")
    assert (handle.skipped, handle.done(), handle.is_durable, handle.unread_failure()) == (True, True, False, None)
    assert repr(handle) == "SaveHandle(step=3, path='run', skipped)"
    with pytest.raises(SaverBusyError):
        handle.result()
    assert isinstance(handle.exception(), SaverBusyError)
    assert isinstance(handle.staged.exception(), SaverBusyError)


def test_what_follows_a_durable_save_is_done_when_its_handle_is(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    with BackgroundSaver() as saver:
        handle = saver.submit(STATE, writer=ShardWriter(tmp_path / "step-00000001"), after=lambda: seen.append(committed_steps(tmp_path)))
        handle.result()
        assert seen == [[1]]
        assert handle.is_durable


def test_what_follows_a_durable_save_may_fail_and_the_save_has_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), BackgroundSaver() as saver:
        saver.submit(STATE, writer=ShardWriter(tmp_path / "step-00000001"), after=lambda: 1 / 0).result()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/step-00000001 is published, and what was to follow failed: division by zero"
    ]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_state_that_is_not_one_steps_is_not_published(tmp_path: Path, executor: str) -> None:
    after: list[int] = []
    with BackgroundSaver(executor=executor) as saver:
        writer = ShardWriter(tmp_path / "step-00000001")
        handle = saver.submit(STATE, writer=writer, cut=Cut({"step": 1}, ("the scheduler is late",)), after=lambda: after.append(1))
        error = handle.exception()
        assert isinstance(error, MixedStepsError)
        assert error.disagreements == ("the scheduler is late",)
    assert (committed_steps(tmp_path), after, sorted(path.name for path in tmp_path.iterdir())) == ([], [], [])


def test_alone_there_is_nobody_to_fail_with(tmp_path: Path) -> None:
    with BackgroundSaver() as saver:
        saver.fail(ClosedError("a"), writer=ShardWriter(tmp_path / "it"))
        saver.submit({"a": torch.ones(2)}, writer=ShardWriter(tmp_path / "step-00000001")).result()
    assert committed_steps(tmp_path) == [1]
