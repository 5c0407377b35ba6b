"""The thread with which a rank shows that it lives, sees who does not, and learns how saves end, through the process group's store."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from dcp_engine.background.exchange import COORDINATOR
from dcp_engine.background.leaving import await_at_exit
from dcp_engine.background.outcome import Outcome, State
from dcp_engine.background.pulse import LEFT, Beat, Limits, Pulses
from dcp_engine.errors import InvalidOptionError, RankLostError

__all__ = ["Liveness", "RankWatch", "SaveRecord", "StoreKeys", "check_duration", "own_client"]

_LOG = logging.getLogger(__name__)
_FAILURE_SECS = 60.0
_LONGEST_BEAT_SECS = 5.0
_CLOSE_SECS = 2.0
_NO_VALUE = "-"
"""Never written: to compare with it reads a key, or tells at once that there is none."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """How fast a failure is found.

    Attributes:
        failure_secs: from the moment when it can be seen to the error on the last surviving rank.
        patience_secs: for ranks that live, but do not get on.
    """

    failure_secs: float
    patience_secs: float

    @classmethod
    def checked(cls, failure_secs: float | None, timeout_secs: float) -> Self:
        """Of a caller's options.

        Args:
            failure_secs: None: the usual time, or ``timeout_secs`` where that is less.
            timeout_secs: the patience.

        Raises:
            InvalidOptionError: one is no duration, or the slow would be given up before the dead.
        """
        check_duration("timeout_secs", timeout_secs)
        if failure_secs is None:
            return cls(min(_FAILURE_SECS, timeout_secs), timeout_secs)
        check_duration("failure_secs", failure_secs)
        if failure_secs > timeout_secs:
            raise InvalidOptionError(
                "failure_secs is above timeout_secs: a rank that is slow would be given up before one that is dead",
                expected=f"failure_secs of at most {timeout_secs}",
                found=failure_secs,
                remedy="pass a smaller failure_secs, or a larger timeout_secs",
            )
        return cls(failure_secs, timeout_secs)

    @property
    def beat_secs(self) -> float:
        """Between two beats, and between two looks."""
        return min(_LONGEST_BEAT_SECS, self.failure_secs / 8)

    @property
    def limits(self) -> Limits:
        """A beat may come late by one, and the news of a failure by another one."""
        return Limits(stall_secs=self.failure_secs * 0.7, patience_secs=self.patience_secs)


def check_duration(name: str, value: object) -> None:
    """Refuse what is no time. Raises ``InvalidOptionError``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidOptionError(f"{name} is no duration", expected="a finite number of seconds above 0", found=repr(value)[:300])


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """Names of the keys. Each is written by those that are named here."""

    save: int

    @staticmethod
    def beat(rank: int) -> str:
        """That rank."""
        return f"beat/{rank}"

    @property
    def arrived(self) -> str:
        """A counter: all ranks."""
        return f"{self.save}/arrived"

    @property
    def stale(self) -> str:
        """A counter: ranks that have no group any more."""
        return f"{self.save}/stale"

    @property
    def go(self) -> str:
        """The coordinator, when all have arrived: the number of the group to use."""
        return f"{self.save}/go"

    @property
    def outcome(self) -> str:
        """See :mod:`dcp_engine.background.outcome`."""
        return f"{self.save}/outcome"

    @property
    def all(self) -> list[str]:
        """Of one save."""
        return [self.arrived, self.stale, self.go, self.outcome]


def own_client(store: Any, timeout_secs: float) -> Any:
    """A connection to the store that waits for no other thread's calls."""
    clone = getattr(store, "clone", None)
    client = store if clone is None else clone()
    if clone is not None:
        client.set_timeout(timedelta(seconds=timeout_secs))
    return client


class SaveRecord(ABC):
    """What one save shows to the watch, and hears from it. Base of :class:`~dcp_engine.background.run.SaveRun`.

    Attributes:
        number: of the save.
        outcome: as the store has it; None before anything was decided.
        orphaned: the coordinator was lost after it had won the right to publish: only the storage can tell how that ended.
        changed: set whenever one of them changes.

    Thread-safety: all methods may be called from any thread.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome: Outcome | None = None
        self.orphaned: RankLostError | None = None
        self.changed = threading.Event()
        self._reports: list[tuple[Outcome, bool]] = []
        self._lock = threading.Lock()

    @abstractmethod
    def beat(self, count: int) -> Beat:
        """What to show."""

    def take_reports(self) -> list[tuple[Outcome, bool]]:
        """Outcomes that this rank proposes, and whether each may follow PUBLISHING. Each is given once."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def put_reports(self, reports: list[tuple[Outcome, bool]]) -> None:
        """Propose."""
        with self._lock:
            self._reports += reports

    def learn(self, outcome: Outcome) -> None:
        """The store says so."""
        if self.outcome != outcome:
            self.outcome = outcome
            self.changed.set()

    def orphan(self, lost: RankLostError) -> None:
        """See ``orphaned``."""
        if self.orphaned is None:
            self.orphaned = lost
            self.changed.set()


class RankWatch:
    """One thread of one rank, for all its saves.

    The coordinator looks at every rank, the others at the coordinator and at themselves: two keys a rank and look, however many ranks.

    Args:
        store: of the process group, with a prefix of this saver's own.
        rank, size: of this rank among those that save.
        liveness: see there.

    Thread-safety: all methods may be called from any thread.
    """

    def __init__(self, store: Any, rank: int, size: int, liveness: Liveness) -> None:
        self._store = own_client(store, liveness.failure_secs)
        self._rank = rank
        self._size = size
        self._liveness = liveness
        self._count = 0
        self._last_save = 0
        self._record: SaveRecord | None = None
        self._pulses: Pulses | None = None  # the thread's own
        self._known: set[int] = set()
        self._wake = threading.Event()
        self._closed = False
        self._heard_at = self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="dcp-engine-watch", daemon=True)
        self._thread.start()
        await_at_exit(self._thread, liveness.failure_secs)  # it may be in a call of the store, which may not answer

    @property
    def silent_secs(self) -> float:
        """For how long the store has not answered."""
        return time.monotonic() - self._heard_at

    def begin(self, record: SaveRecord) -> None:
        """Watch this save."""
        self._heard_at = time.monotonic()
        self._last_save = record.number
        self._record = record
        self._wake.set()

    def end(self) -> None:
        """The save has ended here."""
        self._record = None

    def forgive(self) -> None:
        """This process did not run for a while: how long the store has been silent says nothing."""
        self._heard_at = time.monotonic()

    def hurry(self) -> None:
        """There is something to tell: do not wait for the next beat."""
        self._wake.set()

    def close(self) -> None:
        """Say good-bye and end. Who waits for a store that does not answer is left behind, until the interpreter ends."""
        self._closed = True
        self._wake.set()
        self._thread.join(_CLOSE_SECS)

    def _serve(self) -> None:
        while not self._closed:
            self._wake.clear()
            heard_at = self._heard_at
            try:
                self._round()
            except RuntimeError as error:  # the store's errors are; what it means is told by how long it lasts
                _LOG.debug("the store of the process group did not answer: %s", error)
            except Exception as error:  # noqa: BLE001 - a thread that ended here would see no failure any more, and say nothing
                # A value that nobody of us wrote is as good as no answer, and becomes an error in the same time.
                self._heard_at = heard_at
                _LOG.warning("the store of the process group holds what no rank wrote: %s: %s", type(error).__name__, error)
            self._wake.wait(self._liveness.beat_secs)
        try:
            self._show(Beat(self._count + 1, self._last_save, LEFT))
        except RuntimeError as error:
            _LOG.debug("the store of the process group did not answer: %s", error)

    def _show(self, beat: Beat) -> None:
        self._store.set(StoreKeys.beat(self._rank), beat.encode())
        self._heard_at = time.monotonic()

    def _round(self) -> None:
        record = self._record
        self._count += 1
        beat = Beat(self._count, self._last_save, "") if record is None else record.beat(self._count)
        self._show(beat)
        if record is None:
            return
        self._tell(record)
        self._read_outcome(record)
        if record.outcome is None or not record.outcome.is_final:
            self._judge(record, beat)

    def _tell(self, record: SaveRecord) -> None:
        reports = record.take_reports()
        try:
            while reports:
                outcome, may_follow = reports[0]
                key = StoreKeys(record.number).outcome
                there = Outcome.decode(self._store.compare_set(key, "", outcome.encode()))
                if may_follow and there.state is State.PUBLISHING:
                    there = Outcome.decode(self._store.compare_set(key, there.encode(), outcome.encode()))
                record.learn(there)
                del reports[0]
        finally:
            record.put_reports(reports)  # those that did not arrive, for the next round

    def _read_outcome(self, record: SaveRecord) -> None:
        # A get would wait for a key that is not there, or not any more: the coordinator removes those of saves that all have done with.
        value = self._store.compare_set(StoreKeys(record.number).outcome, _NO_VALUE, _NO_VALUE).decode()
        if value not in ("", _NO_VALUE):
            record.learn(Outcome.decode(value))

    def _judge(self, record: SaveRecord, own: Beat) -> None:
        is_publishing = record.outcome is not None
        now = time.monotonic()
        ranks = self._watched(is_publishing)
        if self._pulses is None or (self._pulses.save, self._pulses.ranks) != (record.number, ranks):
            self._pulses = Pulses(record.number, ranks, self._liveness.limits, now)
        elif now - self._looked_at > 3 * self._liveness.beat_secs + 1:
            self._pulses.forgive(now)  # this process was stopped, or starved
        self._looked_at = now
        self._look(self._pulses, own)
        lost = self._pulses.lost(time.monotonic())
        if lost is None:
            return
        if not is_publishing:
            outcome = Outcome.of(lost, rank=lost.rank, phase=lost.phase or "")
            record.put_reports([(outcome, False)])
            self._tell(record)
        elif lost.rank == COORDINATOR:
            record.orphan(lost)

    def _watched(self, is_publishing: bool) -> list[int]:
        """Whoever can still make the save fail, as far as this rank looks."""
        if self._rank == COORDINATOR:
            return [COORDINATOR] if is_publishing else list(range(self._size))
        return [COORDINATOR] if is_publishing else [COORDINATOR, self._rank]

    def _look(self, pulses: Pulses, own: Beat) -> None:
        others = [rank for rank in pulses.ranks if rank != self._rank]
        unknown = [rank for rank in others if rank not in self._known]
        self._known.update(rank for rank in unknown if self._store.check([StoreKeys.beat(rank)]))
        asked = [rank for rank in others if rank in self._known]
        keys = [StoreKeys.beat(rank) for rank in asked]
        values = self._store.multi_get(keys) if keys and self._store.has_extended_api() else [self._store.get(key) for key in keys]
        now = self._heard_at = time.monotonic()
        if self._rank in pulses.ranks:
            pulses.saw(self._rank, own, now)
        for rank, value in zip(asked, values, strict=True):
            pulses.saw(rank, Beat.decode(value), now)
