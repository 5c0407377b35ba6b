"""The parts of the campaign: which there are, and each run in a process of its own, so that one that dies costs no other its result."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from faults.campaign.outcome import Outcome

__all__ = ["NAMES", "Result", "available", "chosen", "run_apart"]

NAMES = ("crash", "power", "power_root", "errors", "ranks", "damage", "readers", "parser", "writers", "object_store", "peer")
"""In the order of the table. Each is a module here with ``PART``, ``TITLE``, ``PROMISE`` and ``run(*, full, seed, workers) -> Outcome``."""

_PACKAGE = "faults.campaign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one part.

    Attributes:
        part: its name.
        title: what it does, in some words.
        promise: what it would have found broken.
        outcome: None where the part itself failed, which says nothing about the engine.
        failure: why there is no outcome, or "".
        extra: Markdown of a table of its own, or "".
    """

    part: str
    title: str
    promise: str
    outcome: Outcome | None = None
    failure: str = ""
    extra: str = ""

    @property
    def good(self) -> bool:
        """It ran, put at least one fault, and found nothing broken."""
        return self.outcome is not None and self.outcome.points > 0 and not self.outcome.bad


def available() -> tuple[str, ...]:
    """Names of the parts whose module is here."""
    return tuple(name for name in NAMES if find_spec(f"{_PACKAGE}.{name}") is not None)


def chosen(text: str | None, there: Sequence[str]) -> tuple[str, ...]:
    """The parts that a command line names, in the order of the table.

    Args:
        text: names with commas between; None stands for all.
        there: the names that are valid.

    Raises:
        ValueError: a name is not valid; the message lists those that are.
    """
    if text is None:
        return tuple(there)
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name not in there]
    if unknown:
        raise ValueError(f"no part of the campaign is named {', '.join(map(repr, unknown))}; there are {', '.join(there)}")
    return tuple(name for name in there if name in asked)


def run_apart(name: str, *, full: bool, seed: int, workers: int) -> Result:
    """Runs one part in a fresh process. A part that raises, or whose process dies, becomes a result that says so."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(_run, name, full, seed, workers).result()
        except Exception as error:  # whatever ended the process; BrokenProcessPool where it was killed
            return Result(part=name, title="", promise="", failure=f"the process of the part ended: {error!r}")


def _run(name: str, full: bool, seed: int, workers: int) -> Result:
    module = importlib.import_module(f"{_PACKAGE}.{name}")
    title, promise = cast(str, module.TITLE), cast(str, module.PROMISE)
    try:
        outcome: Outcome = module.run(full=full, seed=seed, workers=workers)
    except Exception:  # told with its traceback: it is the part that is wrong, or the engine in a way that it did not foresee
        return Result(part=name, title=title, promise=promise, failure=traceback.format_exc())
    extra = module.extra(outcome) if hasattr(module, "extra") else ""
    return Result(part=name, title=title, promise=promise, outcome=outcome, extra=extra)
