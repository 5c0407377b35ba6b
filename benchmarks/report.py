"""Tables of what was measured, in Markdown that a terminal shows well too."""

from __future__ import annotations

from typing import Any

from benchmarks.results import CaseResult, Claim, RowResult, SystemResult

__all__ = ["bound", "case_table", "claims_table", "row_text", "summary", "table"]


def row_text(row: RowResult) -> str:
    """One row: claims, a table a case, notes."""
    lines = [f"### {row.name}: {row.title}", "", *([claims_table(row.claims), ""] if row.claims else [])]
    for case in row.cases:
        lines += [f"**{case.name}**" + (f", {case.nbytes / 1e6:,.0f} MB" if case.nbytes else ""), "", case_table(case), ""]
    lines += [f"- {note}" for note in row.notes]
    return "\n".join(lines).rstrip() + "\n"


def claims_table(claims: list[Claim]) -> str:
    """The row's figures: reach, measured, spread, whether it holds."""
    cells = [["figure", "reach", "measured", "rounds' spread", ""]]
    for claim in claims:
        measured = "-" if claim.measured is None else f"{claim.measured:.3g}"
        rounds = "" if claim.low is None or claim.high is None else f"{claim.low:.3g} to {claim.high:.3g}"
        holds = {None: "not measured", True: "holds", False: "short"}[claim.holds]
        text = claim.text + (f" ({claim.detail})" if claim.detail else "")
        cells.append([text, bound(claim), measured, rounds, holds])
    return table(cells)


def bound(claim: Claim) -> str:
    """The figure to reach, with its direction."""
    return f"{'<=' if claim.at_most else '>='} {claim.reach:.3g}"


def case_table(case: CaseResult) -> str:
    """The systems of a case: time with spread and rounds, speed, times ours, stored bytes, peak memory, and why there is no figure."""
    facts = _facts_shown(case)
    heads = [
        "system",
        "median s",
        "min to max",
        "rounds",
        *(["GB/s"] if case.nbytes else []),
        "x ours",
        *(label for label, _, _ in facts),
        "peak MB",
        "remarks",
    ]
    cells = [heads]
    for system in case.systems:
        cells.append(_system_cells(case, system, facts))
    return table(cells)


def summary(rows: list[RowResult]) -> str:
    """One line: how many figures hold."""
    claims = [claim for row in rows for claim in row.claims]
    held = sum(claim.holds is True for claim in claims)
    short = [claim.text for claim in claims if claim.holds is False]
    unknown = sum(claim.holds is None for claim in claims)
    return f"{held} of {len(claims)} figures hold, {len(short)} are short, {unknown} were not measured"


_MAX_REMARK = 160

_FACTS: tuple[tuple[str, str, Any], ...] = (
    ("stored", "stored_bytes", None),
    ("read MB", "bytes_by_calls", lambda value: f"{value / 1e6:,.1f}"),
    ("device MB", "bytes_from_device", lambda value: f"{value / 1e6:,.1f}"),
    ("even shares", "largest_share", lambda value: f"{value:.2f}"),
    ("times read", "times_read", lambda value: f"{value:.2f}"),
    ("blocked ms", "blocked_secs", lambda value: f"{value * 1e3:,.1f}"),
    ("state_dict ms", "state_dict_secs", lambda value: f"{value * 1e3:.1f}"),
    ("durable s", "durable_secs", lambda value: f"{value:.3f}"),
    ("step ms", "step_secs", lambda value: f"{value * 1e3:.1f}"),
    ("steps", "steps", lambda value: f"{value:.0f}"),
    ("slower", "slowdown", lambda value: f"{value:+.1%}"),
    ("memory MB", "memory_growth_bytes", lambda value: f"{value / 1e6:+,.1f}"),
    ("shared MB", "shared_growth_bytes", lambda value: f"{value / 1e6:+,.1f}"),
    ("threads", "threads_growth", lambda value: f"{value:+.0f}"),
    ("descriptors", "descriptors_growth", lambda value: f"{value:+.0f}"),
    ("us a chunk", "us_a_chunk", lambda value: f"{value:.2f}"),
    ("plan s", "plan_secs", lambda value: f"{value:.3f}"),
    ("finish s", "finish_secs", lambda value: f"{value:.3f}"),
    ("local ms", "local_secs", lambda value: f"{value * 1e3:.1f}"),
    ("gathered MB", "gathered_bytes", lambda value: f"{value / 1e6:,.2f}"),
    ("scattered MB", "scattered_bytes", lambda value: f"{value / 1e6:,.2f}"),
    ("results MB", "result_bytes", lambda value: f"{value / 1e6:,.2f}"),
    ("broadcast MB", "broadcast_bytes", lambda value: f"{value / 1e6:,.2f}"),
    ("manifest MB", "manifest_bytes", lambda value: f"{value / 1e6:,.2f}"),
    ("open s", "open_secs", lambda value: f"{value:.3f}"),
    ("load plan s", "load_plan_secs", lambda value: f"{value:.3f}"),
)


def _facts_shown(case: CaseResult) -> list[tuple[str, str, Any]]:
    """Facts that some system of the case told; device bytes only where a device was read."""
    told = {name for system in case.systems for name in system.facts}
    if not any((system.fact("bytes_from_device") or 0) > 0 for system in case.systems):
        told.discard("bytes_from_device")
    if "bytes_by_calls" in told and "stored_bytes" in told:
        told.discard("stored_bytes")  # a slice: the file's size is not what is compared
    return [entry for entry in _FACTS if entry[1] in told]


def _system_cells(case: CaseResult, system: SystemResult, facts: list[tuple[str, str, Any]]) -> list[str]:
    time = system.time
    if time is None:
        return [
            system.name,
            "-",
            "",
            "",
            *([""] if case.nbytes else []),
            "",
            *("" for _ in facts),
            "",
            (system.failure or "no round")[:_MAX_REMARK],
        ]
    times = case.times_faster(system)
    cells = [system.name, f"{time.median:.4g}", f"{time.low:.4g} to {time.high:.4g}", str(time.num)]
    if case.nbytes:
        cells.append(f"{case.nbytes / time.median / 1e9:.2f}")
    cells.append("" if times is None else f"{times.median:.2f}")
    for _, name, show in facts:
        value = system.fact(name)
        if value is None:
            cells.append("")
        elif show is not None:
            cells.append(show(value))
        else:
            cells.append(f"{value / case.nbytes:.3f}" if case.nbytes else f"{value / 1e6:,.1f} MB")
    peak = system.peak_bytes if system.peak_bytes is not None else system.fact("peak_bytes")
    return [*cells, "" if peak is None else f"{peak / 1e6:,.0f}", system.note]


def table(cells: list[list[str]]) -> str:
    """Markdown that also reads well as plain text."""
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
