"""Every request that an object store gets x every way in which it may fail x how long that lasts; then late requests take effect.

A storage that fails in the process shows all of it. The same against a real S3 API server through a proxy that breaks connections, with the
real driver in between, shows a sample, or all of it when asked for.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from faults.campaign import object_store_proxy
from faults.campaign.outcome import MAX_BAD, Outcome
from support.checkpoints import MANIFEST, publish, write_files
from support.fake_storage import FakeFileSystem, fresh_options
from support.storage_faults import FAULTS, LASTS, StorageFaults
from support.store_outcomes import judge, seen, whole_nonce

from dcp_engine.errors import CommitStateUnknownError, DcpEngineError, StorageError
from dcp_engine.storage import publish_remote
from dcp_engine.storage.backends import locate, requests
from dcp_engine.storage.publish import open_publisher
from dcp_engine.storage.root_remote import RemoteRoot
from dcp_engine.storage.root_store import Retirement
from dcp_engine.storage.steps import step_name

PART = "object_store"
TITLE = "Object stores: every request, every fault"
PROMISE = (
    "A reader finds the old checkpoint or the new one, whole, also after requests that were given up take effect; success means that the "
    "new one is there and stays; every error is one of the engine's and says what is true; the next save works."
)

SCENARIOS = ("save", "overwrite", "load", "retire", "rival", "rival overwrite")
"""``rival``: another writer publishes between the beginning and the commit of the save that meets the fault."""
SCHEMES = ("fake", "createsonly", "ignores")
"""A storage with all conditions, one that only creates on condition, and one without any: there, nobody else may write."""
STALL_SECS = 0.05
"""``request_timeout_secs`` where requests really stall. A busy machine may make others late: they must not matter either."""
_NUM_REAL_STALLS = 25
_SHARE_OF_OTHERS = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One fault."""

    scheme: str
    scenario: str
    fault: str
    at: int
    lasts: str
    waits: bool = False
    """What stalls really does; else the deadline is taken to have passed at once."""
    settles_last: bool = False
    """Late requests take effect after the next save, not before it."""


def run(*, full: bool, seed: int, workers: int = 1) -> Outcome:
    """All points against a storage with all conditions, where stalling costs no time; of the other storages, of real stalls and of what
    goes through sockets a sample, or all with ``full``. ``workers`` is not used."""
    began = time.perf_counter()
    facts: Counter[str] = Counter()
    bad: list[str] = []
    rng = random.Random(seed)
    with impatient():
        everything = list(points())
        for point in everything if full else [p for p in everything if p.scheme == "fake" or rng.random() < _SHARE_OF_OTHERS]:
            _count(facts, bad, point, try_point(point))
        stalls = [replace(point, waits=True) for point in everything if point.fault.endswith("stalls")]
        for point in stalls if full else rng.sample(stalls, _NUM_REAL_STALLS):
            _count(facts, bad, point, try_point(point))
        object_store_proxy.run_into(facts, bad, full=full, rng=rng)
    total = facts["in the process"] + facts["through sockets"]
    return Outcome(
        part=PART, points=total, seed=seed, facts=dict(facts), bad=tuple(bad[:MAX_BAD]), secs=round(time.perf_counter() - began, 1)
    )


@contextmanager
def impatient() -> Iterator[None]:
    """No waits between tries, and one request after the other, so that their numbers are the same each time."""
    with mock.patch.object(requests, "_FIRST_WAIT_SECS", 0.0), mock.patch.object(publish_remote, "_NUM_REQUESTS", 1):
        yield


def points() -> Iterator[Point]:
    """Every request of every scenario, as a dry run counts them, x every fault x how long it lasts."""
    for scheme in SCHEMES:
        for scenario in SCENARIOS:
            if scenario.startswith("rival") and scheme == "ignores":
                continue  # there a save warns that it may not see a rival
            for at, call in enumerate(dry_run(scheme, scenario)):
                for fault in FAULTS:
                    if fault.startswith("stale") and call != "ls":
                        continue
                    for lasts in LASTS:
                        yield Point(scheme=scheme, scenario=scenario, fault=fault, at=at, lasts=lasts)
                        if fault == "late" and scenario in ("save", "overwrite", "retire") and _holds_late(scheme, scenario):
                            yield Point(scheme=scheme, scenario=scenario, fault=fault, at=at, lasts=lasts, settles_last=True)


def _holds_late(scheme: str, scenario: str) -> bool:
    """Whether a put of COMPLETE that comes after the next save is refused: not where it cannot depend on what is there."""
    return scheme == "fake" or (scheme == "createsonly" and scenario == "save")


def dry_run(scheme: str, scenario: str) -> list[str]:
    """The driver's calls in a scenario without faults, one for each request."""
    faults = StorageFaults()
    findings = _Trial(scheme, scenario, faults).run()
    assert findings == [], findings
    return faults.calls


def try_point(point: Point) -> tuple[int, list[str]]:
    """Puts the fault; returns how many were really put, and what was broken."""
    faults = StorageFaults(point.fault, point.at, lasts=point.lasts, waits=point.waits)
    trial = _Trial(point.scheme, point.scenario, faults, settles_last=point.settles_last)
    with nullcontext() if point.waits else mock.patch.object(requests.Requests, "once", _in_this_thread):
        found = trial.run()
    return faults.put, found


def _in_this_thread(self: requests.Requests, call: Callable[[], Any], *, num_bytes: int = 0) -> Any:
    """In place of ``Requests.once`` where nothing really stalls: several times as fast."""
    return call()


def _count(facts: Counter[str], bad: list[str], point: Point, result: tuple[int, list[str]]) -> None:
    put, found = result
    if put:
        facts["in the process"] += 1
        facts[point.fault] += 1
    bad += [f"{text}: {point}" for text in found]


class _Trial:
    """One run of a scenario against the fake storage."""

    def __init__(self, scheme: str, scenario: str, faults: StorageFaults, *, settles_last: bool = False) -> None:
        self._root = f"{scheme}://run"
        self._url = f"{self._root}/{step_name(1)}"
        self._scenario = scenario
        self._faults = faults
        self._settles_last = settles_last
        self._found: list[str] = []

    def run(self) -> list[str]:
        threads = threading.active_count()
        try:
            old = None if self._scenario in ("save", "rival") else publish(self._url, storage_options=fresh_options()).nonce
            if self._scenario == "load":
                self._load(old)
            elif self._scenario == "retire":
                self._retire(old)
            else:
                self._save(old)
            self._next_save_works()
            if threading.active_count() > threads + self._faults.stalled:
                self._found.append("more threads stay behind than requests that stalled")
        finally:
            self._faults.release()
            FakeFileSystem.intercept = None
            FakeFileSystem.empty()
        return self._found

    def _options(self) -> dict[str, Any]:
        return {**fresh_options(), **({"request_timeout_secs": STALL_SECS} if self._faults.waits else {})}

    @contextmanager
    def _faulty(self) -> Iterator[None]:
        FakeFileSystem.intercept = self._faults
        try:
            yield
        finally:
            FakeFileSystem.intercept = None

    def _load(self, old: str | None) -> None:
        with self._faulty():
            try:
                found = whole_nonce(self._url, self._options())
            except StorageError:
                found = old
            except DcpEngineError as error:
                self._found.append(f"a checkpoint that is there was called {type(error).__name__}")
                return
        if found != old:
            self._found.append(f"a load found {found}")

    def _retire(self, old: str | None) -> None:
        store = RemoteRoot(locate(self._root), self._options())
        allowed = {None}
        with self._faulty():
            try:
                if store.retire(1, str(old)) is Retirement.CHANGED:
                    self._found.append("the retired step was called changed, and nobody had changed it")
            except StorageError:
                allowed = {None, old}
        for settled in (False, True):
            if settled and not self._settles_last:
                self._faults.settle()
            if (there := seen(self._url, fresh_options())) not in allowed:
                self._found.append(f"after a retirement a reader finds {there}")

    def _save(self, old: str | None) -> None:
        publisher = open_publisher(self._url, storage_options=self._options(), overwrite=old is not None)
        ref, error, rival = None, None, None
        with self._faulty():
            try:
                ref = publisher.begin()
                reported = write_files(publisher, ref)
                if self._scenario.startswith("rival"):
                    FakeFileSystem.intercept = None
                    rival = publish(self._url, storage_options=fresh_options(), overwrite=old is not None).nonce
                    FakeFileSystem.intercept = self._faults
                publisher.commit(ref, MANIFEST, reported)
            except DcpEngineError as failure:
                error = failure
                if ref is not None and not isinstance(failure, CommitStateUnknownError):
                    publisher.abort(ref)
            except BaseException as failure:
                self._found.append(f"an error that is not the engine's: {failure!r}")
        new = ref.nonce if ref is not None else None
        self._found += judge(error, seen(self._url, fresh_options()), old=old, new=new, rival=rival)
        if not self._settles_last:
            self._faults.settle()
            self._found += [f"later: {text}" for text in judge(error, seen(self._url, fresh_options()), old=old, new=new, rival=rival)]

    def _next_save_works(self) -> None:
        try:
            following = publish(self._url, storage_options=fresh_options(), overwrite=True).nonce
        except DcpEngineError as error:
            self._found.append(f"the next save failed: {error}")
            return
        self._faults.settle()
        if (there := seen(self._url, fresh_options())) != following:
            self._found.append(f"the next save was published and {there} is there")
