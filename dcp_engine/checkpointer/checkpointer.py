"""``Checkpointer``: what a training script needs to save its state and to come back. What its calls do is in the modules beside it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from dcp_engine.background import BackgroundSaver, Priority, SaveHandle
from dcp_engine.checkpointer.evaluation import EvaluationLog, EvaluationRecord, Evaluations
from dcp_engine.checkpointer.node_planner import NodePlanner
from dcp_engine.checkpointer.options import CheckpointerOptions, Mode
from dcp_engine.checkpointer.parts import Parts
from dcp_engine.checkpointer.policies import Policies
from dcp_engine.checkpointer.probe import PROBE_TOLERANCE
from dcp_engine.checkpointer.probing import report_of
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.checkpointer.report import RestoreReport
from dcp_engine.checkpointer.restoring import Restoring
from dcp_engine.checkpointer.rng_guard import eval_rng, generators_of
from dcp_engine.checkpointer.saving import Saving
from dcp_engine.errors import CheckpointNotFoundError, ClosedError, DcpEngineError
from dcp_engine.policies import Health, Keep, KeepPlan, Room, When
from dcp_engine.staging import DoubleBufferStager
from dcp_engine.storage import RunRoot, VerifyReport, verify_checkpoint
from dcp_engine.storage.keys import KeySource
from dcp_engine.storage.step_info import StepInfo
from dcp_engine.train_state import TrainState

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves a run's state beside training, and brings it back.

    ::

        state = TrainState(model, optimizer, schedulers=scheduler, data=loader)
        with Checkpointer("runs/7", save_every=100) as checkpointer:
            report = checkpointer.restore(state, missing_ok=True)  # None at the first start
            while state.counters.step < num_steps:
                train_step(state)
                checkpointer.maybe_save(state.counters.step, state)

    All ranks make one and call it alike, in the thread that trains. What they have to agree on goes over a gloo group of their own: at the
    first save and in ``restore``; in other saves a small message, only with ``if_busy`` other than ``"wait"``, ``health`` or ``room``.
    The collectives of the saves themselves run in the background, beside those of training.

    What is saved is one step's state: where optimizers, schedulers, counters, data or ranks are at different steps, nothing is published.
    The first save claims the root: an older run that still lives can publish nothing there any more.

    Args:
        root: directory or URL of the run, with a directory ``step-<8 digits>`` for each checkpoint. It need not exist. One that holds
            other things and no steps is somebody else's, and refused.
        process_group: the ranks that save and restore; None: all of them, or this process alone without a process group.
        run_id: name of the run, kept in its checkpoints and told to others who claim the root.
        save_every: for :meth:`maybe_save`: a number of steps, or one for each component, as in ``{"model": 200, "*": 1000}``.
        when: other rules for :meth:`maybe_save`: by time, phases or a budget, or ``"auto"``. See :class:`~dcp_engine.policies.When`. With
            rules by time the first rank decides, and tells the others at some of the calls.
        keep: what stays of the steps when a newer one is durable; None: all. One rank removes the rest, beside training. See
            :class:`~dcp_engine.policies.Keep`.
        health: what makes a state healthy, by the numbers in ``save(metadata=...)``, as in ``{"loss": 2.5}``, of all ranks: ``keep`` never
            removes the last healthy step. Takes one all-reduce of a number for each save. See :class:`~dcp_engine.policies.Health`.
        room: what has to be free before a save starts, as in ``Room()``: the size of the last one and a tenth. None: nobody looks.
        best: metric that ``restore(step="best")`` goes by, and its direction: ``("loss", "min")``.
        if_busy: what a save does while an earlier one is under way on any rank: ``"wait"``: waits for a staging buffer, which is free at
            most times; ``"skip"``: is left out, on all ranks; ``"error"``: raises, on all ranks.
        executor, stager, priority, failure_secs, timeout_secs, exit_wait_secs: of :class:`~dcp_engine.background.BackgroundSaver`.
        node_local: the root lies on a disk of each node's own. Each node then saves all that its ranks hold, which must be the whole state
            (DDP, or HSDP that shards inside a node), and ``restore`` takes the newest step that all nodes have.
        max_fallbacks: how many damaged steps ``restore`` passes over at most.
        writer_options: of every :class:`~dcp_engine.storage.ShardWriter`: ``codec``, ``level``, ``threads``, ``digest`` and so on.
        reader_options: of every :class:`~dcp_engine.storage.ShardReader`: ``broadcast``, ``threads`` and so on.
        planner: of all saves; None: a balanced one.
        storage_options, signing_key, encryption_key: of readers and writers.

    Attributes:
        stager: what copies the states. Optimizers of a ``TrainState`` on a GPU are protected with it: their next ``step()`` waits, on the
            device, for the copy. Whatever else changes the tensors has to ``fence()`` with it.

    Raises:
        InvalidOptionError: an option is out of range, or the root is somebody else's.

    Thread-safety: none, but for the handles.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        run_id: str = "",
        save_every: int | Mapping[str, int] | None = None,
        when: When | Literal["auto"] | None = None,
        keep: Keep | None = None,
        health: Health | None = None,
        room: Room | None = None,
        best: tuple[str, Mode] | None = None,
        if_busy: str = "wait",
        executor: str = "thread",
        stager: DoubleBufferStager | None = None,
        priority: Priority | None = None,
        node_local: bool = False,
        max_fallbacks: int = 3,
        writer_options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
        planner: SavePlanner | None = None,
        storage_options: Mapping[str, Any] | None = None,
        signing_key: KeySource | None = None,
        encryption_key: KeySource | None = None,
        failure_secs: float | None = None,
        timeout_secs: float = 1800.0,
        exit_wait_secs: float = 60.0,
    ) -> None:
        self._options = options = CheckpointerOptions(
            run_id=run_id,
            save_every=save_every,
            when=when,
            keep=keep,
            health=health,
            room=room,
            best=best,
            if_busy=if_busy,
            node_local=node_local,
            max_fallbacks=max_fallbacks,
            writer_options=writer_options or {},
            reader_options=reader_options or {},
            storage_options=storage_options or {},
            signing_key=signing_key,
            encryption_key=encryption_key,
            timeout_secs=timeout_secs,
        )
        self._root = RunRoot(root, options.storage_options, signing_key=signing_key)
        self._ranks = Ranks.of(process_group, timeout_secs=timeout_secs)
        self._members = self._ranks.of_node(timeout_secs=timeout_secs) if node_local else self._ranks
        # Now, and not at the first save, an hour later.
        self._ranks.everyone_makes(lambda: self._root.check_own() if self._members.is_first else None)
        self._saver = BackgroundSaver(
            stager=stager,
            executor=executor,
            process_group=self._members.group,
            failure_secs=failure_secs,
            timeout_secs=timeout_secs,
            priority=priority,
            exit_wait_secs=exit_wait_secs,
        )
        self.stager = self._saver.stager
        if node_local and planner is None:
            planner = NodePlanner()
        self._policies = Policies(self._root, options, self._ranks, self._members)
        self._saving = Saving(self._root, options, self._ranks, self._members, self._saver, self._policies, planner)
        self._restoring = Restoring(self._root, options, self._ranks, self._members)
        self._evaluations = EvaluationLog(self._root.path, options.storage_options)
        self._seen: weakref.ref[TrainState] | None = None
        self._closed = False

    # -- saving -----------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        wait: bool = False,
        metadata: Mapping[str, Any] | None = None,
        probe: Callable[[], Any] | None = None,
    ) -> SaveHandle:
        """Copy the state, return, and save it beside training.

        Args:
            step: of the state, above all steps before.
            state: a ``TrainState``; or a dict as ``dcp.save`` takes it, with a ``TrainState`` in it or not. CPU tensors may be changed when
                this returns.
            wait: until the checkpoint is durable.
            metadata: values to keep with it.
            probe: called without arguments: what the model gives for a fixed input, so that a restore can tell whether it gives the same.

        Returns:
            Of the save. With ``if_busy="skip"``, where an earlier one is under way, a handle that is ``skipped``.

        Raises:
            DcpEngineError: of an earlier save, if nobody has read it: this one did not take place then, on any rank.
            InvalidOptionError: an argument is none, or the step is not above those of this run. CheckpointExistsError: nor of the root.
            MixedStepsError, StateError kinds: the state is not of one step, or cannot be saved now, inside an accumulation cycle, say.
                With several ranks the handle has this error, on all of them.
            SaverBusyError: with ``if_busy="error"``. FencedError: a newer run has claimed the root. ClosedError.
            StorageFullError: with ``room``, on all ranks: the save would not fit. Nothing was written.
            StorageError kinds: at the first save, the root cannot be claimed.
        """
        self._require_open(step)
        handle = self._saving.save(step, state, metadata=metadata, probe=probe)
        self._note(Parts(state))
        if wait and not handle.skipped:
            handle.result()
        self._policies.saved(handle)
        return handle

    def maybe_save(
        self,
        step: int,
        state: Any,
        *,
        wait: bool = False,
        force: bool = False,
        metadata: Mapping[str, Any] | None = None,
        probe: Callable[[], Any] | None = None,
    ) -> SaveHandle | None:
        """:meth:`save` if ``save_every`` or ``when`` says so; call it after every step, or every micro-batch.

        A save that falls into an accumulation cycle of a ``TrainState(grads="defer")`` takes place at the first call after the cycle. Of
        components that are due alone a checkpoint of only these is made, which a restore of the whole state passes over.

        Args:
            force: the whole state is due, whatever the rules say, as after the last step. Nothing is done for a step that this run has
                saved or has just restored. The rest as for :meth:`save`.

        Returns:
            The handle; None where nothing was to be saved.

        Raises:
            InvalidOptionError: there is neither, nor ``force``; or ``save_every`` names a component that the state lacks. All else as
                :meth:`save`.
        """
        self._require_open(step)
        parts = Parts(state)
        due = self._policies.due(step, parts.train_state, is_saved=self._saving.is_saved(step), force=force)
        if not due:
            return None
        whole = parts.train_state
        if whole is not None and set(due) != set(whole.components):
            state = parts.narrowed(due).values
        return self.save(step, state, wait=wait, metadata=metadata, probe=probe)

    def wait(self, timeout_secs: float | None = None) -> None:
        """Wait for every save so far.

        Raises:
            DcpEngineError: the first that failed and whose failure nobody had read.
            SaveTimeoutError: they are not done in time.
        """
        self._saver.wait(timeout_secs)

    # -- coming back ------------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        step: int | str = "latest",
        *,
        components: Collection[str] | None = None,
        probe: Callable[[], Any] | None = None,
        probe_tolerance: float = PROBE_TOLERANCE,
        planner: LoadPlanner | None = None,
        missing_ok: bool = False,
    ) -> RestoreReport | None:
        """Load a step into a state, and check that the run is the one that was saved. All ranks call it alike.

        Args:
            state: as for :meth:`save`, made as in the run that saved; on any number of ranks, in any layout.
            step: ``"latest"``: the newest that is whole: damaged ones are passed over, loudly, up to ``max_fallbacks``, and so are those
                that hold only components. ``"best"``: likewise by the metric of ``best``, the best first. A number: that one or an error.
            components: of the ``TrainState``: only these, the rest is left as it is.
            probe: as at the save: its values must be those that were recorded, bit for bit on the same topology.
            probe_tolerance: largest relative difference of a value on another one.
            planner: None: a strict ``ReshardLoadPlanner``.
            missing_ok: a root without any step is no error: the first start of a job.

        Returns:
            What was restored, and what that is worth: findings are no errors. None only with ``missing_ok``.

        Raises:
            CheckpointNotFoundError: there is no such step, or none at all; says which there are.
            CorruptCheckpointError kinds: it is damaged, or too many are. The state is undefined then.
            KeyMismatchError, ShapeMismatchError, DtypeMismatchError, StateError kinds: the state is not made as it was. Nothing is passed
                over for that.
            ProbeError: the probe cannot run.
            RankDisagreementError: a rank does not see what another one has written.
            UnsupportedVersionError: a newer release wrote the newest step. StorageError kinds.
        """
        self._require_open(None)
        parts = Parts(state)
        self._note(parts)
        if components is not None:
            parts = parts.narrowed(components)
        order, lonely = self._restoring.order(step)
        if not order:
            if missing_ok and step == "latest":
                return None
            raise CheckpointNotFoundError(
                "there is no step to restore",
                path=self._root.path,
                remedy="pass missing_ok=True where this is the first start of a run; else look at the path",
            )
        restored = self._restoring.restore(parts, order, may_fall_back=isinstance(step, str), planner=planner)
        if components is None:
            self._saving.resumed(restored, lonely, is_latest=step == "latest")
        report = report_of(restored, parts, self._ranks, probe=probe, tolerance=probe_tolerance)
        if self._ranks.is_first:
            for line in report.lines():
                logger.info("%s", line)
        return report

    # -- evaluation -------------------------------------------------------------------------------------------------------

    def eval_rng(self) -> AbstractContextManager[None]:
        """While the block runs, evaluation may draw random numbers: afterwards all generators are where they were before.

        Those are the global ones, and those of the training state that this object has last saved or restored.
        """
        state = self._seen() if self._seen is not None else None
        return eval_rng(None if state is None else generators_of(state))

    def record_evaluation(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        code: str | None = None,
        data: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> EvaluationRecord:
        """Add what an evaluation said of a committed step; see :meth:`EvaluationLog.record`. On one rank: no other one takes part."""
        return self._evaluations.record(step, metrics, code=code, data=data, config=config)

    def evaluations(self, step: int | None = None) -> Evaluations:
        """What evaluations said of a step, or of all; see :meth:`EvaluationLog.read`. No other rank takes part."""
        return self._evaluations.read(step)

    # -- what is there ----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps of the root as this rank sees it, ascending. No other rank takes part."""
        return self._root.steps()

    def look(self, step: int) -> StepInfo:
        """What is told of a step without reading its data; see :meth:`RunRoot.look`. No other rank takes part."""
        return self._root.look(step)

    def retention_plan(self, keep: Keep | None = None) -> KeepPlan:
        """What ``keep``, or these other rules, would make of the steps that are there, and why. Removes nothing. No other rank takes part.

        A step that somebody reads is not told here: it would stay. ``print(checkpointer.retention_plan())`` shows one line a step.
        """
        return self._policies.plan(keep)

    def verify(self, step: int) -> VerifyReport:
        """Check every byte of a step; see :func:`~dcp_engine.storage.verify.verify_checkpoint`. No other rank takes part."""
        options = self._options
        return verify_checkpoint(self._root.path_of(step), encryption_key=options.encryption_key, **options.of_root)

    # -- the end ----------------------------------------------------------------------------------------------------------

    def close(self, timeout_secs: float | None = None) -> None:
        """Wait for every save, then end. Idempotent. What is not done within ``timeout_secs`` is given up.

        Raises:
            DcpEngineError: as :meth:`wait`; closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        self._policies.close()
        try:
            self._saver.close(timeout_secs)
        finally:
            if self._members is not self._ranks:
                self._members.close()
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except DcpEngineError as failure:
            if error is None:
                raise
            logger.error("a save failed, too: %s", failure)  # the body's own exception is the one to see

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _require_open(self, step: int | None) -> None:
        if self._closed:
            raise ClosedError("the checkpointer is closed", path=self._root.path, step=step, remedy="make a new one")

    def _note(self, parts: Parts) -> None:
        """Its generators are left alone by evaluations, too."""
        state = parts.train_state
        self._seen = self._seen if state is None else weakref.ref(state)
