"""The warning filters of the test run, read from the one place that lists them, for processes that pytest does not configure."""

from __future__ import annotations

import builtins
import importlib
import tomllib
import warnings
from pathlib import Path
from typing import Any

__all__ = ["apply_warning_filters", "warning_filters"]

_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def warning_filters() -> list[str]:
    """``filterwarnings`` of the pytest configuration: ``action:message:category``, message a regular expression."""
    options = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    return list(options["filterwarnings"])


def apply_warning_filters(filters: list[str]) -> None:
    """Makes ``filters`` the only ones of this process; as in pytest, a later one wins over an earlier one."""
    warnings.resetwarnings()
    for text in filters:
        action, message, category = [*text.split(":"), "", ""][:3]
        warnings.filterwarnings(action, message=message, category=_category(category))  # type: ignore[arg-type]


def _category(name: str) -> Any:
    if not name:
        return Warning
    module, _, qualname = name.rpartition(".")
    return getattr(importlib.import_module(module) if module else builtins, qualname)
