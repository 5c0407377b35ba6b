"""The driver: runs the jobs one after the other, holds them against each other, and says how it went."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from dcp_engine.demo.compare import Comparison, Crash, compare
from dcp_engine.demo.launch import launch, tail_of_failure
from dcp_engine.demo.picture import draw_losses
from dcp_engine.demo.records import LegRecords, read_records
from dcp_engine.demo.report import Outcome, print_outcome, write_json
from dcp_engine.demo.schedule import DemoConfig, Leg, plan_legs
from dcp_engine.errors import InvalidOptionError

__all__ = ["EXIT_FAILED_JOB", "EXIT_FAILED_PROOF", "EXIT_HOLDS", "EXIT_INTERRUPTED", "run_demo"]

EXIT_HOLDS = 0
EXIT_FAILED_PROOF = 1
EXIT_FAILED_JOB = 3
EXIT_INTERRUPTED = 130

_POLL_SECS = 0.2


@dataclass(frozen=True, slots=True)
class _FinishedLeg:
    leg: Leg
    records: LegRecords
    exit_status: int


def run_demo(config: DemoConfig, out: Path, *, json_path: Path | None, console: Console) -> int:
    """Runs the whole demo: trains without a stop, then with a crash and on other topologies, compares and reports.

    Ends every process that it started, also when it is interrupted (SIGINT, SIGTERM, SIGHUP).

    Args:
        config: what to train.
        out: folder for everything that the demo writes; must not exist or be empty.
        json_path: file for the report as JSON, beside the one in ``out``; None for none.
        console: where to print.

    Returns:
        Exit status: 0 the proof holds, 1 it fails, 3 a job failed, 130 interrupted.

    Raises:
        InvalidOptionError: ``out`` is not empty or cannot be made, or the folder of ``json_path`` does not exist.
    """
    started_secs = time.monotonic()
    out = out.absolute()
    _prepare(out, json_path)
    try:
        with _signals_interrupt():
            finished, crash = _run_legs(config, out, console)
            if finished is None:
                return EXIT_FAILED_JOB
            comparison = _compare(finished, crash)
            outcome = Outcome(
                config=config,
                out=out,
                legs=tuple((one.leg, one.records) for one in finished),
                crash=crash,
                comparison=comparison,
                picture=out / "losses.png",
                wall_secs=time.monotonic() - started_secs,
            )
            draw_losses(outcome.picture, outcome.legs, drop=config.drop)
            for path in (out / "report.json", json_path):
                if path is not None:
                    write_json(path, outcome)
            print_outcome(console, outcome)
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. All processes of the demo have ended; what they wrote is in {out}", markup=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return EXIT_HOLDS if comparison.holds else EXIT_FAILED_PROOF


def _prepare(out: Path, json_path: Path | None) -> None:
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise InvalidOptionError("--json names a file in a folder that does not exist", path=str(json_path))
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise InvalidOptionError("--out is not empty", path=str(out), remedy="name a folder that does not exist yet")
        (out / "checkpoints").mkdir()
    except OSError as error:
        raise InvalidOptionError(f"--out cannot be used: {error.strerror}", path=str(out), remedy="name another folder") from error


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the demo in order, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # What is ignored stays so: nohup wants a process to outlive its terminal.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_legs(config: DemoConfig, out: Path, console: Console) -> tuple[list[_FinishedLeg] | None, Crash | None]:
    """All jobs in order, up to the first that breaks the proof: what comes after it could repair nothing. None if a job failed."""
    legs = plan_legs(config)
    finished: list[_FinishedLeg] = []
    crash: Crash | None = None
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task("", total=sum(leg.num_steps for leg in legs))
    with progress:
        for number, leg in enumerate(legs, start=1):
            label = f"{number}/{len(legs)} {leg.title}"
            one = _run_leg(config, leg, out, progress, task_id=task, label=label, num_done=sum(len(f.records.steps) for f in finished))
            if leg.die_at:
                crash = _look_at_crash(out, one.exit_status)
            if one.exit_status != 0 and not (leg.die_at and crash is not None and crash.rank is not None):
                _print_failure(console, leg, out / leg.name, one.exit_status)
                return None, crash
            finished.append(one)
            console.print(f"{label}: {_summary(one, crash if leg.die_at else None)}", highlight=False, soft_wrap=True)
            if number > 1 and not _compare(finished, crash).holds:
                break
    return finished, crash


def _compare(finished: list[_FinishedLeg], crash: Crash | None) -> Comparison:
    return compare(finished[0].records, [(one.leg, one.records) for one in finished[1:]], crash)


def _run_leg(config: DemoConfig, leg: Leg, out: Path, progress: Progress, *, task_id: TaskID, label: str, num_done: int) -> _FinishedLeg:
    folder = out / leg.name
    folder.mkdir()
    path = str(folder / "records.jsonl")
    arguments: dict[str, str | int | bool] = {
        "root": str(out / "checkpoints"),
        "records": path,
        "witness": str(out / "crash.json"),
        # A job that comes back must not happen to start from what the checkpoint should give it.
        "seed": 1000 + (leg.resumed_from or 0),
        "num-steps": config.steps,
        "last-step": leg.last_step,
        "save-every": leg.save_every,
        "die-at": leg.die_at,
        "resume": leg.resumed_from is not None,
        "drop": config.drop or False,
        "width": config.width,
        "layers": config.layers,
        "window-bytes": config.window_bytes,
        "batch": config.batch,
    }
    with launch(folder, num_ranks=leg.num_ranks, arguments=arguments) as job:
        while True:
            exit_status = job.exit_status()
            records = read_records(path)
            now = (
                f"step {records.steps[-1].step}, loss {records.steps[-1].loss:.3f}" if records.steps else f"starting {leg.num_ranks} ranks"
            )
            progress.update(task_id, description=f"{label}: {now}", completed=num_done + len(records.steps))
            if exit_status is not None:
                return _FinishedLeg(leg, records, exit_status)
            time.sleep(_POLL_SECS)


def _look_at_crash(out: Path, exit_status: int) -> Crash:
    from dcp_engine.storage.steps import committed_steps  # here, because it takes torch, and that a second or more

    root = out / "checkpoints"
    words: dict[str, int] = {}
    if (out / "crash.json").exists():
        words = json.loads((out / "crash.json").read_text(encoding="utf-8"))
    attempts = [path for path in root.rglob("*") if path.is_file() and path.relative_to(root).parts[0].startswith(".tmp-")]
    return Crash(
        rank=words.get("rank"),
        num_tensors=words.get("num_tensors", 0),
        num_handed_over=words.get("num_handed_over", 0),
        exit_status=exit_status,
        leftovers=tuple(sorted((str(path.relative_to(root)), path.stat().st_size) for path in attempts)),
        complete_steps=tuple(committed_steps(os.fspath(root))),
    )


def _summary(one: _FinishedLeg, crash: Crash | None) -> str:
    start, steps = one.records.start, one.records.steps
    if start is None or not steps:
        return "did not train"
    text = f"{start.layout} on {start.world_size} ranks, steps {steps[0].step} to {steps[-1].step}, loss {steps[-1].loss:.3f}"
    if start.resumed_from is not None:
        text += f", from step {start.resumed_from} (loaded in {start.load_secs:.2f} s)"
    if crash is not None and crash.rank is not None:
        text += f"; rank {crash.rank} killed in the save of step {one.leg.die_at}"
    return text


def _print_failure(console: Console, leg: Leg, folder: Path, exit_status: int) -> None:
    log, tail = tail_of_failure(folder)
    console.print(f"The job {leg.name!r} failed with exit status {exit_status}. The end of {log}:\n", highlight=False, markup=False)
    console.print(tail, highlight=False, markup=False, soft_wrap=True)
