"""Everything that makes the next training step what it is, as one ``Stateful``."""

from __future__ import annotations

from dcp_engine.train_state.cadence import PartOfState, components_due
from dcp_engine.train_state.counters import Counters
from dcp_engine.train_state.differences import Difference, differences
from dcp_engine.train_state.per_rank import PerRank
from dcp_engine.train_state.report import Moved, Resized, TrainStateReport
from dcp_engine.train_state.state import TrainState
from dcp_engine.train_state.stored import stored_components

__all__ = [
    "Counters",
    "Difference",
    "Moved",
    "PartOfState",
    "PerRank",
    "Resized",
    "TrainState",
    "TrainStateReport",
    "components_due",
    "differences",
    "stored_components",
]
