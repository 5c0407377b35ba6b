"""dcp-engine: a checkpoint engine for ``torch.distributed.checkpoint``.

Names are loaded when first used (PEP 562), so that leaves can be imported from anywhere and the command line answers without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_engine.planners import BalancedSavePlanner, ReshardLoadPlanner
    from dcp_engine.storage import ShardReader, ShardWriter, VerifyReport, committed_steps, verify_checkpoint

__version__ = "0.1.0"
__all__ = [
    "BalancedSavePlanner",
    "ReshardLoadPlanner",
    "ShardReader",
    "ShardWriter",
    "VerifyReport",
    "__version__",
    "committed_steps",
    "verify_checkpoint",
]

_HOME = {
    "BalancedSavePlanner": "dcp_engine.planners",
    "ReshardLoadPlanner": "dcp_engine.planners",
    "ShardReader": "dcp_engine.storage",
    "ShardWriter": "dcp_engine.storage",
    "VerifyReport": "dcp_engine.storage",
    "committed_steps": "dcp_engine.storage",
    "verify_checkpoint": "dcp_engine.storage",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
