"""``python -m benchmarks``: measures rows, shows tables, leaves JSON and pictures."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from benchmarks import pictures, report
from benchmarks.files import remove
from benchmarks.harness import Row, measure, quiet
from benchmarks.machine import describe
from benchmarks.options import Options, parse
from benchmarks.results import RowResult, as_document

__all__ = ["main"]

_FOLDERS = ("out", "disk", "memory")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where an engine of ours has no figure in some case; 2 for a bad command line."""
    asked = parse(sys.argv[1:] if arguments is None else arguments)
    quiet()
    options = replace(
        asked,
        disk=os.path.join(os.path.abspath(asked.disk), f"run-{os.getpid()}"),
        memory=os.path.join(asked.memory, f"dcp-engine-benchmarks-{os.getpid()}") if asked.memory else "",
    )
    for folder in filter(None, (options.out, options.disk, options.memory)):
        os.makedirs(folder, exist_ok=True)
    try:
        rows = _run_all(options)
    finally:
        for folder in filter(None, (options.disk, options.memory)):
            remove(folder)
    print(report.summary(rows))
    broken = [system for row in rows for case in row.cases for system in case.systems if system.role == "ours" and not system.secs]
    failed = [system.failure for system in broken if "no such option" not in system.failure]
    for failure in failed:
        print(f"one of our own engines has no figure: {failure}", file=sys.stderr)
    return 1 if failed else 0


def _run_all(options: Options) -> list[RowResult]:
    from benchmarks.rows import ROWS

    machine = describe({name: getattr(options, name) for name in _FOLDERS[1:] if getattr(options, name)})
    shown = {name: value for name, value in asdict(options).items() if name not in _FOLDERS}
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, load {machine['load_average'][0]:.1f}")
    rows: list[RowResult] = []
    for name in options.rows:
        rows.append(_run_row(ROWS[name], options))
        print("\n" + report.row_text(rows[-1]), flush=True)
        # After every row: what was measured survives whatever happens to the next one.
        with open(os.path.join(options.out, "results.json"), "w", encoding="utf-8") as file:
            json.dump(as_document(rows, machine, shown), file, indent=1)
        pictures.draw(rows[-1], options.out)
    if options.update_readme:
        _update_readme(rows, machine, options)
    return rows


def _run_row(row: Row, options: Options) -> RowResult:
    begin = time.monotonic()
    cases = []
    for case in row.cases(options):
        started = time.monotonic()
        try:
            cases.append(measure(row, case, options, _say))
        finally:
            case.close()
        _say("")
        print(f"{row.NAME} {case.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return RowResult(
        name=row.NAME,
        title=row.TITLE,
        cases=cases,
        claims=row.claims(cases),
        notes=row.notes(options),
        elapsed_secs=time.monotonic() - begin,
    )


def _say(line: str) -> None:
    """Progress on one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line[:110]}", end="", file=sys.stderr, flush=True)


def _update_readme(rows: list[RowResult], machine: dict[str, object], options: Options) -> None:
    """Tables and pictures of the rows that ran, in place of those of the last run."""
    home = os.path.dirname(os.path.abspath(__file__))
    folder = os.path.join(home, "pictures")
    os.makedirs(folder, exist_ok=True)
    for row in rows:
        pictures.draw(row, folder)
    memory_gb = int(str(machine["memory_bytes"])) / 1e9
    lines = [
        f"Measured on {machine['cpu']}, {machine['cores']} cores, {memory_gb:.0f} GB, {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}; file systems {machine['file_systems']}; {options.threads} threads.",
        "",
        *(report.row_text(row, pictures="pictures/") for row in rows),
    ]
    path = os.path.join(home, "README.md")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(report.insert_between_markers(text, "\n".join(lines)))


if __name__ == "__main__":
    raise SystemExit(main())
