"""Damage to LATEST: whatever it is, the newest committed step is found all the same, and what is wrong with it is said."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_engine import BalancedSavePlanner, ShardWriter
from dcp_engine.errors import DcpEngineError

__all__ = ["HAS_ROOTS", "complaint_about", "damage_latest", "silent_log", "two_roots"]

HAS_ROOTS = find_spec("dcp_engine.storage.root") is not None

Report = Callable[[str, str | None], None]
"""Takes a fault in words, and the complaint about what came of it, if there is one."""


def damage_latest(place: Path, report: Report) -> None:
    """Put every fault, one after the other.

    Args:
        place: an empty directory.
        report: called once a fault.
    """
    roots = two_roots(place)
    root, latest = roots[0], place / "a" / "LATEST"
    content = latest.read_bytes()
    with silent_log("dcp_engine.storage.root"):
        for fault, data in _contents(content, (place / "b" / "LATEST").read_bytes(), roots[1]):
            latest.write_bytes(data)
            report(fault, complaint_about(root))
        for fault, put in _STRANGERS.items():
            latest.unlink()
            put(latest, place / "b" / "LATEST")
            report(fault, complaint_about(root))
            shutil.rmtree(latest) if latest.is_dir() and not latest.is_symlink() else latest.unlink()
            latest.write_bytes(content)
        latest.unlink()
        report("absent", None if (root.latest(), root.hint()) == (2, None) else "is not taken for absent")
        root.set_latest(1)
        hint = root.hint()
        report("stale", None if root.latest() == 2 and hint is not None and hint.step == 1 else "misleads")
        root.set_latest(2)
        shutil.rmtree(root.path_of(2))
        report("names a step that is gone", complaint_about(root, newest=1))


def two_roots(place: Path) -> list[Any]:
    """The roots ``a`` and ``b`` in a directory, each with the steps 1 and 2, of which LATEST names the second."""
    from dcp_engine.storage.root import RunRoot

    roots = [RunRoot(place / name) for name in ("a", "b")]
    for root in roots:
        for step in (1, 2):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
                state = {"w": torch.full((10,), float(step))}
                dcp.save(state, storage_writer=ShardWriter(root.path_of(step)), planner=BalancedSavePlanner())
        root.set_latest(2)
    return roots


def _contents(content: bytes, foreign: bytes, other: Any) -> Iterator[tuple[str, bytes]]:
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(changed)
    for length in range(len(content)):
        yield f"length {length}", content[:length]
    yield "longer by a line end", content + b"\n"
    yield "longer by a zero", content + b"\0"
    yield "twice", content * 2
    yield "of another root", foreign
    yield "a marker", (Path(other.path_of(2)) / "COMPLETE").read_bytes()
    yield "a megabyte", b"\0" * (1 << 20)


_STRANGERS: dict[str, Callable[[Path, Path], object]] = {
    "a directory": lambda latest, twin: latest.mkdir(),
    "a FIFO": lambda latest, twin: os.mkfifo(latest),
    "a link to another root's": lambda latest, twin: latest.symlink_to(twin),
    "a link to nothing": lambda latest, twin: latest.symlink_to("nowhere"),
    "a link to itself": lambda latest, twin: latest.symlink_to("LATEST"),
    "a link to /dev/zero": lambda latest, twin: latest.symlink_to("/dev/zero"),
}


def complaint_about(root: Any, newest: int = 2) -> str | None:
    """What is wrong with how a root takes a LATEST that is no good; ``None``: nothing."""
    try:
        if (found := root.latest()) != newest:
            return f"leads to step {found}"
        hint = root.hint()
    except DcpEngineError as error:
        names_it = error.file == "LATEST" or error.step is not None or "step-" in (error.path or "")
        return None if names_it else f"is not named: {error}"
    return f"says nothing: {hint}"


@contextmanager
def silent_log(name: str) -> Iterator[None]:
    """A logger of that name says nothing for a while. The warnings are the point, and a thousand of them no use to anybody."""
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
