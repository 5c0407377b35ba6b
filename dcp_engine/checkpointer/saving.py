"""What a save does, on each rank: the claim of the root, the order of steps, one cut through all ranks, the writer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from dcp_engine.background import BackgroundSaver, SaveHandle
from dcp_engine.background.cut import Cut, require_one_step
from dcp_engine.checkpointer.cut import idle_data, local_disagreements
from dcp_engine.checkpointer.options import CheckpointerOptions
from dcp_engine.checkpointer.parts import Parts
from dcp_engine.checkpointer.policies import Policies
from dcp_engine.checkpointer.policy_record import PolicyRecord
from dcp_engine.checkpointer.probing import probed
from dcp_engine.checkpointer.protection import Protection
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.checkpointer.record import SaveRecord
from dcp_engine.checkpointer.recorded import Recorded, recorded
from dcp_engine.checkpointer.restoring import Restored
from dcp_engine.errors import CheckpointExistsError, DcpEngineError, InvalidOptionError, RankFailedError, SaverBusyError
from dcp_engine.storage import EpochClaim, RunRoot, ShardWriter
from dcp_engine.storage.steps import find_steps

__all__ = ["Saving"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Start:
    """What the first rank of a root finds there at the first save. Crosses ranks by pickle."""

    claim: EpochClaim
    steps: tuple[int, ...]


class Saving:
    """The saves of one rank.

    Args:
        root: to save below.
        options: of the checkpointer.
        ranks: all of the job.
        members: those of them that write to this root.
        saver: of the members.
        policies: told of saves, and followed by the retention that they ask for.
        planner: for all saves; None: the saver's own.

    Thread-safety: one thread.
    """

    def __init__(
        self,
        root: RunRoot,
        options: CheckpointerOptions,
        ranks: Ranks,
        members: Ranks,
        saver: BackgroundSaver,
        policies: Policies,
        planner: SavePlanner | None,
    ) -> None:
        self._root = root
        self._options = options
        self._ranks = ranks
        self._members = members
        self._saver = saver
        self._protection = Protection(saver.stager)
        self._policies = policies
        self._planner = planner
        self._start: _Start | None = None
        self._replaceable: set[int] = set()
        self._restored: int | None = None
        self._handles: list[SaveHandle] = []
        self._saved: set[int] = set()

    def resumed(self, restored: Restored, lonely: frozenset[int], *, is_latest: bool) -> None:
        """The run goes on behind this step.

        Args:
            restored: the step. Those that are damaged or hold a part only it comes to again, and replaces them.
            lonely: steps that only some nodes hold: likewise.
            is_latest: whether it is the newest good one. Else newer ones stay, and are told.
        """
        self._restored = restored.info.step
        if is_latest:
            self._replaceable = set(restored.replaceable | lonely)
        elif self._ranks.is_first and (newer := [step for step in self._root.steps() if step > self._restored]):
            logger.warning("steps %s are newer than the restored one: this run can save none up to the last of them there", newer)
        self._policies.resumed(self._restored, restored.record.policies)

    def save(self, step: int, state: Any, *, metadata: Mapping[str, Any] | None, probe: Callable[[], Any] | None) -> SaveHandle:
        """See ``Checkpointer.save``."""
        self._ranks.require_whole_job()
        policies = self._policies.saving(step, metadata)
        skipped = self._skipped(step)
        if skipped is not None:
            return skipped
        start = self._begin()
        self._policies.require_room(start.claim, step, num_under_way=sum(not handle.done() for handle in self._handles))
        try:
            parts = Parts(state)
            self._check_order(step)
            noted = self._recorded(parts, step, probe)
            cut = self._cut(parts, noted)
            writer = self._writer(step, parts, noted, policies, metadata)
            for one in parts.whole_states.values():
                self._protection.protect(one)
        except Exception as error:
            self._tell(error, step)
            raise
        handle = self._saver.submit(
            parts.values,
            writer=writer,
            planner=self._planner,
            step=step,
            cut=cut,
            after=self._after(step, is_partial=parts.is_partial) if self._members.is_first else None,
        )
        self._handles.append(handle)
        return handle

    def is_saved(self, step: int) -> bool:
        """Whether this run has saved the step, as a whole or in part, is about to, or has just come back from it."""
        self._settle()
        return step == self._restored or step in self._saved or any(step == handle.step for handle in self._handles)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _skipped(self, step: int) -> SaveHandle | None:
        """A handle without a save, where an earlier one is under way on any rank and is not to be waited for."""
        if self._options.if_busy == "wait":
            return None
        mine = next((handle for handle in self._handles if not handle.done()), None)
        if not self._ranks.any(mine is not None):
            return None
        error = SaverBusyError(
            "the step was not saved: an earlier save is under way",
            step=step,
            path=self._root.path,
            found="on another rank" if mine is None else f"step {mine.step}",
            remedy='save less often, or pass if_busy="wait"',
        )
        if self._options.if_busy == "error":
            raise error
        if self._ranks.is_first:
            logger.warning("%s", error)
        return SaveHandle.of_skipped(error, step=step, path=self._root.path)

    def _begin(self) -> _Start:
        """At the first save: claim the root, so that older runs that still live can publish nothing any more."""
        if self._start is not None:
            return self._start
        start, error = None, None
        try:
            start = self._members.first(self._claim)
        except DcpEngineError as failure:
            error = failure
        self._ranks.agree(error)  # no node begins before all nodes have claimed
        assert start is not None
        self._start = start
        return start

    def _claim(self) -> _Start:
        self._root.check_own()
        claim = self._root.claim(self._options.run_id)
        found = find_steps(self._root.path, **self._options.of_root)
        return _Start(claim, tuple(found.committed + found.damaged))

    def _settle(self) -> None:
        """Note which saves have ended, and how. A step whose save failed may be saved again."""
        for handle in [handle for handle in self._handles if handle.done()]:
            self._handles.remove(handle)
            if handle.is_durable and handle.step is not None:
                self._saved.add(handle.step)
                self._replaceable.discard(handle.step)

    def _check_order(self, step: int) -> None:
        self._root.path_of(step)  # refuses what is no step
        self._settle()
        under_way = {handle.step for handle in self._handles if handle.step is not None}
        own = max((self._saved - self._replaceable) | under_way, default=None)
        if own is not None and step <= own:
            raise InvalidOptionError(
                "steps go backwards",
                step=step,
                path=self._root.path,
                expected=f"a step above {own}, which this run has saved or is saving",
                found=step,
                remedy="save each step once; a run that starts over needs a root of its own",
            )
        assert self._start is not None
        there = max(set(self._start.steps) - self._replaceable, default=None)
        if there is not None and step <= there:
            raise CheckpointExistsError(
                "steps go backwards: the root holds a newer one",
                step=step,
                path=self._root.path,
                expected=f"a step above {there}",
                found=step,
                remedy="restore the newest step first, or save to a root of its own; RunRoot.retire removes steps that are not wanted",
            )

    def _recorded(self, parts: Parts, step: int, probe: Callable[[], Any] | None) -> Recorded:
        """What this rank says of the state. Its components are those that are saved."""
        state = parts.train_state
        noted = recorded(state, step, world_size=self._ranks.size, probe=None if probe is None else probed(state, probe))
        return noted if state is None else replace(noted, components=tuple(parts.components_of(state)))

    def _cut(self, parts: Parts, noted: Recorded) -> Cut:
        """Where this rank stands."""
        state = parts.train_state
        faults: tuple[str, ...] = ()
        if state is not None:
            faults = local_disagreements(noted.facts, scheduler_counts=state.scheduler_counts, optimizer_counts=state.optimizer_counts)
            faults += idle_data(state)
        cut = Cut(noted.facts, faults)
        if self._ranks.size == 1:
            require_one_step([cut])  # now, and not in the background; of several ranks all are told at once
        return cut

    def _writer(self, step: int, parts: Parts, noted: Recorded, policies: PolicyRecord, metadata: Mapping[str, Any] | None) -> ShardWriter:
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidOptionError("metadata is not a mapping", expected="None or a dict", found=repr(metadata)[:300])
        record = SaveRecord(
            recorded=noted, is_partial=parts.is_partial, components=parts.components, policies=policies, user=dict(metadata or {})
        )
        assert self._start is not None
        return ShardWriter(
            self._root.path_of(step),
            step=step,
            run_id=self._options.run_id,
            fence=self._start.claim,
            metadata=record.metadata(),
            overwrite=step in self._replaceable,
            **self._options.of_writer,
        )

    def _tell(self, error: Exception, step: int) -> None:
        """The other ranks save: they must get an error, and not be left waiting."""
        if not isinstance(error, DcpEngineError):
            error = RankFailedError("a rank failed before it could save", found=f"{type(error).__name__}: {error}")
        self._saver.fail(error, writer=ShardWriter(self._root.path), step=step if isinstance(step, int) else None)

    def _after(self, step: int, *, is_partial: bool) -> Callable[[], None]:
        assert self._start is not None
        claim = self._start.claim

        def follow() -> None:
            if not is_partial:
                self._root.set_latest(step, claim)
            self._policies.durable(claim, step)

        return follow
