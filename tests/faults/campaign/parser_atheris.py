"""One target of the hostile parser campaign under atheris, which breeds inputs by the code that they reach.

``python -m faults.campaign.parser_atheris TARGET RUNS SEED`` in a process of its own, which it ends. Optional: nothing needs it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Feed a target; the exit status is not zero if a promise broke."""
    import atheris

    name, runs, seed = sys.argv[1:]
    with atheris.instrument_imports(include=["dcp_engine.storage", "dcp_engine.objects"]):
        from faults.campaign.parser_targets import opened

        from dcp_engine.errors import DcpEngineError

    with opened(name) as target, tempfile.TemporaryDirectory() as corpus:

        def feed(data: bytes) -> None:
            with contextlib.suppress(DcpEngineError):
                target.feed(data)

        for number, data in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(data)
        limits = [f"-runs={runs}", f"-seed={int(seed) + 1}", "-rss_limit_mb=4096", "-timeout=60", "-max_len=65536", "-print_final_stats=0"]
        atheris.Setup([sys.argv[0], *limits, corpus], feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
