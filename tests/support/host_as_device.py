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
from dcp_engine.staging.split import SplitSlots, slots_to_split
from dcp_engine.staging.state import StagedTensor

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


def host_as_device(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """While a test runs, every tensor of the host is copied by the code that copies a device's; ``stage`` returns a future.

    Returns:
        For each staging that may take tensors apart: lengths of the slots that come apart, in bytes.
    """
    lengths: list[set[int]] = []

    def planned(extents: Sequence[Extent]) -> StagePlan:
        plan = plan_slots(extents)
        return replace(plan, host_runs=(), host_values=(), elsewhere=plan.slots)

    def nothing(*_: Any) -> nullcontext[None]:
        return nullcontext()

    def chosen(plan: StagePlan, tensors: Sequence[StagedTensor]) -> SplitSlots:
        found = slots_to_split(plan, tensors)
        lengths.append({slot.num_bytes for slot in plan.slots if slot.offset in found})
        return found

    monkeypatch.setattr(stager, "plan_slots", planned)
    monkeypatch.setattr(stager, "slots_to_split", chosen)
    monkeypatch.setattr(Arena, "pin", lambda _: None)
    for name, stand_in in (("Stream", _Stream), ("Event", _Event), ("stream", nothing), ("device", nothing)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
    return lengths
