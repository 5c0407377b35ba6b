"""What is recorded of a root for the campaign of power cuts: claims, attempts taken away, LATEST, retirement, clean-up, by ``RunRoot``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from faults.campaign.damage_latest import silent_log
from faults.campaign.power_traces import Recording

from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.backends.directories import flush_directory
from dcp_engine.storage.entry_names import is_step_attempt, trash_name
from dcp_engine.storage.epochs import EPOCHS_NAME, EpochClaim, epoch_name
from dcp_engine.storage.publish_posix import PosixPublisher
from dcp_engine.storage.root import RunRoot

__all__ = ["ACTS", "SCENARIOS", "first_claim", "life", "overtaking", "rescue"]


class _Died(BaseException):
    """A writer that is gone before it publishes, or is stopped there; it removes nothing."""


@contextmanager
def _dying() -> Iterator[None]:
    with (
        mock.patch.object(PosixPublisher, "_publish", side_effect=_Died),
        mock.patch.object(PosixPublisher, "abort"),
    ):
        try:
            yield
        except _Died:
            return


@contextmanager
def _acting(recording: Recording) -> Iterator[None]:
    """Something that may fail, from which on crashes are put. What fails says so, and the scenario goes on."""
    recording.begin, recording.shards = len(recording.calls.events), []
    recording.calls.note("acting", recording.root)
    try:
        yield
    except DcpEngineError:
        if not recording.calls.hit:
            raise
        recording.calls.note("failed", recording.root)


def _claim(recording: Recording) -> EpochClaim:
    """A claim, with notes of what holds once it has returned."""
    names = os.listdir(recording.root) if os.path.isdir(recording.root) else []
    claim = RunRoot(recording.root).claim("run")
    place = os.path.join(recording.root, EPOCHS_NAME, epoch_name(claim.epoch))
    recording.calls.note("claimed", place, claim.record.claim)
    for name in filter(is_step_attempt, names):
        recording.calls.note("revoked", os.path.join(recording.root, name))
    return claim


def _retire_all_but_one(recording: Recording, root: RunRoot, claim: EpochClaim) -> None:
    *old, _ = root.steps()
    for step in old:
        recording.calls.note("retiring", root.path_of(step))
    for step in root.prune(1, claim).retired:
        recording.calls.note("retired", root.path_of(step))


def first_claim(recording: Recording) -> None:
    """Of a root that is made for it, and so is the directory above it."""
    with _acting(recording):
        _claim(recording)


def overtaking(recording: Recording) -> None:
    """A claim where an older run has left an attempt that it was about to publish; then that is cleaned up."""
    _claim(recording)
    recording.save(1, "one")
    with _dying():
        recording.save(2, "two")
    with _acting(recording):
        claim = _claim(recording)
        RunRoot(recording.root).clean(claim, older_than_secs=0.0)


def life(recording: Recording) -> None:
    """LATEST moves on to the newest of three steps, the others are retired, and what is left of them is cleaned up."""
    root, claim = RunRoot(recording.root), _claim(recording)
    for step, content in enumerate(("one", "two", "three"), start=1):
        recording.save(step, content)
        if step < 3:
            recording.point(root, step)
    with _acting(recording):
        recording.point(root, 3)
        _retire_all_but_one(recording, root, claim)
        root.clean(claim, older_than_secs=0.0)


def rescue(recording: Recording) -> None:
    """A clean-up where the only whole checkpoint lies in the trash, since a death has come between the two renames of a replacement."""
    recording.save(1, "one")
    path, trash = os.path.join(recording.root, "step-00000001"), os.path.join(recording.root, trash_name())
    recording.calls.note("set aside", path, "one")
    recording.calls.rename(path, trash)
    flush_directory(recording.root)
    with _acting(recording):
        claim = _claim(recording)
        with silent_log("dcp_engine.storage.root_posix"):  # it says what it leaves alone
            RunRoot(recording.root).clean(claim, older_than_secs=0.0)


SCENARIOS: tuple[Callable[[Recording], None], ...] = (first_claim, overtaking, life, rescue)
ACTS = {first_claim: 0, overtaking: 2, life: 3, rescue: 1}
"""Which act of a scenario is the one that crashes are put from: those before are saves."""
