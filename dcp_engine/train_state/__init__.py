"""Everything that makes the next training step what it is, as one ``Stateful``."""

from __future__ import annotations

from dcp_engine.train_state.counters import Counters
from dcp_engine.train_state.differences import Difference, differences
from dcp_engine.train_state.per_rank import PerRank
from dcp_engine.train_state.report import Moved, Resized, TrainStateReport
from dcp_engine.train_state.state import TrainState

__all__ = ["Counters", "Difference", "Moved", "PerRank", "Resized", "TrainState", "TrainStateReport", "differences"]
