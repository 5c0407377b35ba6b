"""``python -m benchmarks``: measures rows, shows tables, leaves JSON and pictures."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from benchmarks import pictures, readme, report
from benchmarks.files import remove
from benchmarks.harness import Row, measure, quiet
from benchmarks.history import Run, git_state, load_runs, save_run
from benchmarks.machine import describe
from benchmarks.options import Options, parse
from benchmarks.preflight import folder_problem, readme_problem
from benchmarks.results import RowResult, as_document

__all__ = ["main"]

_HOME = os.path.dirname(os.path.abspath(__file__))
_README = os.path.join(_HOME, "README.md")
_FOLDERS = ("disk", "memory")
_NOT_SHOWN = (*_FOLDERS, "out", "record")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where an engine of ours has no figure in some case; 2 for a bad command line or folder."""
    asked = parse(sys.argv[1:] if arguments is None else arguments)
    problem = folder_problem(asked) or (readme_problem(_read(_README), asked.rows) if asked.record else "")
    if problem:
        print(f"python -m benchmarks: error: {problem}", file=sys.stderr)
        return 2
    quiet()
    options = replace(
        asked,
        disk=os.path.join(os.path.abspath(asked.disk), f"run-{os.getpid()}"),
        memory=os.path.join(asked.memory, f"dcp-engine-benchmarks-{os.getpid()}") if asked.memory else "",
    )
    for folder in filter(None, (options.disk, options.memory)):
        os.makedirs(folder)
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

    machine = describe({name: getattr(options, name) for name in _FOLDERS if getattr(options, name)})
    code = git_state(_HOME)  # before tables and pictures change
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, load {machine['load_average'][0]:.1f}")
    rows: list[RowResult] = []
    for name in options.rows:
        rows.append(_run_row(ROWS[name], options))
        print("\n" + report.row_text(rows[-1]), flush=True)
        # After every row: what was measured survives whatever happens to the next one.
        with open(os.path.join(options.out, "results.json"), "w", encoding="utf-8") as file:
            json.dump(as_document(rows, machine, _shown(options)), file, indent=1)
        pictures.draw(rows[-1], options.out)
    if options.record:
        _record(rows, machine, options, code)
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


def _record(rows: list[RowResult], machine: dict[str, Any], options: Options, code: str) -> None:
    """Adds the run to the history, and puts tables and pictures of its rows in place of the last ones.

    Rows that this machine cannot measure, for want of a device, keep what another one has measured.
    """
    rows = [row for row in rows if row.cases]
    if not rows:
        return
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    run = Run.of(rows, date=date, code=code, machine=machine, options=_shown(options))
    save_run(run, os.path.join(_HOME, "results"))
    runs = [known for known in load_runs(os.path.join(_HOME, "results")) if known.is_like(run)]
    for row in rows:
        pictures.draw(row, os.path.join(_HOME, "pictures"))
    text = _read(_README)
    for row in rows:
        text = readme.fill(text, row.name, readme.section(row, runs, "pictures/"))
    with open(_README, "w", encoding="utf-8") as file:
        file.write(text)


def _shown(options: Options) -> dict[str, Any]:
    """Options that figures depend on; no paths."""
    return {name: value for name, value in asdict(options).items() if name not in _NOT_SHOWN}


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


if __name__ == "__main__":
    raise SystemExit(main())
