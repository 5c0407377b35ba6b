"""The script that torchrun starts on every rank: it makes sure that the rank ends with its launcher, then trains."""

from __future__ import annotations

import argparse
from typing import Any

from dcp_engine.testing.parent import leave_with_parent


def main() -> None:
    """Parses what the driver passes and trains; torch is imported only after the watch has begun, because that takes seconds."""
    leave_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="folder of the checkpoints")
    parser.add_argument("--records", required=True, help="file for the records of rank 0")
    parser.add_argument("--witness", required=True, help="file for the last words of the rank that dies")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--num-steps", type=int, required=True, help="length of the whole run, which the schedule follows")
    parser.add_argument("--last-step", type=int, required=True, help="step after which this job ends")
    parser.add_argument("--save-every", type=int, default=0, help="steps between saves; 0 for none")
    parser.add_argument("--die-at", type=int, default=0, help="step whose save kills the last rank; 0 for none")
    parser.add_argument("--resume", action="store_true", help="start from the newest complete step")
    parser.add_argument("--drop", default="", help="part of the state to leave out of the checkpoints")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--window-bytes", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="windows in the global batch")
    args = parser.parse_args()

    from torch.distributed.elastic.multiprocessing.errors import record

    # Leaves word of an exception, and of when it was raised, for the driver to find the rank that failed first.
    record(_train)(vars(args))


def _train(options: dict[str, Any]) -> None:
    from dcp_engine.demo.training import Job, run

    run(Job(**options))


if __name__ == "__main__":
    main()
