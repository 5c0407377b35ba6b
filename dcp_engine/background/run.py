"""One save on one rank: what it may still do, who has the right to publish, and how it has ended.

A rank says that a save has failed only if it can never be published: the store says so, or this rank has not given, and never will give,
what the coordinator needs, or the attempt was taken away from the coordinator on the storage. See docs/decisions, 0017.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dcp_engine.background.exchange import COORDINATOR, Exchange
from dcp_engine.background.failures import one_error
from dcp_engine.background.outcome import Outcome, State
from dcp_engine.background.pulse import ARRIVING, Beat
from dcp_engine.background.steps import HANDED, PUBLISHING, WRITING
from dcp_engine.background.watch import RankWatch, SaveRecord, StoreKeys
from dcp_engine.errors import DcpEngineError
from dcp_engine.storage.attempts import AttemptRef

__all__ = ["SaveRun"]

_FIRST_WAIT_SECS = 0.001
_LONGEST_WAIT_SECS = 0.05
_RANKS_A_SEC = 20_000
"""Looks at one key that a store is asked for at most, by all ranks together."""


class SaveRun(SaveRecord):
    """A ``SaveWatch`` for the steps of a save, and the record that the rank's watch keeps of it.

    Args:
        number: of the save, the same on all ranks.
        watch: of this rank.
        rank, size: of this rank among those that save.
        progress: grows while this rank's own work gets on; None where nothing tells.
        path, step: for messages.

    Attributes:
        phase: what this rank does.
        attempt: what the checkpoint will be published from, as soon as this rank knows.

    Thread-safety: the steps in one thread, all else from any.
    """

    def __init__(
        self,
        number: int,
        watch: RankWatch,
        *,
        rank: int,
        size: int,
        progress: Callable[[], int | None],
        path: str,
        step: int | None,
    ) -> None:
        super().__init__(number)
        self.phase = ARRIVING
        self.attempt: AttemptRef | None = None
        self.rank = rank
        self._size = size
        self._store: Any = None
        self._watch = watch
        self._keys = StoreKeys(number)
        self.progress = progress
        self._path = path
        self._step = step
        self._over: DcpEngineError | None = None
        self._may_be_published = False

    # -- the steps --------------------------------------------------------------------------------------------------------

    def join(self, store: Any, exchange: Exchange | None, number: int, make: Callable[[int], Exchange]) -> tuple[Exchange, int]:
        """Wait until all ranks have come, and have one group: a new one if one of them has none any more.

        Args:
            store: a client of the thread that runs the steps.
            exchange: of this rank, None where it is lost.
            number: of its group, which is that of the save for which it was made.
            make: the group of a number.

        Returns:
            The exchange to use, and its number.

        Raises:
            DcpEngineError: the save is over before it began.
        """
        self._require_going_on()
        self._store = store
        if exchange is None or exchange.is_broken:
            self._store.add(self._keys.stale, 1)
        arrived = self._store.add(self._keys.arrived, 1)
        if self.rank == COORDINATOR:
            self._wait_for(lambda: arrived == self._size or self._store.add(self._keys.arrived, 0) == self._size)
            # A number that was never used: what a group that was not completed has left in the store would mislead the next of that name.
            chosen = self.number if self._store.add(self._keys.stale, 0) > 0 else number
            for key in StoreKeys(self.number - 1).all if self.number > 1 else ():
                self._store.delete_key(key)  # everybody is here, and so has done with it
            self._store.set(self._keys.go, str(chosen))
        else:
            self._wait_for(lambda: self._store.check([self._keys.go]))
            chosen = int(self._store.get(self._keys.go))
        if exchange is None or exchange.is_broken or chosen != number:
            exchange = make(chosen)
        exchange.check = self._require_going_on
        return exchange, chosen

    def enter(self, phase: str) -> None:
        """See ``SaveWatch``. A new phase is a sign of progress."""
        with self._lock:
            if self._over is not None:
                raise self._over
            self.phase = phase
            self._may_be_published |= phase in (HANDED, PUBLISHING) and self.rank != COORDINATOR

    def saw_attempt(self, attempt: AttemptRef | None) -> None:
        """See ``SaveWatch``."""
        self.attempt = attempt

    def check(self) -> None:
        """See ``SaveWatch``: in :data:`PUBLISHING` it claims the right to publish, which nobody can claim once the save has failed."""
        self._require_going_on()
        if self.phase != PUBLISHING:
            return
        claim = Outcome(State.PUBLISHING, rank=self.rank)
        with self._lock:
            if self._over is not None:
                raise self._over
            self._may_be_published = True
        there = Outcome.decode(self._store.compare_set(self._keys.outcome, "", claim.encode()))
        self.learn(there)
        if there.is_final:
            raise there.error(path=self._path, step=self._step)
        self._require_going_on()  # broken off meanwhile: whoever did that may have told that nothing is published

    def fails(self, error: BaseException) -> None:
        """See ``SaveWatch``."""
        self.report(error, is_told=True, may_follow=True)

    def published(self) -> None:
        """See ``SaveWatch``."""
        self.put_reports([(Outcome(State.PUBLISHED, rank=self.rank), True)])
        self._watch.hurry()

    # -- whoever supervises -----------------------------------------------------------------------------------------------

    def report(self, error: BaseException, *, is_told: bool = False, may_follow: bool = False) -> None:
        """This rank has failed: tell the others. ``may_follow``: nor will the coordinator, which is this rank or was stopped, publish."""
        if isinstance(error, CheckpointException):
            error = one_error(error, path=self._path, step=self._step)
        self.put_reports([(Outcome.of(error, rank=self.rank, phase=self.phase, is_told=is_told), may_follow)])
        self._watch.hurry()

    def break_off(self, error: DcpEngineError) -> bool:
        """From now on no step begins, and no wait goes on.

        Returns:
            Whether this rank knows that its part is missing, so that nothing can be published.
        """
        with self._lock:
            self._over = error
            return not self._may_be_published

    def error(self) -> DcpEngineError:
        """Of an outcome that is none of success."""
        assert self.outcome is not None
        return self.outcome.error(path=self._path, step=self._step)

    def beat(self, count: int) -> Beat:
        """See ``SaveRecord``."""
        phase = self.phase
        is_work = not phase.startswith("waiting") and phase != ARRIVING
        return Beat(count, self.number, phase, is_work, self.progress() if phase in (WRITING, PUBLISHING) else None)

    def _require_going_on(self) -> None:
        if self._over is not None:
            raise self._over

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        wait_secs, longest = _FIRST_WAIT_SECS, max(_LONGEST_WAIT_SECS, self._size / _RANKS_A_SEC)
        while not condition():
            self._require_going_on()
            time.sleep(wait_secs)
            wait_secs = min(longest, wait_secs * 1.5)
        self._require_going_on()
