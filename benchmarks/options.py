"""What the command line asks for, checked before anything is measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ROW_NAMES", "Options", "parse"]

ROW_NAMES = ("F1", "F2", "F3", "F4", "F5", "F6", "F7", "F8", "F9")
"""Rows that there are modules for, in the order in which they run."""

_COUNTS = ("state_mb", "rounds", "ranks", "tensors", "threads")
_DEFAULT_STATE_MB = 1200
_QUICK_STATE_MB = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure.

    Attributes:
        rows: names from :data:`ROW_NAMES`, each once, in that order.
        quick: tiny sizes and few rounds: shows that everything works, and no figure of it means anything.
        out: folder for the results and pictures.
        disk: folder on a disk, for what the rows save there.
        memory: folder on a tmpfs; empty where there is none.
        state_bytes: bytes of the state that F1 to F3 and F7 move.
        rounds: rounds of every case, whatever they take; 0: what the row allows and its seconds are enough for.
        ranks: ranks of F6's largest cluster; 0: what the row thinks right.
        tensors: tensors of F6.
        threads: threads of every engine that has such an option, and of the physical limits.
        measure_memory: also run systems once on their own, to see how much memory they need.
        record: add the figures to ``benchmarks/results`` and put tables and pictures into ``benchmarks/README.md``.
    """

    rows: tuple[str, ...]
    quick: bool
    out: str
    disk: str
    memory: str
    state_bytes: int
    rounds: int
    ranks: int
    tensors: int
    threads: int
    measure_memory: bool
    record: bool


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line.

    Raises:
        SystemExit: with status 2, after a message on stderr that says what is valid.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    for name in _COUNTS:
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, and is {getattr(given, name)}")
    if given.memory and not os.path.isdir(given.memory):
        parser.error(f"--memory {given.memory}: no such folder; name a tmpfs, or '' for none")
    if given.readme:
        _refuse_partial(parser, given)
    state_mb = given.state_mb or (_QUICK_STATE_MB if given.quick else _DEFAULT_STATE_MB)
    return Options(
        rows=given.rows,
        quick=given.quick,
        out=given.out,
        disk=given.disk,
        memory=given.memory,
        state_bytes=state_mb * 10**6,
        rounds=given.rounds or 0,
        ranks=given.ranks or 0,
        tensors=given.tensors or (50 if given.quick else 2000),
        threads=given.threads,
        measure_memory=not given.no_memory,
        record=given.readme,
    )


def _refuse_partial(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Only runs of the same work may stand side by side."""
    if given.quick:
        parser.error("--readme would show figures of --quick, which mean nothing: leave one of the two out")
    other = [f"--{name.replace('_', '-')}" for name in ("state_mb", "rounds", "ranks", "tensors") if getattr(given, name) is not None]
    if other:
        parser.error(f"--readme records runs of the full size, which can be compared: leave {' and '.join(other)} out")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="dcp-engine beside its peers; benchmarks/README.md explains the rows."
    )
    add = parser.add_argument
    add("--rows", type=_rows, default=ROW_NAMES, metavar="F1,F2", help=f"rows to measure, of {', '.join(ROW_NAMES)}; all by default")
    add("--quick", action="store_true", help="tiny sizes: shows that everything works, figures mean nothing")
    add("--out", default=os.path.join("build", "benchmarks"), help="folder for results and pictures (default: %(default)s)")
    add("--disk", default=os.path.join("build", "benchmarks-disk"), help="folder on the disk to measure (default: %(default)s)")
    add("--memory", default="/dev/shm" if os.path.isdir("/dev/shm") else "", help="folder on a tmpfs, '' for none (default: '%(default)s')")
    add("--state-mb", type=int, help=f"size of the state of F1 to F3 and F7 (default: {_DEFAULT_STATE_MB}; quick: {_QUICK_STATE_MB})")
    add("--rounds", type=int, help="rounds of every case, whatever they take (default: what the row's seconds allow)")
    add("--ranks", type=int, help="ranks of F6's largest cluster (default: 1024; quick: 16)")
    add("--tensors", type=int, help="tensors of F6 (default: 2000; quick: 50)")
    add("--threads", type=int, default=2, help="threads of every engine that has such an option (default: %(default)s)")
    add("--no-memory", action="store_true", help="do not measure peak memory, which runs systems once more")
    add("--readme", action="store_true", help="record the figures in benchmarks/results, tables and pictures in benchmarks/README.md")
    return parser


def _rows(text: str) -> tuple[str, ...]:
    asked = [name.strip().upper() for name in text.split(",")]
    unknown = [name for name in asked if name not in ROW_NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no row {', '.join(map(repr, unknown))}: the rows are {', '.join(ROW_NAMES)}")
    return tuple(name for name in ROW_NAMES if name in asked)
