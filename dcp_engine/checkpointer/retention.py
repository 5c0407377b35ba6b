"""What stays of a root's steps: facts from the checkpoints themselves, the decision of ``Keep``, and the removal of what goes."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dcp_engine.checkpointer.evaluation import EvaluationLog
from dcp_engine.checkpointer.options import CheckpointerOptions
from dcp_engine.checkpointer.record import SaveRecord
from dcp_engine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StepInUseError,
    StorageFullError,
    UnsupportedVersionError,
)
from dcp_engine.policies import Best, Keep, KeepPlan, Room, StepFacts, check_room, plan_keep
from dcp_engine.storage import EpochClaim, RunRoot, verify_checkpoint
from dcp_engine.storage.step_info import StepInfo

__all__ = ["Retention", "RetentionReport"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionReport:
    """What retention has done.

    Attributes:
        plan: what became of each step, and why.
        retired: steps that are gone, ascending.
        in_use: steps that would have gone, had nobody read them; the next time tries again.
        stuck: likewise, were they not damaged beyond what a removal needs to know.
    """

    plan: KeepPlan
    retired: tuple[int, ...]
    in_use: tuple[int, ...]
    stuck: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """A step, and which checkpoint it was: another one may get its number."""

    facts: StepFacts
    nonce: str | None = None
    stored_bytes: int = 0


class Retention:
    """The steps of one root, of which one process at a time removes some: the one whose claim is the newest.

    Args:
        root: whose steps they are.
        options: of the checkpointer.

    Thread-safety: ``plan`` and ``require_room`` from any thread, ``run`` from one.
    """

    def __init__(self, root: RunRoot, options: CheckpointerOptions) -> None:
        self._root = root
        self._options = options
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._verified: dict[str, bool] = {}

    def plan(self, keep: Keep, *, everywhere: int | None = None) -> KeepPlan:
        """What these rules make of the steps that are there. Removes nothing; who reads a step is not told.

        Args:
            keep: the rules.
            everywhere: where each node has a root of its own, the newest step that all of them hold: what is newer does not count as
                durable. None: there is one root.

        Raises:
            StorageError kinds: the steps cannot be read.
        """
        facts = self._facts(keep.best)
        if everywhere is not None:
            facts = [replace(one, is_durable=one.step <= everywhere) for one in facts]
        return plan_keep(keep, facts)

    def run(self, keep: Keep, claim: EpochClaim, saved_step: int, *, everywhere: int | None = None) -> RetentionReport:
        """Remove what goes, now that a step is durable. Arguments as for :meth:`plan`.

        Raises:
            FencedError: a newer run has the root. StorageError kinds: something could not be read or removed; the rest stays.
        """
        with self._lock:
            self._known.pop(saved_step, None)  # it may have replaced one of its number
        if keep.verified:
            self._verify(saved_step)
        plan = self.plan(keep, everywhere=everywhere)
        retired, in_use, stuck = [], [], []
        for step in plan.surplus:
            try:
                self._root.retire(step, claim)
                retired.append(step)
            except StepInUseError:
                in_use.append(step)
            except CheckpointNotFoundError:
                continue  # somebody else has removed it
            except (CorruptCheckpointError, UnsupportedVersionError) as error:
                stuck.append(step)
                logger.warning("step %d stays: %s", step, error)
        self._root.clean(claim)
        if retired or in_use:
            logger.info("retired steps %s; being read, and left for the next time: %s; kept: %s", retired, in_use, list(plan.kept))
        return RetentionReport(plan=plan, retired=tuple(retired), in_use=tuple(in_use), stuck=tuple(stuck))

    def require_room(self, room: Room, claim: EpochClaim, *, step: int, num_under_way: int) -> None:
        """Return if the next save fits beside those that are under way, at the latest when what was retired is removed for good.

        There is nothing to go by before the first checkpoint of the whole state, nor on object stores.

        Raises:
            StorageFullError: it does not. StorageError kinds, FencedError.
        """
        sizes = {known.facts.step: known.stored_bytes for known in self._there() if known.facts.is_good}
        if not sizes:
            return
        newest_bytes = sizes[max(sizes)]
        for is_last_try in (False, True):
            free_bytes = self._root.free_bytes()
            if free_bytes is None:
                return
            verdict = check_room(room, newest_bytes=newest_bytes, num_under_way=num_under_way, free_bytes=free_bytes)
            if verdict.is_enough:
                return
            if not is_last_try:
                logger.warning("room is short for step %s: what was retired is removed now", step)
                self._root.clean(claim, older_than_secs=0)
        raise StorageFullError(
            "there is no room for the next save",
            path=self._root.path,
            step=step,
            expected=f"{verdict.needed_bytes:,} bytes free, for saves of about {newest_bytes:,} bytes",
            found=f"{verdict.free_bytes:,}",
            remedy="keep fewer steps, or free space there; nothing was written",
        )

    # -- facts ------------------------------------------------------------------------------------------------------------

    def _facts(self, best: Best | None) -> list[StepFacts]:
        there = self._there()
        evaluated = {} if best is None else self._evaluated(best.metric)
        return [self._with_all(known, best, evaluated) for known in there]

    def _there(self) -> list[_Known]:
        steps = self._root.steps()
        with self._lock:
            self._known = {step: known for step, known in self._known.items() if step in steps}
            for step in steps:
                if step not in self._known and (known := self._look(step)) is not None:
                    self._known[step] = known
            return list(self._known.values())

    def _look(self, step: int) -> _Known | None:
        """What its metadata says of a step; it does not change while the step is there."""
        try:
            info = self._root.look(step)
            return _Known(facts_of_step(info), info.nonce, info.stored_bytes)
        except CheckpointNotFoundError:
            return None  # somebody else has removed it
        except UnsupportedVersionError as error:
            logger.warning("step %d is left alone: %s", step, error)
            return _Known(StepFacts(step=step, is_readable=False))
        except CorruptCheckpointError as error:
            logger.warning("step %d counts for nothing: %s", step, error)
            return _Known(StepFacts(step=step, is_damaged=True))

    def _evaluated(self, metric: str) -> Mapping[tuple[int, str], float]:
        records = sorted(EvaluationLog(self._root.path, self._options.storage_options).read().records, key=lambda one: one.at)
        return {(one.step, one.nonce): one.metrics[metric] for one in records if metric in one.metrics}

    def _with_all(self, known: _Known, best: Best | None, evaluated: Mapping[tuple[int, str], float]) -> StepFacts:
        """With what was told after the save. Where any step was evaluated, only evaluations count, as for ``restore(step="best")``."""
        facts, nonce = known.facts, known.nonce
        if nonce is None:
            return facts
        if best is not None and evaluated:
            value = evaluated.get((facts.step, nonce))
            facts = replace(facts, metrics={} if value is None else {best.metric: value})
        return replace(facts, is_verified=self._verified.get(nonce))

    def _verify(self, step: int) -> None:
        with self._lock:
            known = self._look(step)
        if known is None or known.nonce is None:
            return
        options = self._options
        report = verify_checkpoint(
            self._root.path_of(step),
            storage_options=options.storage_options,
            signing_key=options.signing_key,
            encryption_key=options.encryption_key,
        )
        self._verified[known.nonce] = not report.faults
        for fault in report.faults[:1]:
            logger.error("step %d is not what was written, and nothing is removed for it: %s", step, fault)


def facts_of_step(info: StepInfo) -> StepFacts:
    """What a checkpoint's own metadata says of it.

    Raises:
        CorruptCheckpointError kinds, UnsupportedVersionError: the metadata is nothing of ours.
    """
    record = SaveRecord.read(info.metadata, path=info.path)
    return StepFacts(
        step=info.step,
        saved_at=_time(info.saved_at),
        is_partial=record.is_partial,
        is_healthy=record.policies.health.is_healthy,
        is_pinned=record.policies.is_pinned,
        metrics=numbers_in(record.user),
    )


def numbers_in(metadata: Mapping[str, object]) -> dict[str, float]:
    """The values that are numbers, by name: what was measured at the save."""
    numbers = {}
    for name, value in metadata.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                numbers[name] = float(value)
            except OverflowError:  # an int beyond what a float holds
                numbers[name] = math.inf if value > 0 else -math.inf
    return numbers


def _time(text: str | None) -> datetime | None:
    try:
        at = None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at is None or at.tzinfo else at.replace(tzinfo=UTC)
