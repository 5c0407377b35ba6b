"""``python -m benchmarks.gpu``: checks and measures staging on a CUDA device in one go, with torch and this package alone; leaves JSON."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.files import remove
from benchmarks.gpu_checks import CHECKS
from benchmarks.harness import MismatchError, measure, quiet
from benchmarks.machine import describe
from benchmarks.options import Options, parse
from benchmarks.report import row_text
from benchmarks.results import CaseResult, RowResult, as_document
from benchmarks.rows.f8_gpu import Gpu

__all__ = ["main"]

_LIMIT_SECS = 290.0
_FOLDERS = ("disk", "memory", "out")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, also without a device; 1 where a check failed or our engine has no figure; 2 for a bad command line.

    What is not through after five minutes is broken off, by an exit with status 1; what was measured until then is in the file.
    """
    given = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    if not torch.cuda.is_available():
        print("python -m benchmarks.gpu: there is no CUDA device here; nothing was checked or measured")
        return 0
    quiet()
    faulthandler.dump_traceback_later(_LIMIT_SECS, exit=True)
    folder = os.path.join(os.path.abspath(given.disk), f"gpu-{os.getpid()}")
    os.makedirs(folder)
    try:
        return _run(given, folder)
    finally:
        remove(folder)
        faulthandler.cancel_dump_traceback_later()


def _run(given: argparse.Namespace, folder: str) -> int:
    options = replace(parse(["--rows", "F8", "--memory", "", *(["--quick"] if given.quick else [])]), disk=folder, threads=given.threads)
    document: dict[str, Any] = {"machine": _machine(folder), "checks": {}}

    def write() -> None:
        os.makedirs(os.path.dirname(os.path.abspath(given.out)), exist_ok=True)
        with open(given.out, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)

    for name, check in CHECKS.items():
        document["checks"][name] = _outcome(check, folder)
        print(f"{name}: {document['checks'][name]}", flush=True)
        write()
    row = Gpu()
    begin = time.monotonic()
    cases: list[CaseResult] = []
    for case in row.cases(options):
        try:
            cases.append(measure(row, case, options, lambda _: None))
        finally:
            case.close()
        claims = row.claims(cases) if len(cases) > 1 else []
        result = RowResult(
            name=row.NAME, title=row.TITLE, cases=cases, claims=claims, notes=row.notes(options), elapsed_secs=time.monotonic() - begin
        )
        document |= as_document([result], document["machine"], _shown(options))
        write()
    print(row_text(result))
    broken = [system.failure for case in cases for system in case.systems if system.role == "ours" and not system.secs]
    for failure in broken:
        print(f"one of our own engines has no figure: {failure}", file=sys.stderr)
    return 1 if broken or any(outcome != "right" for outcome in document["checks"].values()) else 0


def _outcome(check: Callable[[str], None], folder: str) -> str:
    try:
        check(folder)
    except MismatchError as error:
        return f"WRONG: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks run, and the file says it
        return f"failed: {type(error).__name__}: {error}"[:300]
    return "right"


def _machine(folder: str) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = {
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
    return {**describe({"disk": folder}), **device}


def _shown(options: Options) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name not in _FOLDERS}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--out", default=os.path.join("build", "benchmarks", "gpu.json"), help="file for the results (default: %(default)s)")
    add("--disk", default=os.path.join("build", "benchmarks-disk"), help="folder to save into (default: %(default)s)")
    add("--threads", type=_positive, default=2, help="of every writer (default: %(default)s)")
    add("--quick", action="store_true", help="a small state: shows that everything works, figures mean nothing")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an int of at least 1, and is {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
