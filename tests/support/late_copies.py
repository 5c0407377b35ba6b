"""Copies from a device that end when a test says so, where there is no device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from dcp_engine.staging.copy_cuda import CudaCopier, Transfer
from dcp_engine.staging.layout import StagePlan
from dcp_engine.staging.split import SplitSlots

__all__ = ["LateCopies"]


class LateCopies:
    """While a test runs, every stager takes host memory for a device's: ``stage`` returns a future, done after :meth:`end`.

    Args:
        monkeypatch: undoes it.
        failure: what the device raises when the copies should be through.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self._ended = threading.Event()
        self._failure = failure
        monkeypatch.setattr(CudaCopier, "start", self._start)

    def end(self) -> None:
        """All copies are through, also those that are still to be begun."""
        self._ended.set()

    def _start(self, _plan: StagePlan, _tensors: Sequence[torch.Tensor], _flat: torch.Tensor, _split: SplitSlots) -> list[Transfer]:
        return [Transfer(torch.device("cpu"), self, [])]  # type: ignore[arg-type]

    def synchronize(self) -> None:
        """As an event's."""
        assert self._ended.wait(60)
        if self._failure is not None:
            raise self._failure
