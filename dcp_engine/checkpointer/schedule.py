"""When ``maybe_save`` saves by ``When``: one rank measures and decides, and all ranks do as it says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from dcp_engine.background import SaveHandle
from dcp_engine.checkpointer.policy_record import PolicyRecord
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.policies import Pace, SaveDecision, When, decide_save
from dcp_engine.train_state import TrainState

__all__ = ["Schedule"]

logger = logging.getLogger(__name__)


class Schedule:
    """Keeps the pace of one rank, and asks for decisions. All ranks make the same calls.

    With rules by steps each rank decides for itself, and they all say the same. With rules by time the first rank decides: a message to all
    ranks at the steps that its last answer named, some 2 log2(n) for a save every n steps.

    Args:
        when: the rules; None: nobody asks, and only the pace is kept.
        ranks: all of the job.
        clock: seconds of any zero; that of the first rank counts.

    Thread-safety: one thread.
    """

    def __init__(self, when: When | None, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._when = when
        self._ranks = ranks
        self._clock = clock
        self._pace = Pace()
        self._before = self._pace
        self._has_begun = False
        self._asked = 0
        self._ask_again_step = 0
        self._is_put_off = False
        self._has_warned = False
        self._handle: SaveHandle | None = None

    @property
    def pace(self) -> Pace:
        """As it is now."""
        return self._pace.at(self._clock())

    @property
    def is_put_off(self) -> bool:
        """Whether a save waits for the end of an accumulation cycle."""
        return self._is_put_off

    def resumed(self, step: int, record: PolicyRecord) -> None:
        """The run goes on behind this step, with what its checkpoint knows of the time before."""
        self._pace = record.pace(step).at(self._clock())
        self._has_begun, self._is_put_off = True, False
        self._asked, self._ask_again_step = step, 0  # steps that it makes again are new ones

    def is_due(self, step: int, state: TrainState | None) -> bool:
        """Whether to save now. It may be asked several times at one step, once a micro-batch.

        A save that falls into an accumulation cycle of a state that defers it is due at the first call after the cycle.
        """
        assert self._when is not None
        self._begin(step)
        if not self._is_put_off:
            if step <= self._asked or step <= self._pace.last_step:
                return False
            self._asked = step
            if not self._decide(self._when, step).save:
                return False
        self._is_put_off = state is not None and state.defers_saves and not state.may_save()
        return not self._is_put_off

    def saving(self, step: int) -> None:
        """A save of this step begins, on all ranks, whether a rule asked for it or not."""
        self._begin(step)
        self._is_put_off = False
        self._before = self.pace
        # Before it can fail: it may do so on one rank alone, and all have to go on alike.
        self._pace = self._before.saved(step)

    def saved(self, handle: SaveHandle) -> None:
        """It keeps training no longer. One that was left out stays due."""
        if handle.skipped:
            self._pace = self._before
            return
        now = self.pace
        self._pace = now.stalled(now.since_secs)
        self._handle = handle

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        if not self._has_begun:
            self._pace = self._pace.begun(step).at(self._clock())
            self._has_begun = True

    def _decide(self, when: When, step: int) -> SaveDecision:
        if not when.uses_time:
            return decide_save(when, self._pace, step)
        if step < self._ask_again_step:
            return SaveDecision(save=False, reason="nobody asks before that", ask_again_step=self._ask_again_step)
        self._measure()
        decision = self._ranks.first(lambda: decide_save(when, self._pace, step))
        self._ask_again_step = decision.ask_again_step
        if self._ranks.is_first:
            self._tell(step, decision)
        return decision

    def _measure(self) -> None:
        self._pace = self.pace
        handle = self._handle
        if handle is not None and handle.is_durable and (timings := handle.timings) is not None:
            secs = timings.stage_secs + timings.queue_secs + timings.plan_secs + timings.write_secs + timings.commit_secs
            self._pace = replace(self._pace, durable_secs=max(0.0, secs))
            self._handle = None

    def _tell(self, step: int, decision: SaveDecision) -> None:
        if decision.conflict is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", decision.conflict)
        if decision.save:
            logger.info("step %d is saved: %s%s", step, decision.reason, f"; {decision.interval}" if decision.interval else "")
