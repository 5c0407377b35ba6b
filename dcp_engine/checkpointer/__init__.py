"""Checkpoints of a training run: when they are consistent, how a run comes back from them, and what that is worth.

- The calls: ``checkpointer``, ``options``. What is saved: ``parts``; by whom: ``ranks``.
- Saving: ``saving``, ``cadence`` (when), ``cut`` (whether it is one step), ``record`` and ``recorded`` (what is noted of it),
  ``protection`` (of what is copied from a GPU).
- By rules: ``policies``, ``schedule`` (when to save), ``retention`` (what stays, and whether there is room), ``policy_record``.
- Coming back: ``restoring``, ``choosing`` (the best step), ``probing``, ``checks``, ``read_back``, ``report``.
- Both: ``probe`` (a fixed input), ``evaluation`` (what is said of a checkpoint later), ``rng_guard``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_engine.checkpointer.checkpointer import Checkpointer
    from dcp_engine.checkpointer.checks import Finding
    from dcp_engine.checkpointer.evaluation import EvaluationRecord
    from dcp_engine.checkpointer.probe import ProbeResult
    from dcp_engine.checkpointer.report import RestoreLevel, RestoreReport

__all__ = ["Checkpointer", "EvaluationRecord", "Finding", "ProbeResult", "RestoreLevel", "RestoreReport"]

_HOME = {
    "Checkpointer": "checkpointer",
    "EvaluationRecord": "evaluation",
    "Finding": "checks",
    "ProbeResult": "probe",
    "RestoreLevel": "report",
    "RestoreReport": "report",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dcp_engine.checkpointer.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
