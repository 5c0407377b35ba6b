"""What a training function sees of the comparison that it takes part in: where it saves, whether it resumes, and what it tells."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from dcp_engine.errors import InvalidOptionError, StoppedOnPurposeError, UsageError
from dcp_engine.testing import values as plain
from dcp_engine.testing.records import RecordWriter, StepRecord
from dcp_engine.testing.save_watch import SaveWatch
from dcp_engine.testing.stops import AFTER_STEP, SAVE_POINTS, StopAt

__all__ = ["RunContext"]


class RunContext:
    """One leg of a run on one rank. The function that :func:`assert_resume_equal` is given gets it as its only argument::

        def train(run: RunContext) -> None:
            model, optimizer, ... = build()
            if run.resume:
                load_newest(run.root, ...)
            for step in run.steps(after=counters.step, last=30):
                loss = ...
                run.point("after_backward")
                optimizer.step()
                run.record(step, loss=loss, lr=optimizer, batch=ids)
                if step % 5 == 0:
                    save(run.root, ...)

    The generators of Python, numpy and torch are seeded before it is called: alike in all runs that start afresh, and otherwise in those
    that resume, so that nothing is right there by chance.

    Attributes:
        root: folder for the checkpoints: one for the straight run, and one for all legs of the run under test.
        resume: a leg was there before this one. It may have been killed before its first save.
        rank: of this process.
        world_size: processes of this leg.
        layout: name of the layout, or the number of ranks in words.
        leg: name of the leg, ``"straight"`` for the run that never stops.

    Thread-safety: none; the thread that trains calls all of it.
    """

    def __init__(
        self, *, root: str, resume: bool, rank: int, world_size: int, layout: str, leg: str, folder: str, stops: Sequence[StopAt]
    ) -> None:
        self.root = root
        self.resume = resume
        self.rank = rank
        self.world_size = world_size
        self.layout = layout
        self.leg = leg
        self._folder = folder
        self._stops = [(number, stop) for number, stop in enumerate(stops) if rank in stop.targets(world_size)]
        self._records = RecordWriter(os.path.join(folder, f"rank-{rank:05d}.jsonl"))
        self._step = 0
        self._stopping = False
        for number, stop in self._stops:
            if stop.point in SAVE_POINTS or stop.unfinished_save is not None:
                watch = SaveWatch(root, stop, current_step=lambda: self._step, reached=partial(self._end, number, stop))
                watch.start()

    @property
    def stopping(self) -> bool:
        """The run is to leave now, in order: save if it does so at its end, and return."""
        return self._stopping

    def steps(self, *, after: int, last: int) -> Iterator[int]:
        """Numbers of the steps to train: ``after + 1`` to ``last``, or to where the run is to leave.

        Args:
            after: the last step that is done, 0 for none.
            last: the last step of the run.
        """
        for step in range(after + 1, last + 1):
            if self._stopping:
                return
            self._step = step
            yield step

    def point(self, name: str, *, step: int | None = None) -> None:
        """A place inside a step, at which the run may be stopped. Call it on all ranks.

        Args:
            name: of the place, ``"after_backward"`` or ``"after_optimizer_step"`` for instance.
            step: that is under way; None: the one of :meth:`steps`.

        Raises:
            InvalidOptionError: the name is one of the tool's own.
            UsageError: no step is under way.
            StoppedOnPurposeError: the run is to end here by an exception.
        """
        if name in (AFTER_STEP, *SAVE_POINTS):
            raise InvalidOptionError("this point is the tool's own", expected="another name", found=repr(name))
        self._step = self._step if step is None else step
        if not self._step:
            raise UsageError("no step is under way", remedy="iterate run.steps(), or pass step=")
        self._pass(name)

    def record(
        self,
        step: int,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        lr: Any = None,
        scaler: Any = None,
        batch: Any = None,
        draws: Any = None,
        counters: Any = None,
        state: Any = None,
        **values: Any,
    ) -> None:
        """Tells what one step did. Call it once in every step, on all ranks, after the optimizer and before a save of this step.

        Args:
            step: its number.
            loss: a number, or a tensor with one element: this rank's, if all ranks have equally large parts of a batch, or of all.
            grad_norm: likewise, of all gradients.
            lr: the optimizer, or numbers.
            scaler: the ``GradScaler``, or its scale.
            batch: ids of this rank's samples, ints; or a text.
            draws: what this step drew, in any form: numbers, tensors, lists or dicts of them. The states of the global generators of
                Python, numpy and torch are recorded anyway; those that the straight run never draws from are not compared.
            counters: ``Counters``, or numbers by name.
            state: the ``TrainState``, or a state dict: a digest of each of its values is recorded. To do this in the last step is enough to
                learn that the whole state is the same; in every step, to learn at once what differs.
            values: whatever else is to be compared.

        Raises:
            InvalidOptionError: a value is of no such kind, or steps are not counted from 1.
            StoppedOnPurposeError: the run is to end here by an exception.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise InvalidOptionError("step is no step", expected="an int: 1 for the first", found=repr(step)[:300])
        if hasattr(counters, "state_dict"):
            counters = {name: value for name, value in counters.state_dict().items() if name != "losses"}
        self._records.write(
            StepRecord(
                step=step,
                loss=None if loss is None else plain.number(loss, name="loss"),
                grad_norm=None if grad_norm is None else plain.number(grad_norm, name="grad_norm"),
                lr=plain.learning_rates(lr),
                scaler=plain.scaler_values(scaler),
                batch=plain.sample_ids(batch),
                draws=None if draws is None else plain.fingerprint(draws),
                generators=plain.generator_digests(),
                counters={name: plain.scalar(value, name=name) for name, value in (counters or {}).items()},
                values={name: plain.scalar(value, name=name) for name, value in values.items()},
                state={} if state is None else plain.state_digests(state),
                at_secs=time.monotonic(),
            )
        )
        self._step = step
        self._pass(AFTER_STEP)

    def _pass(self, point: str) -> None:
        for number, stop in self._stops:
            if stop.point == point and stop.step == self._step:
                self._end(number, stop)

    def _end(self, number: int, stop: StopAt) -> None:
        """Leaves word that the point is reached, and ends as the stop has it."""
        with open(os.path.join(self._folder, f"reached-{number}-{self.rank:05d}"), "wb"):
            pass
        match stop.end:
            case "stop":
                self._stopping = True
            case "exception":
                raise StoppedOnPurposeError("the run is stopped here on purpose, by an exception", step=stop.step, rank=self.rank)
            case "sigkill":
                threading.Event().wait()  # for whoever started the ranks, who kills when all that are to die are here
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
