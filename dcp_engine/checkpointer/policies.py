"""What a checkpointer was told about when to save, what to keep and what is healthy, as its saves and restores need it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from dcp_engine.background import SaveHandle
from dcp_engine.checkpointer.cadence import Cadence
from dcp_engine.checkpointer.options import CheckpointerOptions
from dcp_engine.checkpointer.policy_record import PolicyRecord
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.checkpointer.retention import Retention, numbers_in
from dcp_engine.checkpointer.schedule import Schedule
from dcp_engine.errors import DcpEngineError, InvalidOptionError, StorageError
from dcp_engine.policies import HealthVerdict, Keep, KeepPlan, When
from dcp_engine.storage import EpochClaim, RunRoot
from dcp_engine.train_state import TrainState

__all__ = ["Policies"]

logger = logging.getLogger(__name__)

_UNKNOWN, _HEALTHY, _UNHEALTHY = range(3)


class Policies:
    """Of one rank; all ranks make the same calls.

    Args:
        root: of the checkpointer.
        options: of the checkpointer.
        ranks: all of the job.
        members: those of them that write to this root.

    Thread-safety: one thread, but for ``durable``, which the saver's calls, and ``plan``.
    """

    def __init__(self, root: RunRoot, options: CheckpointerOptions, ranks: Ranks, members: Ranks) -> None:
        self._root = root
        self._options = options
        self._ranks = ranks
        self._members = members
        self._everywhere: int | None = None
        self._cadence = Cadence(options.cadence)
        self._has_schedule = options.when is not None
        self._schedule = Schedule(None if options.when is None else When.of(options.when), ranks)
        self._retention = Retention(root, options)
        self._is_forced = False
        self._put_off_step: int | None = None
        self._has_warned = False

    def due(self, step: int, state: TrainState | None, *, is_saved: bool, force: bool = False) -> tuple[str, ...]:
        """The components to save now: all, some, or none. See :class:`Cadence` and :class:`Schedule`.

        Args:
            step: that training has reached.
            state: None: one of which nothing is known.
            is_saved: it has been saved already.
            force: all are due, whatever the rules say, unless the step is saved.
        """
        due = self._due(step, state, is_saved=is_saved, force=force)
        self._watch(step)
        return due

    def _due(self, step: int, state: TrainState | None, *, is_saved: bool, force: bool) -> tuple[str, ...]:
        if force and is_saved:
            return ()
        if force or self._is_forced:
            self._is_forced = state is not None and state.defers_saves and not state.may_save()
            if self._is_forced:
                return ()
            self._cadence.forget()
            return ("*",) if state is None else state.components
        if not self._has_schedule:
            return self._cadence.due(step, state, is_saved=is_saved)
        if not self._schedule.is_due(step, state):
            return ()
        return ("*",) if state is None else state.components

    def _watch(self, step: int) -> None:
        """Tell of a save that was put off to the end of its accumulation cycle, where nobody asked at that end: it may wait for ever."""
        if not (self._is_forced or self._cadence.is_put_off or self._schedule.is_put_off):
            self._put_off_step, self._has_warned = None, False
        elif self._put_off_step is None:
            self._put_off_step = step
        elif step > self._put_off_step and not self._has_warned:
            self._has_warned = True
            self._warn("still waits for the end of an accumulation cycle, and one has ended since")

    def _warn(self, what: str) -> None:
        if self._ranks.is_first:
            text = "the save that was due at step %d of %s %s: call maybe_save() after Counters.update(), too"
            logger.warning(text, self._put_off_step, self._root.path, what)

    def close(self) -> None:
        """Nobody asks any more."""
        if self._put_off_step is not None:
            self._warn("was never made, because it was put off to the end of an accumulation cycle")

    def saving(self, step: int, metadata: Mapping[str, Any] | None) -> PolicyRecord:
        """A save begins: what is noted in it.

        With ``health``, all ranks agree in one number: a state is as bad as its worst rank. With ``keep`` and ``node_local``, nodes tell
        each other what they hold: none may remove a step for one that another node has failed to save.

        Raises:
            CoordinationError: a rank is gone.
        """
        health = self._health(metadata)
        if self._options.keep is not None and self._options.node_local:
            self._everywhere = self._newest_everywhere()
        if isinstance(step, bool) or not isinstance(step, int):
            return PolicyRecord()  # what is no step is refused by the save, on the rank that passed it
        self._schedule.saving(step)
        keep, pace = self._options.keep, self._schedule.pace
        return PolicyRecord(
            health=health,
            is_pinned=keep is not None and step in keep.pinned,
            running_secs=pace.running_secs,
            failures=pace.failures,
            stalls=pace.stalls,
            durable_secs=pace.durable_secs,
        )

    def saved(self, handle: SaveHandle) -> None:
        """The call of that save has done its work."""
        self._schedule.saved(handle)

    def resumed(self, step: int, record: PolicyRecord) -> None:
        """The run goes on behind a step, whose checkpoint says this."""
        self._schedule.resumed(step, record)

    def require_room(self, claim: EpochClaim, step: int, *, num_under_way: int) -> None:
        """Return on all ranks if the save fits wherever it goes; with ``room`` only, for a round over all ranks.

        Raises:
            StorageFullError: on all ranks, it does not fit. StorageError kinds, FencedError, likewise.
        """
        room = self._options.room
        if room is None:
            return
        error: DcpEngineError | None = None
        if self._members.is_first:
            try:
                self._retention.require_room(room, claim, step=step, num_under_way=num_under_way)
            except DcpEngineError as failure:
                error = failure
        self._ranks.agree(error)

    def durable(self, claim: EpochClaim, step: int) -> None:
        """A step is durable: what it makes superfluous goes. On the rank that removes. Raises as :meth:`Retention.run`."""
        if not threading.main_thread().is_alive():
            return  # the process ends, and no thread can be started to look at files: the next one removes what is left over
        if self._options.keep is not None:
            self._retention.run(self._options.keep, claim, step, everywhere=self._everywhere)

    def plan(self, keep: Keep | None) -> KeepPlan:
        """What rules make of the steps that are there; None: those of the options.

        Raises:
            InvalidOptionError: there are none. StorageError kinds: the steps cannot be read.
        """
        keep = self._options.keep if keep is None else keep
        if not isinstance(keep, Keep):
            raise InvalidOptionError(
                "nothing says what to keep", expected="Checkpointer(root, keep=Keep(...)), or a Keep here", found=repr(keep)[:300]
            )
        return self._retention.plan(keep, everywhere=self._everywhere)

    def _newest_everywhere(self) -> int:
        """The newest step that all nodes hold; below 0 where there is none."""

        def mine() -> frozenset[int] | None:
            try:
                return frozenset(self._root.steps()) if self._members.is_first else None
            except StorageError as error:
                logger.warning("nothing is removed, since it cannot be told which steps are there: %s", error)
                return frozenset()

        held = [steps for steps in self._ranks.everyone_makes(mine) if steps is not None]
        return max(frozenset.intersection(*held), default=-1)

    def _health(self, metadata: Mapping[str, Any] | None) -> HealthVerdict:
        health = self._options.health
        if health is None:
            return HealthVerdict(is_healthy=None)
        mine = health.judge(numbers_in(metadata) if isinstance(metadata, Mapping) else {})
        worst = self._ranks.highest({None: _UNKNOWN, True: _HEALTHY, False: _UNHEALTHY}[mine.is_healthy])
        if worst == _UNHEALTHY:
            return HealthVerdict(is_healthy=False, reason=mine.reason or "another rank's state is not")
        return HealthVerdict(is_healthy=True if worst == _HEALTHY else None)
