"""Bytes: format, codecs, pipelines, back ends, publishing. Names load when first used, so that a leaf can be imported without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_engine.storage.epochs import EpochClaim
    from dcp_engine.storage.reader import ShardReader
    from dcp_engine.storage.root import RunRoot
    from dcp_engine.storage.steps import committed_steps
    from dcp_engine.storage.verify import VerifyReport, verify_checkpoint
    from dcp_engine.storage.writer import ShardWriter

__all__ = ["EpochClaim", "RunRoot", "ShardReader", "ShardWriter", "VerifyReport", "committed_steps", "verify_checkpoint"]

_HOME = {
    "EpochClaim": "epochs",
    "RunRoot": "root",
    "ShardReader": "reader",
    "ShardWriter": "writer",
    "VerifyReport": "verify",
    "committed_steps": "steps",
    "verify_checkpoint": "verify",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dcp_engine.storage.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
