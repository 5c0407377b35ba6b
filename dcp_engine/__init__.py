"""dcp-engine: a checkpoint engine for ``torch.distributed.checkpoint``.

Names are loaded when first used (PEP 562), so that leaves can be imported from anywhere and the command line answers without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_engine.background import BackgroundSaver, Priority, SaveHandle, SaveTimings, UnchangedStateWarning
    from dcp_engine.checkpointer import Checkpointer, EvaluationRecord, RestoreLevel, RestoreReport
    from dcp_engine.data import ResumableLoader, ResumableSampler, ResumableStream, StreamSource, sample_generator
    from dcp_engine.planners import BalancedSavePlanner, ReshardLoadPlanner
    from dcp_engine.staging import DoubleBufferStager, StagingReport
    from dcp_engine.storage import EpochClaim, RunRoot, ShardReader, ShardWriter, VerifyReport, committed_steps, verify_checkpoint
    from dcp_engine.train_state import Counters, PerRank, TrainState

__version__ = "0.1.0"
__all__ = [
    "BackgroundSaver",
    "BalancedSavePlanner",
    "Checkpointer",
    "Counters",
    "DoubleBufferStager",
    "EpochClaim",
    "EvaluationRecord",
    "PerRank",
    "Priority",
    "ReshardLoadPlanner",
    "RestoreLevel",
    "RestoreReport",
    "ResumableLoader",
    "ResumableSampler",
    "ResumableStream",
    "RunRoot",
    "SaveHandle",
    "SaveTimings",
    "ShardReader",
    "ShardWriter",
    "StagingReport",
    "StreamSource",
    "TrainState",
    "UnchangedStateWarning",
    "VerifyReport",
    "__version__",
    "committed_steps",
    "sample_generator",
    "verify_checkpoint",
]

_HOME = {
    "BackgroundSaver": "dcp_engine.background",
    "Priority": "dcp_engine.background",
    "SaveHandle": "dcp_engine.background",
    "SaveTimings": "dcp_engine.background",
    "UnchangedStateWarning": "dcp_engine.background",
    "Checkpointer": "dcp_engine.checkpointer",
    "EvaluationRecord": "dcp_engine.checkpointer",
    "RestoreLevel": "dcp_engine.checkpointer",
    "RestoreReport": "dcp_engine.checkpointer",
    "ResumableLoader": "dcp_engine.data",
    "ResumableSampler": "dcp_engine.data",
    "ResumableStream": "dcp_engine.data",
    "StreamSource": "dcp_engine.data",
    "sample_generator": "dcp_engine.data",
    "DoubleBufferStager": "dcp_engine.staging",
    "StagingReport": "dcp_engine.staging",
    "BalancedSavePlanner": "dcp_engine.planners",
    "ReshardLoadPlanner": "dcp_engine.planners",
    "EpochClaim": "dcp_engine.storage",
    "RunRoot": "dcp_engine.storage",
    "ShardReader": "dcp_engine.storage",
    "ShardWriter": "dcp_engine.storage",
    "VerifyReport": "dcp_engine.storage",
    "committed_steps": "dcp_engine.storage",
    "verify_checkpoint": "dcp_engine.storage",
    "Counters": "dcp_engine.train_state",
    "PerRank": "dcp_engine.train_state",
    "TrainState": "dcp_engine.train_state",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
