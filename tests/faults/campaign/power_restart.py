"""The next run on what a power cut has left of a root: it claims the root, moves LATEST, prunes and cleans up, and loses nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from faults.campaign.damage_latest import silent_log
from faults.campaign.file_system_model import Tree
from faults.campaign.power_judge import Judge, Promised, state_digest
from faults.campaign.power_traces import State

from dcp_engine.errors import DcpEngineError, FencedError
from dcp_engine.storage.epochs import EpochClaim, EpochRecord
from dcp_engine.storage.root import RunRoot
from dcp_engine.storage.steps import parse_step_name
from dcp_engine.storage.verify import verify_checkpoint

__all__ = ["RestartingJudge"]


class RestartingJudge(Judge):
    """Judges a state, and then has the next run begin on it, in real files; each state once.

    Args:
        contents: see :class:`Judge`.
        max_restarts: how often at most.

    Attributes:
        num_restarts: how often so far.
    """

    def __init__(self, contents: Mapping[str, State], *, max_restarts: int) -> None:
        super().__init__(contents)
        self._max_restarts = max_restarts
        self._restarted: set[tuple[object, ...]] = set()
        self.num_restarts = 0

    def broken(self, tree: Tree, root: str, promised: Promised) -> str:
        """See :meth:`Judge.broken`; then what the next run meets."""
        if text := super().broken(tree, root, promised):
            return text
        key = (state_digest(tree, root), frozenset(promised.epochs.items()), frozenset(promised.steps.items()))
        if key in self._restarted or self.num_restarts >= self._max_restarts:
            return ""
        self._restarted.add(key)
        self.num_restarts += 1
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="dcp-engine-restart-", dir=memory) as place, silent_log("dcp_engine.storage.root_posix"):
            inode = tree.find(root)
            if inode is not None:
                _lay_out(tree, inode, Path(place))
            try:
                text = _next_run(Path(place), root, promised)
            except DcpEngineError as error:
                text = f"{type(error).__name__}: {error}"
        return f"the next run: {text}" if text else ""


def _lay_out(tree: Tree, directory: int, place: Path) -> None:
    for name, inode in tree.table(directory).items():
        if tree.is_directory(inode):
            (place / name).mkdir()
            _lay_out(tree, inode, place / name)
        else:
            (place / name).write_bytes(tree.content(inode))


def _next_run(place: Path, root: str, promised: Promised) -> str:
    """What goes wrong, in words; empty for nothing."""
    needed = {path[len(root) + 1 :] for path, promise in promised.steps.items() if promise.required and not promise.anywhere}
    is_rescue = any(promise.required and promise.anywhere for promise in promised.steps.values())
    run = RunRoot(place)
    claim = run.claim("next run")
    for path in promised.epochs:
        record = EpochRecord.decode((place / path[len(root) + 1 :]).read_bytes(), file=path, path=str(place))
        try:
            EpochClaim(str(place), record).check()
        except FencedError:
            continue
        return f"it has epoch {claim.epoch}, and epoch {record.epoch} may still write"
    before = run.steps()
    if before:
        run.set_latest(before[-1], claim)
    run.prune(1, claim)
    run.clean(claim, older_than_secs=0.0)
    left = [name for name in os.listdir(place) if name[0] == "." and name != ".epochs"]
    if before and (run.steps() != before[-1:] or run.latest() != before[-1] or left):
        return f"of steps {before} it kept {run.steps()}, beside {left}"
    newest = max(filter(None, map(parse_step_name, needed)), default=None)
    if newest is not None and newest not in before:
        return f"it finds {before}, not step {newest}"
    whole = [name for name in (*left, *(f"step-{step:08d}" for step in before[-1:])) if _is_whole(place / name)]
    return "" if whole or not (needed or is_rescue) else "it has no whole checkpoint left"


def _is_whole(place: Path) -> bool:
    try:
        return not verify_checkpoint(place, threads=1).faults
    except DcpEngineError:
        return False
