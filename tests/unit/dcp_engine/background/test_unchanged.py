"""The alarm for a state that does not change, also where its digest comes late."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from support.late_copies import LateCopies

from dcp_engine import ShardWriter
from dcp_engine.background import BackgroundSaver, UnchangedStateWarning
from dcp_engine.background.unchanged import UnchangedAlarm
from dcp_engine.staging import DoubleBufferStager


def content(value: int | None) -> Future[int | None]:
    future: Future[int | None] = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("states", "rings"),
    [
        ([(1, 7), (2, 7)], True),
        ([(1, 7), (2, 8)], False),
        ([(1, 7), (1, 7)], False),  # the same step again is no news
        ([(2, 7), (1, 7)], False),  # nor one that was gone back to
        ([(1, None), (2, None)], False),
        ([(1, 7), (2, None), (3, 7)], True),
        ([(1, 7), (None, 7), (2, 8)], False),
    ],
)
def test_it_rings_for_a_later_step_with_the_same_digest(states: list[tuple[int | None, int | None]], rings: bool) -> None:
    alarm = UnchangedAlarm()
    for step, value in states:
        alarm.add(step, content(value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alarm.ring()
        alarm.ring()
    assert len(caught) == int(rings)


def test_digests_that_come_late_are_compared_in_the_order_of_the_saves() -> None:
    alarm = UnchangedAlarm()
    late: Future[int | None] = Future()
    alarm.add(1, late)
    alarm.add(2, content(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alarm.ring()
    late.set_result(7)
    with pytest.warns(UnchangedStateWarning, match="step 2 are those of step 1"):
        alarm.ring()


def test_a_state_that_is_still_being_copied_from_a_device_rings_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies(monkeypatch)
    state = {"w": torch.ones(3)}
    stager = DoubleBufferStager(memory="plain")
    with BackgroundSaver(stager=stager) as saver, warnings.catch_warnings():
        warnings.simplefilter("error", UnchangedStateWarning)
        saver.submit(state, writer=ShardWriter(tmp_path / "1"), step=1)
        handle = saver.submit(state, writer=ShardWriter(tmp_path / "2"), step=2)
        assert not handle.staged.done()
        copies.end()
        handle.result(60)
        state["w"] += 1
        with pytest.warns(UnchangedStateWarning, match="step 2 are those of step 1"):
            saver.submit(state, writer=ShardWriter(tmp_path / "3"), step=3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UnchangedStateWarning)
            saver.submit(state, writer=ShardWriter(tmp_path / "4"), step=4)
            saver.wait(60)
        assert [str(one.message)[:49] for one in caught] == ["the tensors staged for step 4 are those of step 3"]
    stager.close()
