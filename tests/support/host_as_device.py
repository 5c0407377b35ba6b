"""The stager's copies from a CUDA device where there is none: host memory is taken for a device's, and streams do all at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from dcp_engine.staging import stager
from dcp_engine.staging.arena import Arena
from dcp_engine.staging.layout import Extent, StagePlan, plan_slots

__all__ = ["host_as_device"]


class _Stream:
    def __init__(self, *_: object, **__: object) -> None:
        self.priority = 0

    def wait_event(self, event: object) -> None:
        assert isinstance(event, _Event)

    def record_event(self) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        """Everything is done when it is asked for."""


class _Event:
    def __init__(self, **_: object) -> None:
        self._is_recorded = False

    def record(self, stream: object) -> None:
        assert isinstance(stream, _Stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """As the stream's."""


def host_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a test runs, every tensor of the host is copied by the code that copies a device's; ``stage`` returns a future."""

    def planned(extents: Sequence[Extent]) -> StagePlan:
        plan = plan_slots(extents)
        return replace(plan, host_runs=(), host_values=(), elsewhere=plan.slots)

    def nothing(*_: Any) -> nullcontext[None]:
        return nullcontext()

    monkeypatch.setattr(stager, "plan_slots", planned)
    monkeypatch.setattr(Arena, "pin", lambda _: None)
    for name, stand_in in (("Stream", _Stream), ("Event", _Event), ("stream", nothing), ("device", nothing)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
