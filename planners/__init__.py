"""What goes where: save and load planners, geometry, balance.

- Save: ``save`` (DCP's calls), ``save_local`` (what one rank has) and ``column_builder`` (the same as columns), ``save_columns`` (what all
  ranks do, where nothing is odd), ``save_global`` (the same, item by item), ``save_choice`` (what goes back to a rank), ``save_names``,
  ``save_cache`` (plans used again), ``replicas`` (whether they are equal), ``balance`` (who writes what).
- Load: ``load`` (DCP's calls), ``catalogue`` (what is stored), ``rename``, ``selection``, ``strictness``, ``misfits`` and ``dtype_policy``
  (what a value may take), ``load_items``, ``load_object``, ``load_report``; ``build`` and ``materialise`` (what is not there yet).
- Both: ``tree`` (names of leaves), ``skeleton`` (containers), ``local_shards`` (what a rank holds of a tensor) and ``placements`` (of a
  DTensor), ``ties``, ``geometry``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_engine.planners.load import ReshardLoadPlanner
    from dcp_engine.planners.load_report import LoadReport
    from dcp_engine.planners.rename import strip
    from dcp_engine.planners.save import BalancedSavePlanner

__all__ = ["BalancedSavePlanner", "LoadReport", "ReshardLoadPlanner", "strip"]

_HOME = {
    "BalancedSavePlanner": "dcp_engine.planners.save",
    "LoadReport": "dcp_engine.planners.load_report",
    "ReshardLoadPlanner": "dcp_engine.planners.load",
    "strip": "dcp_engine.planners.rename",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
