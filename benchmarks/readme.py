"""Fills ``benchmarks/README.md``: what runs measured goes between a row's two markers, everything outside is written by hand and stays."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.history import RUNS, Run, measured_in, verdict
from benchmarks.report import bound, case_table, table
from benchmarks.results import RowResult

__all__ = ["fill", "markers", "section"]


def markers(row: str) -> tuple[str, str]:
    """The lines that a row's results stand between."""
    return f"<!-- results of {row}: begin -->", f"<!-- results of {row}: end -->"


def fill(text: str, row: str, content: str) -> str:
    """The document with the content in place of what was between the row's markers.

    Raises:
        ValueError: a marker is missing, twice there, or they are the wrong way round.
    """
    begin, end = markers(row)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"the document must hold {begin!r} and after it {end!r}, once each")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


def section(row: RowResult, runs: Sequence[Run], pictures: str) -> str:
    """A row as Markdown: its figures over the last runs, the picture, and folded away the newest run's systems.

    Args:
        row: what the newest run measured.
        runs: those that may be compared with it, oldest first, the newest last.
        pictures: link prefix of the row's picture.
    """
    lines = [_measured_on(runs[-1], row), "", _figures(row, runs), "", f"![{row.name}]({pictures}{row.name}.png)", ""]
    lines += ["<details><summary>Every system of the newest run</summary>", ""]
    for case in row.cases:
        lines += [f"**{case.name}**" + (f", {case.nbytes / 1e6:,.0f} MB" if case.nbytes else ""), "", case_table(case), ""]
    lines += [*(f"- {note}" for note in row.notes), "", "</details>"]
    return "\n".join(lines)


def _measured_on(run: Run, row: RowResult) -> str:
    machine = run.machine
    memory_gb = int(machine["memory_bytes"]) / 1e9
    systems = ", ".join(f"{kind} ({name})" for name, kind in machine["file_systems"].items())
    return (
        f"Newest run: {run.date}, commit {run.code}, {machine['cpu']}, {machine['cores']} cores, {memory_gb:.0f} GB, {machine['kernel']}, "
        f"Python {machine['python']}, torch {machine['torch']}, {systems}; {run.options['threads']} threads, {row.elapsed_secs:.0f} s, "
        f"load {machine['load_average'][0]:.1f} at the start."
    )


def _figures(row: RowResult, runs: Sequence[Run]) -> str:
    """A line a figure: what the last runs measured, newest last, and whether it held in all of them."""
    cells = [["figure", "reach", f"last {RUNS} runs", "newest: rounds' spread", ""]]
    for claim in row.claims:
        values = measured_in(runs, row.name, claim.text)
        spread = "" if claim.low is None or claim.high is None else f"{claim.low:.3g} to {claim.high:.3g}"
        text = claim.text + (f" ({claim.detail})" if claim.detail else "")
        cells.append([text, bound(claim), ", ".join(f"{value:.3g}" for value in values) or "-", spread, verdict(claim, values)])
    return table(cells)
