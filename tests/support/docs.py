"""Finds the code blocks of a document, and runs those that say they run.

The word after the language tells: a ``run`` block runs, a ``no-run`` block is only read. Blocks of one document run from top to bottom in
one directory; its Python blocks share one namespace, as a reader who types them would.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.warning_filters import apply_warning_filters, warning_filters

__all__ = ["LANGUAGES", "MARKS", "Block", "blocks", "run_document"]

LANGUAGES = ("python", "sh")
MARKS = ("run", "no-run")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        language: first word after the fence, or "".
        mark: the words after it.
        line: line number of the first line of ``text``, counted from 1.
        text: what is between the fences, without their indentation.
    """

    language: str
    mark: str
    line: int
    text: str


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order. Raises ``ValueError`` when the last one is not closed."""
    found: list[Block] = []
    fence, info, start, lines = "", "", 0, list[str]()
    for number, line in enumerate(document.splitlines(), 1):
        stripped = line.strip()
        if not fence:
            if stripped.startswith(("```", "~~~")):
                fence = stripped[: len(stripped) - len(stripped.lstrip(stripped[0]))]
                info, start, lines = stripped[len(fence) :].strip(), number, []
                indent = len(line) - len(line.lstrip())
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            language, _, mark = info.partition(" ")
            found.append(Block(language, mark.strip(), start + 1, "".join(f"{text}\n" for text in lines)))
            fence = ""
        else:
            lines.append(line[indent:] if not line[:indent].strip() else line)
    if fence:
        raise ValueError(f"the block that starts at line {start} is not closed")
    return found


def run_document(path: str) -> None:
    """Runs the ``run`` blocks of the document in this process and the current directory; raises what the first one to fail raises."""
    apply_warning_filters(warning_filters())
    namespace: dict[str, object] = {"__name__": "__main__"}
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    for block in blocks(Path(path).read_text(encoding="utf-8")):
        if block.mark != "run":
            continue
        print(f"--- {path}:{block.line}", flush=True)
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, path, "exec"), namespace)
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], env=environment, stdin=subprocess.DEVNULL, check=True)
