"""``python -m faults.campaign``: puts faults in, part after part, and says which promises held."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from faults.campaign import report
from faults.campaign.parts import Result, available, chosen, run_apart

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[3]
_DOCUMENT = _ROOT / "docs" / "reliability.md"
_OUT = _ROOT / "build" / "faults"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where a promise is broken or a part failed; 2 for a bad command line."""
    parser = argparse.ArgumentParser(prog="python -m faults.campaign", description=__doc__, allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="the full sizes, which take an hour or more; else what the tests run")
    parser.add_argument("--parts", metavar="A,B", help=f"only these of {', '.join(available())}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (default 0)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes at once, in parts that can use several (default 1)")
    parser.add_argument("--record", action="store_true", help="put the rows into docs/reliability.md")
    options = parser.parse_args(arguments)
    try:
        names = chosen(options.parts, available())
    except ValueError as error:
        parser.error(str(error))
    if options.seed < 0 or options.workers < 1:
        parser.error("--seed is 0 or more, and --workers is 1 or more")
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    results: list[Result] = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results.append(run_apart(name, full=options.full, seed=options.seed, workers=options.workers))
        _OUT.mkdir(parents=True, exist_ok=True)
        # After every part: what has been found survives whatever happens to the next one.
        with (_OUT / "results.json").open("w", encoding="utf-8") as file:
            json.dump(report.as_document(results, full=options.full, date=date), file, indent=1)
    print(report.summary(results))
    if options.record:
        text = report.record(_DOCUMENT.read_text(encoding="utf-8"), results, full=options.full, date=date)
        _DOCUMENT.write_text(text, encoding="utf-8")
    return 0 if results and all(result.good for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
