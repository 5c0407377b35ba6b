"""Part ``errors``: every I/O call of saving, loading and verifying fails, in every way, once and for good; and real disks that are full."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from faults.campaign import real_limits
from faults.campaign.errors_checks import BrokenError, check_told, must_be_told, nothing_left, snapshot, whole
from faults.campaign.errors_root import OPERATIONS, check_operation, operation_calls
from faults.campaign.faulty_calls import Call, Fault, FaultyCalls, RunawayError, faults_of
from faults.campaign.outcome import MAX_BAD, Outcome
from faults.campaign.ranks_in_turn import RanksFailedError, merged, same_state, save_in_turn, state_of, writers_for
from support.engine import load
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import verify_checkpoint
from dcp_engine.errors import CommitStateUnknownError, StorageError, TruncatedFileError
from dcp_engine.storage import publish_posix
from dcp_engine.storage.backends.calls import installed

__all__ = ["PART", "PROMISE", "TITLE", "run"]

PART = "errors"
TITLE = "every I/O call of a save, a load and a verify fails, once or for good; full disks, limits on files and memory"
PROMISE = (
    "An error of the storage is either survived, with everything right, or told by one typed error that names file and reason. The "
    "previous step stays whole, nothing is half-published, no descriptor or thread is left, and the next save works."
)
_QUICK_POINTS = 420
_OLD, _NEW, _NEXT = "step-00000001", "step-00000002", "step-00000003"
_ATTEMPT = re.compile(r"\.(tmp|trash)-.*[0-9a-f]{32}")
_REMOVING = ("unlink", "rmdir", "listdir", "lstat")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A save.

    Attributes:
        name: for messages.
        world_size: ranks.
        target: the name that it publishes.
        has_old: whether a step is there before.
        exchanges: whether the file system can swap two names.
    """

    name: str
    world_size: int
    target: str = _NEW
    has_old: bool = True
    exchanges: bool = True


SCENARIOS = tuple(
    scenario
    for world_size in (1, 2)
    for scenario in (
        Scenario("first save", world_size, has_old=False),
        Scenario("next save", world_size),
        Scenario("overwrite", world_size, target=_OLD),
        Scenario("overwrite without exchange", world_size, target=_OLD, exchanges=False),
    )
)


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """See ``Outcome``. ``workers`` is not used: the parts of it that wait, wait for nothing but the CPU."""
    begin = time.monotonic()
    facts: Counter[str] = Counter()
    bad: list[str] = []
    logging.disable(logging.WARNING)  # of attempts that could not be removed
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=_fast_place()) as place, _impatient():
            warnings.simplefilter("ignore")
            for text, kind in _all_points(Path(place), full, seed):
                facts[kind] += 1
                if text and len(bad) < MAX_BAD:
                    bad.append(text)
        for text, kind in real_limits.run(full=full, seed=seed):
            facts[kind] += kind not in real_limits.ABSENT
            if text and len(bad) < MAX_BAD:
                bad.append(text)
    finally:
        logging.disable(logging.NOTSET)
    points = sum(facts.values())
    return Outcome(part=PART, points=points, seed=seed, facts=dict(facts), bad=tuple(bad), secs=time.monotonic() - begin)


def sampled(points: Sequence[tuple[Any, Fault]], most: int, seed: int) -> list[tuple[Any, Fault]]:
    """Some points, drawn so that every kind of fault at every method is among them as long as there is room."""
    shuffled = list(points)
    random.Random(seed).shuffle(shuffled)
    groups: Counter[tuple[str, ...]] = Counter()
    ranked = []
    for place, (scenario, fault) in enumerate(shuffled):
        group = (fault.call.method, fault.kind, fault.lasts)
        ranked.append((groups[group], place, (scenario, fault)))
        groups[group] += 1
    return [point for _, _, point in sorted(ranked, key=lambda entry: entry[:2])[:most]]


def save_calls(scenario: Scenario, place: Path) -> list[Call]:
    """The calls of a save that goes well."""
    return _Trial(scenario, None, place).dry_run()


def check_save(scenario: Scenario, fault: Fault, place: Path) -> bool:
    """Saves with a fault. Returns whether it was survived. Raises :class:`BrokenError`."""
    return _Trial(scenario, fault, place).run()


# -- all of it -----------------------------------------------------------------------------------------------------------


def _all_points(place: Path, full: bool, seed: int) -> Iterator[tuple[str, str]]:
    """What is broken, or "", and the kind of fault, of each point."""
    points: list[tuple[Any, Fault]] = []
    for scenario in SCENARIOS:
        points += [(scenario, fault) for fault in faults_of(save_calls(scenario, place))]
    saved = place / "read"
    save_in_turn(writers_for(saved / _OLD, 2), [state_of(1, rank) for rank in range(2)])
    for read in READS:
        points += [(read, fault) for fault in faults_of(read_calls(read, saved))]
    for operation in OPERATIONS:
        points += [(operation, fault) for fault in faults_of(operation_calls(operation, place))]
    for what, fault in points if full else sampled(points, _QUICK_POINTS, seed):
        name = f"{what.name}, {what.world_size} ranks" if isinstance(what, Scenario) else what
        try:
            survived, text = _check(what, fault, place, saved), ""
        except (BrokenError, RunawayError) as error:
            survived, text = False, f"{name}: {fault}: {error}"
        except Exception as error:  # the checks themselves must not end the campaign; what they met is a finding
            survived, text = False, f"{name}: {fault}: {error!r}"
        yield text, f"{fault.kind} {'survived' if survived else 'told'}"


def _check(what: Scenario | str, fault: Fault, place: Path, saved: Path) -> bool:
    if isinstance(what, Scenario):
        return check_save(what, fault, place)
    return check_read(what, fault, saved) if what in READS else check_operation(what, fault, place)


def _fast_place() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """A rank does not wait 15 seconds for a directory that a fault hides from it."""
    with mock.patch.multiple(publish_posix, _VISIBILITY_SECS=0.02, _POLL_SECS=0.005):
        yield


# -- saves ---------------------------------------------------------------------------------------------------------------


class _Trial:
    """One save with one fault, in a directory of its own."""

    def __init__(self, scenario: Scenario, fault: Fault | None, place: Path) -> None:
        self._scenario = scenario
        self._fault = fault
        self._root = Path(tempfile.mkdtemp(dir=place))
        self._calls = FaultyCalls(str(self._root), fault, exchanges=scenario.exchanges)
        overwrites = scenario.target == _OLD
        if scenario.has_old:
            shutil.copytree(_old_step(place, scenario.world_size), self._root / _OLD)
        self._writers = writers_for(self._root / scenario.target, scenario.world_size, overwrite=overwrites)
        self._before = snapshot(self._root / _OLD)

    def dry_run(self) -> list[Call]:
        self._save()
        shutil.rmtree(self._root)
        return self._calls.calls

    def run(self) -> bool:
        assert self._fault is not None
        error: BaseException | None = None
        try:
            with nothing_left():
                try:
                    self._save()
                except RanksFailedError as failed:
                    error = next(iter(failed.failures.values()))
                    del failed
            if not self._calls.num_fired:
                raise BrokenError("the fault was not reached: runs do not repeat")
            self._check(error)
            self._check_next(error)
        finally:
            shutil.rmtree(self._root, ignore_errors=True)
        return error is None

    def _save(self) -> None:
        with installed(self._calls):
            save_in_turn(self._writers, [state_of(2, rank) for rank in range(self._scenario.world_size)])

    def _check(self, error: BaseException | None) -> None:
        """The old step, the new one, and the error."""
        scenario, fault = self._scenario, self._fault
        assert fault is not None
        target = self._root / scenario.target
        published = target.is_dir() and (scenario.target != _OLD or snapshot(target) != self._before)
        if scenario.has_old and scenario.target != _OLD and snapshot(self._root / _OLD) != self._before:
            raise BrokenError("the previous step is not as it was")
        if published and not whole(target, 2, scenario.world_size):
            raise BrokenError("what is published is not whole")
        if error is None:
            if not published:
                raise BrokenError("the save said that it was done, and nothing is there")
            if must_be_told(fault):
                raise BrokenError("an error that bears on what is durable was lost")
            return
        check_told(error, fault)
        if published and not isinstance(error, CommitStateUnknownError):
            raise BrokenError(f"the save is published, and was told to have failed: {error}")
        if not published and scenario.has_old and not self._old_is_kept(isinstance(error, CommitStateUnknownError)):
            raise BrokenError(f"the step that was to be replaced is gone: {error}")

    def _old_is_kept(self, may_be_aside: bool) -> bool:
        """Under its name; or, where the error says so and tells what to rename, beside it."""
        places = [self._root / _OLD]
        if may_be_aside:
            places += [entry for entry in self._root.iterdir() if entry.name.startswith((".trash-", ".tmp-"))]
        return any(snapshot(place) == self._before for place in places)

    def _check_next(self, error: BaseException | None) -> None:
        """The storage is well again: the same writers save, and clean up what the save that failed has left."""
        scenario, fault = self._scenario, self._fault
        assert fault is not None
        there = {entry.name for entry in self._root.iterdir()} - {_OLD, scenario.target}
        strange = [name for name in there if not _ATTEMPT.fullmatch(name)]
        if strange or len(there) > 2:
            raise BrokenError(f"left beside the steps: {sorted(there)}")
        for writer in self._writers:
            writer.reset(self._root / _NEXT)
        try:
            save_in_turn(self._writers, [state_of(3, rank) for rank in range(scenario.world_size)])
        except RanksFailedError as failed:
            raise BrokenError(f"the next save failed: {failed}") from failed
        if not whole(self._root / _NEXT, 3, scenario.world_size):
            raise BrokenError("the next save is not whole")
        left = {entry.name for entry in self._root.iterdir()} - {_OLD, _NEW, _NEXT}
        may_stay = (
            fault.lasts != "once"
            or fault.done
            or fault.call.method in _REMOVING
            or isinstance(error, CommitStateUnknownError)
            or (fault.call.method in ("open", "fstat", "preadv", "close") and fault.call.name.endswith("COMPLETE"))
        )
        if left and not may_stay:
            raise BrokenError(f"the next save did not clean up {sorted(left)}; the error was {error}")


def _old_step(place: Path, world_size: int) -> Path:
    """A good step to start from, made once."""
    path = place / f"old-{world_size}" / _OLD
    if not path.exists():
        save_in_turn(writers_for(path, world_size), [state_of(1, rank) for rank in range(world_size)])
    return path


# -- loads and verifies --------------------------------------------------------------------------------------------------


def _load(place: Path) -> None:
    template = merged([state_of(1, rank, filled=False) for rank in range(2)])
    try:
        found = load(template, place / _OLD)
    except CheckpointException as error:
        raise error.failures[0][0] from None
    if not same_state(found, merged([state_of(1, rank) for rank in range(2)])):
        raise BrokenError("a load returned something else than was saved")


def _verify(place: Path) -> None:
    for fault in verify_checkpoint(place / _OLD, threads=1).faults:
        raise fault


READS: dict[str, Callable[[Path], None]] = {"load": _load, "verify": _verify}


def read_calls(read: str, place: Path) -> list[Call]:
    """The calls of a load or a verify that goes well."""
    calls = FaultyCalls(str(place))
    with installed(calls):
        READS[read](place)
    return calls.calls


def check_read(read: str, fault: Fault, place: Path) -> bool:
    """Loads or verifies with a fault. Returns whether it was survived. Raises :class:`BrokenError`."""
    calls = FaultyCalls(str(place), fault)
    survived = True
    with nothing_left():
        try:
            with installed(calls):
                READS[read](place)
        except BrokenError:
            raise
        except Exception as error:  # to be judged, whatever it is
            survived = False
            check_told(error, fault)
            # Damage would have a user give up a checkpoint that a reading disk could not show.
            if not isinstance(error, StorageError) and not (fault.kind == "nothing" and isinstance(error, TruncatedFileError)):
                raise BrokenError(f"an error of the storage was told as another: {error!r}") from error
            error.__traceback__ = None
    if not calls.num_fired:
        raise BrokenError("the fault was not reached: runs do not repeat")
    READS[read](place)
    return survived
