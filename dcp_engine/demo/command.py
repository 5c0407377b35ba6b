"""The options of ``dcp-engine demo``, turned into a configuration and an exit status."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dcp_engine.demo.schedule import DemoConfig, Drop
from dcp_engine.errors import InvalidOptionError

__all__ = ["demo"]

_EXIT_USAGE = 2
_DEFAULTS = DemoConfig()


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for all that is written; must be new or empty.", show_default="demo-out/TIME")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file, too.")] = None,
    drop: Annotated[Drop | None, typer.Option(help="Leave this part of the state out of the checkpoints: the proof must fail.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = _DEFAULTS.steps,
    save_every: Annotated[int, typer.Option(help="Steps between saves.")] = _DEFAULTS.save_every,
    width: Annotated[int, typer.Option(help="Features of the model.")] = _DEFAULTS.width,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = _DEFAULTS.layers,
    window_bytes: Annotated[int, typer.Option(help="Bytes of text in one window.")] = _DEFAULTS.window_bytes,
    batch: Annotated[int, typer.Option(help="Windows in the global batch.")] = _DEFAULTS.batch,
) -> None:
    """Train, checkpoint, die in the middle of a save, come back on another topology, and prove that nothing changed.

    A small transformer learns the sources of Python's standard library on 4
    processes (FSDP2 and tensor parallel, 2 x 2), is killed while it saves,
    comes back on 2 (FSDP2) and again on 4; every step is held against a run
    that never stopped.

    Exit status: 0 the proof holds, 1 it fails, 2 wrong options, 3 a job
    failed, 130 interrupted.
    """
    if importlib.util.find_spec("matplotlib") is None:
        _refuse("the demo draws with matplotlib; install it with: pip install 'dcp-engine[demo]'")
    from rich.console import Console

    from dcp_engine.demo.runner import run_demo

    folder = out if out is not None else Path("demo-out", datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"))
    try:
        config = DemoConfig(
            steps=steps, save_every=save_every, drop=drop, width=width, layers=layers, window_bytes=window_bytes, batch=batch
        )
        status = run_demo(config, folder, json_path=json, console=Console())
    except InvalidOptionError as error:
        _refuse(str(error))
    raise typer.Exit(status)


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"dcp-engine: {reason}", err=True)
    raise typer.Exit(_EXIT_USAGE)
