"""Errors at every call on a root of steps: claiming it, pointing at the newest step, retiring old ones, sweeping what they leave."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from faults.campaign.errors_checks import BrokenError, check_told, nothing_left, snapshot
from faults.campaign.faulty_calls import Call, Fault, FaultyCalls
from faults.campaign.ranks_in_turn import save_in_turn, state_of, writers_for

from dcp_engine.storage.backends.calls import installed

__all__ = ["OPERATIONS", "check_operation", "operation_calls"]

_STEPS = (1, 2, 3)

# What is done with a root and a claim of it. The types are those of storage/root.py, which this does without where it is not there.
OPERATIONS: dict[str, Callable[[Any, Any], object]] = {}
if find_spec("dcp_engine.storage.root") is not None:
    OPERATIONS = {
        "prune": lambda root, claim: root.prune(1, claim),
        "set_latest": lambda root, claim: root.set_latest(3, claim),
        "claim": lambda root, claim: root.claim(),
        "clean": lambda root, claim: root.clean(claim, older_than_secs=0),
    }


def operation_calls(name: str, place: Path) -> list[Call]:
    """The calls of an operation that goes well."""
    return _Trial(name, None, place).dry_run()


def check_operation(name: str, fault: Fault, place: Path) -> bool:
    """Does something to a root of three steps, with a fault. Returns whether it was survived. Raises :class:`BrokenError`."""
    return _Trial(name, fault, place).run()


class _Trial:
    def __init__(self, name: str, fault: Fault | None, place: Path) -> None:
        from dcp_engine.storage.root import RunRoot

        self._operation = OPERATIONS[name]
        self._fault = fault
        self._path = Path(tempfile.mkdtemp(dir=place)) / "root"
        shutil.copytree(_good_root(place), self._path)
        self._root = RunRoot(self._path)
        self._claim = self._root.claim("first")
        self._root.set_latest(2, self._claim)
        # Trash of an earlier clean-up, and an attempt that an older run has left.
        shutil.copytree(self._path / "step-00000001", self._path / f".trash-{'0' * 32}")
        shutil.copytree(self._path / "step-00000001", self._path / f".tmp-step-00000004-{'1' * 32}")
        self._before = {step: snapshot(self._path / f"step-{step:08}") for step in _STEPS}
        self._calls = FaultyCalls(str(self._path), fault)

    def dry_run(self) -> list[Call]:
        with installed(self._calls):
            self._operation(self._root, self._claim)
        shutil.rmtree(self._path.parent)
        return self._calls.calls

    def run(self) -> bool:
        assert self._fault is not None
        survived = True
        try:
            with nothing_left():
                try:
                    with installed(self._calls):
                        self._operation(self._root, self._claim)
                except Exception as error:  # to be judged, whatever it is
                    survived = False
                    check_told(error, self._fault)
                    error.__traceback__ = None
            if not self._calls.num_fired:
                raise BrokenError("the fault was not reached: runs do not repeat")
            self._check()
            self._check_next()
        finally:
            shutil.rmtree(self._path.parent, ignore_errors=True)
        return survived

    def _check(self) -> None:
        """Every step is as it was or gone; the newest is there; LATEST names one that it named or was to name."""
        for step, before in self._before.items():
            there = snapshot(self._path / f"step-{step:08}")
            if there != before and (there is not None or step == _STEPS[-1]):
                raise BrokenError(f"step {step} is {'damaged' if there is not None else 'gone'}")
        strange = [
            entry.name for entry in self._path.iterdir() if not entry.name.startswith((".trash-", ".tmp-step-00000004-", "step-0000000"))
        ]
        if sorted(strange) != [".epochs", "LATEST"]:
            raise BrokenError(f"beside the steps lie {sorted(strange)}")
        first = (self._path / "LATEST").read_text()
        if not any(step in first for step in ("step-00000002", "step-00000003", "step 2", "step 3")):
            raise BrokenError(f"LATEST says {first!r}")

    def _check_next(self) -> None:
        """The storage is well again: another run claims the root and does all of it."""
        claim = self._root.claim("second")
        self._root.set_latest(3, claim)
        self._root.prune(1, claim)
        self._root.clean(claim, older_than_secs=0)
        left = sorted(entry.name for entry in self._path.iterdir())
        if left != [".epochs", "LATEST", "step-00000003"] or self._root.latest() != 3:
            raise BrokenError(f"afterwards there is {left}")


def _good_root(place: Path) -> Path:
    path = place / "good root"
    if not path.exists():
        for step in _STEPS:
            save_in_turn(writers_for(path / f"step-{step:08}", 1), [state_of(step, 0)])
    return path
