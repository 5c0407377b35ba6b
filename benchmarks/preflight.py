"""What can be known before anything is measured: folders that are none, read-only or too full, and a README without a place for a row."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable

from benchmarks.options import Options
from benchmarks.readme import fill

__all__ = ["folder_problem", "readme_problem", "space_needed"]

_STATES = {"F1": 1.25, "F2": 8.5, "F3": 3.25, "F5": 0.25, "F7": 1.5, "F9": 0.5}
"""Checkpoints of the state that lie on a file system at the same time: in a load's case, one of every engine."""

_BYTES = {"F4": 3 << 30, "F6": 1 << 30}
"""Bytes of rows whose size is their own."""


def space_needed(rows: Iterable[str], state_bytes: int, *, quick: bool) -> int:
    """Free bytes that the hungriest row wants at each place, roughly.

    Args:
        rows: that will run, one after the other.
        state_bytes: of F1 to F3 and F7.
        quick: sizes are tiny.
    """
    own = {name: nbytes >> 4 if quick else nbytes for name, nbytes in _BYTES.items()}
    return max(round(_STATES.get(name, 0) * state_bytes) + own.get(name, 0) for name in rows)


def folder_problem(options: Options) -> str:
    """Why one of the folders will not do, in one line that says what would; empty where all will. Makes the folders that are not there."""
    needed = space_needed(options.rows, options.state_bytes, quick=options.quick)
    for option, folder, needs in (("--out", options.out, 0), ("--disk", options.disk, needed), ("--memory", options.memory, needed)):
        if not folder:
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(4096))
        except OSError as error:
            return f"{option} {folder}: cannot be written to ({os.strerror(error.errno or 0)}); name a folder that can"
        free = shutil.disk_usage(folder).free
        if free < needs:
            return (
                f"{option} {folder}: {free / 1e9:.1f} GB are free, and {', '.join(options.rows)} need about {needs / 1e9:.1f} GB; "
                f"name another folder{', none by an empty name' if option == '--memory' else ''}, fewer --rows or a smaller --state-mb"
            )
    return ""


def readme_problem(text: str, rows: Iterable[str]) -> str:
    """Why the README has no place for the results of these rows; empty where it has."""
    for row in rows:
        try:
            fill(text, row, "")
        except ValueError as error:
            return f"benchmarks/README.md: {error}"
    return ""
