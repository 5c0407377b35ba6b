"""The steps of ``dcp.save``, in its order and with its calls of writer and planner, among ranks of which any may fail at any time.

``dcp.save`` itself waits inside collectives, which nothing but their timeout ends, and breaks off without a word to the others where an
exception, or a plan, cannot be pickled. Here both are told.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcp_engine.background.cut import Cut, require_one_step
from dcp_engine.background.exchange import Exchange
from dcp_engine.background.wire import packed, unpacked
from dcp_engine.errors import DcpEngineError, RankFailedError, can_travel
from dcp_engine.storage import ShardWriter
from dcp_engine.storage.attempts import AttemptRef
from dcp_engine.storage.tickets import attempt_of

__all__ = ["HANDED", "PLANNING", "PUBLISHING", "WRITING", "SaveWatch", "save_in_steps"]

PLANNING = "planning"
PLANS = "waiting for plans"
WRITING = "writing"
HANDED = "waiting for the others to write, and for the end"
"""From here on the coordinator may publish what this rank has written."""
PUBLISHING = "publishing"


class SaveWatch(Protocol):
    """Who watches a save. What its methods raise ends the save on this rank."""

    def enter(self, phase: str) -> None:
        """A phase begins. Raises if the save is over: what a rank that was told so must not do is done by none."""
        ...

    def saw_attempt(self, attempt: AttemptRef | None) -> None:
        """What this save will be published from."""
        ...

    def check(self) -> None:
        """The coordinator asks, in a step, whether it may go on; right before it publishes while in :data:`PUBLISHING`."""
        ...

    def fails(self, error: BaseException) -> None:
        """The coordinator is about to tell this failure to all ranks."""
        ...

    def published(self) -> None:
        """The coordinator has published."""
        ...


def save_in_steps(
    state: dict[str, Any], writer: StorageWriter, planner: SavePlanner, exchange: Exchange, watch: SaveWatch, *, cut: Cut
) -> Metadata:
    """Save; all ranks call it alike.

    Args:
        cut: where this rank stands. It travels with the local plan, and where the ranks are not at one step nothing is planned.

    Returns:
        What the coordinator's planner and writer made of it, on every rank.

    Raises:
        CheckpointException: steps failed on some ranks; the same on all.
        DcpEngineError: the save was broken off.
    """
    save = _Save(state, writer, planner, exchange, watch, cut)
    try:
        plan = save.plan()
        return save.write(plan)
    except BaseException:
        # The others know by now. A writer of its own for each save begins no next one, in which it would tidy up: on a full disk, what
        # failed saves leave would make the next one fail, too.
        if exchange.is_coordinator and isinstance(writer, ShardWriter):
            writer.abandon()
        raise


class _Save:
    def __init__(
        self, state: dict[str, Any], writer: StorageWriter, planner: SavePlanner, exchange: Exchange, watch: SaveWatch, cut: Cut
    ) -> None:
        self._cut = cut
        self._state = state
        self._writer = writer
        self._planner = planner
        self._exchange = exchange
        self._watch = watch
        self._metadata: Metadata | None = None

    def plan(self) -> SavePlan:
        """This rank's part of the plan that the coordinator makes of all."""
        exchange, watch = self._exchange, self._watch
        watch.enter(PLANNING)
        local = self._told(PLANNING, lambda: (self._local_plan(), self._cut))
        watch.enter(PLANS)
        locals_ = exchange.gather(local)
        parts: list[bytes] = []
        if exchange.is_coordinator:
            watch.enter(PLANNING)
            parts = self._global_plans(locals_)
            watch.enter(PLANS)
        plan: SavePlan = self._heard(exchange.scatter(parts), PLANNING)
        watch.saw_attempt(attempt_of(plan))
        return plan

    def write(self, plan: SavePlan) -> Metadata:
        """Write this rank's files; the coordinator publishes when all have."""
        exchange, watch = self._exchange, self._watch
        watch.enter(WRITING)
        results = self._told(WRITING, lambda: self._written(plan))
        watch.enter(HANDED)
        all_results = exchange.gather(results)
        data = b""
        if exchange.is_coordinator:
            watch.enter(PUBLISHING)
            data = self._published(all_results)
            watch.enter(HANDED)
        metadata = self._heard(exchange.broadcast(data), WRITING)
        return self._metadata if self._metadata is not None else metadata

    def _local_plan(self) -> SavePlan:
        exchange = self._exchange
        meta = self._writer.storage_meta()
        parameters = inspect.signature(self._planner.set_up_planner).parameters
        if "storage_meta" in parameters:
            self._planner.set_up_planner(state_dict=self._state, storage_meta=meta, is_coordinator=exchange.is_coordinator)
        else:  # DCP's earlier contract, which dcp.save serves, too
            self._planner.set_up_planner(self._state, exchange.is_coordinator)  # type: ignore[arg-type]
        if "kwargs" in inspect.signature(self._writer.set_up_storage_writer).parameters:
            self._writer.set_up_storage_writer(exchange.is_coordinator, rank=exchange.rank, use_collectives=True)
        else:
            self._writer.set_up_storage_writer(exchange.is_coordinator)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _global_plans(self, data: list[bytes]) -> list[bytes]:
        failures, told = self._all_heard(data)
        if not failures:
            try:
                require_one_step([cut for _, cut in told])
                plans = [plan for plan, _ in told]
                plans, self._metadata = self._planner.create_global_plan(plans)
                with self._fenced():
                    plans = self._writer.prepare_global_plan(plans)
                return [packed(plan) for plan in plans]
            except BaseException as error:  # noqa: BLE001  all ranks are to learn of it, whatever it is
                failures[self._exchange.rank] = self._portable(error, PLANNING)
        return [self._failed(PLANNING, failures)] * self._exchange.size

    def _written(self, plan: SavePlan) -> Any:
        plan = self._planner.finish_plan(plan)
        writes = self._writer.write_data(plan, self._planner)
        writes.wait()
        return writes.value()

    def _published(self, data: list[bytes]) -> bytes:
        failures, results = self._all_heard(data)
        if not failures:
            assert self._metadata is not None
            try:
                with self._fenced():
                    if not isinstance(self._writer, ShardWriter):
                        self._watch.check()  # it has no fences: this is the last moment that it gives us
                    self._writer.finish(metadata=self._metadata, results=results)
            except BaseException as error:  # noqa: BLE001  as above
                failures[self._exchange.rank] = self._portable(error, PUBLISHING)
        if failures:
            return self._failed(WRITING, failures)
        # It is published, whatever fails from here on: that must not be told as a failure of the save, which it would be by the exchange.
        self._watch.published()
        return packed(self._metadata)

    @contextmanager
    def _fenced(self) -> Iterator[None]:
        """Meanwhile our writer asks the watch before it publishes."""
        if not isinstance(self._writer, ShardWriter):
            yield
            return
        with self._writer.watch.fenced_by(self._watch):
            yield

    def _told(self, phase: str, step: Callable[[], Any]) -> bytes:
        """What a step of this rank's gives, or raises, as it travels."""
        try:
            return packed(step())
        except BaseException as error:  # noqa: BLE001  as above; SystemExit in a hook of the user's, too
            return packed(_Failure(self._portable(error, phase)))

    def _portable(self, error: BaseException, phase: str) -> BaseException:
        rank = self._exchange.rank
        if isinstance(error, DcpEngineError):
            error.rank = rank if error.rank is None else error.rank
            error.phase = error.phase or phase
        if can_travel(error):
            return error
        # To send it would fail, and leave the others waiting.
        return RankFailedError("a rank failed to save", rank=rank, phase=phase, found=f"{type(error).__name__}: {error}")

    def _failed(self, step: str, failures: dict[int, BaseException]) -> bytes:
        error = _exception(step, failures)
        self._watch.fails(error)
        return packed(_Failures(step, failures))

    def _all_heard(self, data: list[bytes]) -> tuple[dict[int, BaseException], list[Any]]:
        failures, values = {}, []
        for rank, part in enumerate(data):
            try:
                value = unpacked(part)
            except Exception as error:  # noqa: BLE001  whatever a class, or its absence, raises
                value = _Failure(RankFailedError("what a rank sent cannot be read", rank=rank, found=f"{type(error).__name__}: {error}"))
            if isinstance(value, _Failure):
                failures[rank] = value.error
            values.append(value)
        return failures, values

    def _heard(self, data: bytes, step: str) -> Any:
        try:
            value = unpacked(data)
        except Exception as error:
            raise RankFailedError(
                "what the coordinator sent cannot be read", rank=self._exchange.rank, phase=step, found=f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(value, _Failures):
            raise _exception(value.step, value.errors)
        return value


class _Failure:
    """Instead of a rank's plan or results."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Failures:
    """Instead of what the coordinator makes of all."""

    def __init__(self, step: str, errors: dict[int, BaseException]) -> None:
        self.step = step
        self.errors = errors


def _exception(step: str, errors: dict[int, BaseException]) -> CheckpointException:
    return CheckpointException(step, {rank: (error, StackSummary()) for rank, error in errors.items()})
