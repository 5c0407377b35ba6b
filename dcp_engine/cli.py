"""The command line: ``dcp-engine COMMAND``. What a command needs is imported when it runs, so that ``--help`` answers at once."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["main", "make_app"]


def main() -> None:
    """Entry point of the program ``dcp-engine``."""
    if importlib.util.find_spec("typer") is None or importlib.util.find_spec("rich") is None:
        sys.exit("dcp-engine: the command line needs typer and rich; install them with: pip install 'dcp-engine[cli]'")
    make_app()()


def make_app() -> typer.Typer:
    """Builds the typer application. Typer is imported here, so that :func:`main` can say in one line that it is missing."""
    import typer

    from dcp_engine.demo.command import demo

    app = typer.Typer(name="dcp-engine", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def dcp_engine() -> None:
        """Checkpoints for torch.distributed.checkpoint: compressed, checksummed, resharding, published whole or not at all.

        Saving, loading and verifying are Python calls (docs/howto.md); the command shows them at work.
        """

    app.command()(demo)
    return app


if __name__ == "__main__":
    main()
