"""Proof that a run which was stopped and resumed is the run that never stopped, for tests of a training script.

``resume`` has the call, ``context`` what the script sees of it, ``stops`` where a run is stopped. ``launch`` runs a leg: ``processes``
starts its ranks by forking a ``template``, each is a ``rank_process`` that ends with its ``parent``, writes ``records`` of the ``values``
that the script tells, and is stopped inside a save by ``save_watch``. ``verdict`` judges leg after leg: ``compare`` holds steps against
each other, ``samples`` counts what was taken twice or never; ``report`` is the outcome.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_engine.testing.context import RunContext
    from dcp_engine.testing.processes import RankProcesses
    from dcp_engine.testing.report import LegReport, ResumeReport
    from dcp_engine.testing.resume import assert_resume_equal, check_resume
    from dcp_engine.testing.stops import Layout, StopAt

__all__ = ["Layout", "LegReport", "RankProcesses", "ResumeReport", "RunContext", "StopAt", "assert_resume_equal", "check_resume"]

# Loaded when first used: what holds records against each other needs no torch.
_HOME = {
    "RunContext": "dcp_engine.testing.context",
    "RankProcesses": "dcp_engine.testing.processes",
    "LegReport": "dcp_engine.testing.report",
    "ResumeReport": "dcp_engine.testing.report",
    "assert_resume_equal": "dcp_engine.testing.resume",
    "check_resume": "dcp_engine.testing.resume",
    "Layout": "dcp_engine.testing.stops",
    "StopAt": "dcp_engine.testing.stops",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
