"""What a run of the campaign has shown, as text for a terminal, as JSON, and as rows of ``docs/reliability.md``. Pure functions."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from faults.campaign.outcome import Outcome
from faults.campaign.parts import NAMES, Result

__all__ = ["as_document", "fill", "record", "summary", "versions"]

TABLE = "the campaign"
"""Name of the marked place that holds the table of all parts. A part's own table has the part's name."""
_COLUMNS = ("part", "promise", "faults", "kinds", "seed", "size", "broken", "date", "versions")
_FEW_KINDS = 24


def versions() -> str:
    """The versions that results depend on. Nothing that tells one machine from another."""
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "numpy"):
        try:
            found.append(f"{package} {version(package).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def summary(results: Sequence[Result]) -> str:
    """The table for a terminal, and below it everything that is wrong."""
    rows = [("part", "faults", "broken", "seed", "secs", "what was done")]
    for result in results:
        outcome = result.outcome
        if outcome is None:
            rows.append((result.part, "-", "-", "-", "-", "the part itself failed"))
            continue
        num_bad = str(len(outcome.bad)) if outcome.points else "no fault was put"
        rows.append((result.part, f"{outcome.points:,}", num_bad, str(outcome.seed), f"{outcome.secs:.0f}", result.title))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for result in results:
        if result.failure:
            lines += ["", f"{result.part}: the part failed", result.failure.rstrip()]
        if result.outcome is not None:
            lines += [f"{result.part}: BROKEN (seed {result.outcome.seed}): {text}" for text in result.outcome.bad]
    return "\n".join(lines)


def as_document(results: Sequence[Result], *, full: bool, date: str) -> dict[str, Any]:
    """The whole of it, for JSON."""
    return {
        "date": date,
        "full": full,
        "versions": versions(),
        "parts": [
            {
                "part": result.part,
                "title": result.title,
                "promise": result.promise,
                "failure": result.failure,
                "outcome": None if result.outcome is None else {**asdict(result.outcome), "facts": dict(result.outcome.facts)},
            }
            for result in results
        ],
    }


def record(text: str, results: Sequence[Result], *, full: bool, date: str) -> str:
    """The document with the rows of these results in place of the last ones. Parts that did not run, or failed, keep theirs.

    Args:
        text: of the document, with a begin and an end mark for each table.
        full: the full sizes were run.
        date: of the run, as in ``2026-01-31``.

    Raises:
        ValueError: a mark is missing.
    """
    rows = _rows_of(_between(text, TABLE))
    for result in results:
        if result.outcome is not None:
            rows[result.part] = _row(result, result.outcome, full=full, date=date)
            if result.extra:
                text = fill(text, result.part, f"{result.extra}\n\n{_size(full)}, {date}, {versions()}, seed {result.outcome.seed}.")
    head = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    return fill(text, TABLE, "\n".join(head + [rows[name] for name in NAMES if name in rows]))


def fill(text: str, name: str, content: str) -> str:
    """The text with other content at a marked place. Raises ``ValueError`` where there is no such place."""
    begin, end = _marks(name)
    old = _between(text, name)
    return text.replace(f"{begin}{old}{end}", f"{begin}\n\n{content}\n\n{end}")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- table of {name}: begin -->", f"<!-- table of {name}: end -->"


def _between(text: str, name: str) -> str:
    begin, end = _marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the document must hold {begin!r} and {end!r} once each, in this order")
    return text[text.index(begin) + len(begin) : text.index(end)]


def _rows_of(table: str) -> dict[str, str]:
    """Part -> its line in a table of ours."""
    lines = [line for line in table.strip().splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip(): line for line in lines if line.split("|")[1].strip() in NAMES}


def _row(result: Result, outcome: Outcome, *, full: bool, date: str) -> str:
    num_bad = str(len(outcome.bad)) if outcome.bad else "none"
    cells = (outcome.part, result.promise, f"{outcome.points:,}", _kinds(outcome.facts), str(outcome.seed), _size(full), num_bad, date)
    return _line([*cells, versions()])


def _kinds(facts: Mapping[str, int]) -> str:
    named = [f"{name} {count:,}" for name, count in facts.items()]
    return ", ".join(named[:_FEW_KINDS]) + (f" and {len(named) - _FEW_KINDS} more kinds" if len(named) > _FEW_KINDS else "")


def _size(full: bool) -> str:
    return "full" if full else "quick"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
