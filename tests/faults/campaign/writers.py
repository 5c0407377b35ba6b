"""Two writers, a reader, retention and a clock that jumps: a state machine of hypothesis against what must hold at every call."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

from faults.campaign.outcome import Outcome
from faults.campaign.writers_world import Actor, BrokenPromise, Moment, World
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.roots import save_step
from torch.distributed.checkpoint import CheckpointException

from dcp_engine import EpochClaim, RunRoot, verify_checkpoint
from dcp_engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DcpEngineError,
    FencedError,
    InvalidOptionError,
    StepInUseError,
)
from dcp_engine.storage import holds
from dcp_engine.storage.backends.calls import installed
from dcp_engine.storage.good_steps import check_whole
from dcp_engine.storage.publish import OpenCheckpoint, open_checkpoint

__all__ = ["PART", "PROMISE", "TITLE", "Writers", "run"]

PART = "writers"
TITLE = "Two writers, a reader, retention, a clock that jumps"
PROMISE = (
    "only the newest claim publishes; the last good step and what is being read stay; nothing foreign is touched; whoever has the newest "
    "claim is never refused"
)

_QUICK, _FULL = 120, 4_000
_NUM_RULES = 25
_STRANGERS = ("step-7.tmp", "step-007", "notes", ".trash-1", ".tmp-notes-" + "0" * 32)

ACTORS = st.sampled_from([0, 1])
STEPS = st.integers(1, 5)
CALLS = st.sampled_from(["rename", "rename", "flock", "mkdir", "open", "listdir", "lstat"])
MOMENTS = st.one_of(st.tuples(st.just(""), st.integers(0, 40)), st.tuples(CALLS, st.integers(0, 2)))
"""Before which call something else happens: the name of the call, or nothing for any, and how many of them come first."""
TURNS = st.one_of(st.none(), MOMENTS)
OTHERS = st.sampled_from(["claim", "claim", "claim", "save", "prune", "retire", "clean", "read"])


class Writers(RuleBasedStateMachine):
    """The rules. ``totals`` adds up what all of its runs have done."""

    totals: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.mkdtemp(prefix="dcp-engine-writers-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.world = World(self.place)
        self.root = RunRoot(self.place)
        self.actors = [Actor("a"), Actor("b")]
        self.claims: list[EpochClaim | None] = [None, None]
        self.readers: list[tuple[int, OpenCheckpoint]] = []
        for name in _STRANGERS:
            (Path(self.place) / name).mkdir()
            (Path(self.place) / name / "COMPLETE").write_text(name)
        os.symlink("notes", os.path.join(self.place, "step-00000009"))

    @initialize(steps=st.integers(0, 3))
    def begin(self, steps: int) -> None:
        """Some steps are there, and the first actor goes on with them."""
        for step in range(1, steps + 1):
            self._with(0, None, "", partial(self._save, 0, step))

    # -- what actors do -------------------------------------------------------------------------------------------------

    @rule(actor=ACTORS, turn=TURNS, other=OTHERS)
    def claim(self, actor: int, turn: Moment | None, other: str) -> None:
        self._with(actor, turn, other, lambda: self._claim(actor))

    @rule(actor=ACTORS, step=STEPS, turn=TURNS, other=OTHERS)
    def save(self, actor: int, step: int, turn: Moment | None, other: str) -> None:
        self._with(actor, turn, other, lambda: self._save(actor, step))

    @rule(actor=ACTORS, step=STEPS, death=MOMENTS, turn=TURNS, other=OTHERS)
    def save_and_die(self, actor: int, step: int, death: Moment, turn: Moment | None, other: str) -> None:
        self.world.die_before = death
        self._with(actor, turn, other, lambda: self._save(actor, step))
        self.actors[actor].epoch, self.claims[actor] = 0, None

    @rule(actor=ACTORS, keep=st.integers(1, 2), turn=TURNS, other=OTHERS)
    def prune(self, actor: int, keep: int, turn: Moment | None, other: str) -> None:
        self._with(actor, turn, other, lambda: self._prune(actor, keep))

    @rule(actor=ACTORS, step=STEPS, turn=TURNS, other=OTHERS)
    def retire(self, actor: int, step: int, turn: Moment | None, other: str) -> None:
        self._with(actor, turn, other, lambda: self._retire(actor, step))

    @rule(actor=ACTORS, later_secs=st.sampled_from([0.0, 3700.0]), turn=TURNS, other=OTHERS)
    def clean(self, actor: int, later_secs: float, turn: Moment | None, other: str) -> None:
        self.world.now += later_secs
        self._with(actor, turn, other, lambda: self._clean(actor))

    @rule(actor=ACTORS)
    def point_at_the_newest(self, actor: int) -> None:
        newest = max(self.world.published, default=None)
        claim = self.claims[actor]
        if newest is not None and claim is not None:
            self._with(actor, None, "", lambda: self._allowed(actor, lambda: self.root.set_latest(newest, claim)))

    @rule(step=STEPS)
    def open_reader(self, step: int) -> None:
        with installed(self.world):
            self._read(step)

    @rule()
    def close_reader(self) -> None:
        if self.readers:
            step, opened = self.readers.pop(0)
            self._check_reader(step, opened)
            if verify_checkpoint(self.root.path_of(step)).faults:
                raise BrokenPromise(f"step {step} is damaged")
            self.world.held[step] -= 1
            opened.hold.release()

    @rule(secs=st.sampled_from([-1e6, -7200.0, -1.0, 10.0, 3700.0, 1e6]))
    def jump(self, secs: float) -> None:
        self.world.now = max(1e6, self.world.now + secs)
        self.world.counts["clock jumps"] += 1

    # -- what must hold -------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.world.judge()
        steps = self.root.steps()
        if steps != sorted(self.world.published):
            raise BrokenPromise(f"steps {steps} are there instead of {sorted(self.world.published)}")
        for step in steps:
            opened = open_checkpoint(self.root.path_of(step))
            check_whole(opened)
            opened.hold.release()
        for step, opened in self.readers:
            self._check_reader(step, opened)
        for name in _STRANGERS:
            if (Path(self.place) / name / "COMPLETE").read_text() != name:
                raise BrokenPromise(f"{name} is not what it was")
        if os.readlink(os.path.join(self.place, "step-00000009")) != "notes":
            raise BrokenPromise("the link is not what it was")
        if self.root.latest() != max(steps, default=None):
            raise BrokenPromise(f"the newest step is {self.root.latest()} instead of {max(steps, default=None)}")

    def teardown(self) -> None:
        for _, opened in self.readers:
            opened.hold.release()
        type(self).totals.update(self.world.counts)
        shutil.rmtree(self.place)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _with(self, actor: int, turn: Moment | None, other: str, action: Callable[[], None]) -> None:
        """An action, with a turn of the other actor in the middle of it."""
        world = self.world
        if turn is not None and other:
            world.slip = (turn, lambda: world.act(self.actors[1 - actor], lambda: self._other(1 - actor, other)))
        try:
            with installed(world):
                world.act(self.actors[actor], action)
        finally:
            world.settle()

    def _other(self, actor: int, what: str) -> None:
        step = 1 + (len(self.world.counts) + self.world.counts["published"]) % 5
        {
            "claim": lambda: self._claim(actor),
            "save": lambda: self._save(actor, step),
            "prune": lambda: self._prune(actor, 1),
            "retire": lambda: self._retire(actor, max(self.world.published, default=1)),
            "clean": lambda: self._clean(actor),
            "read": lambda: self._read(max(self.world.published, default=1)),
        }[what]()

    def _claim(self, actor: int) -> None:
        claim: list[EpochClaim] = []
        # Its old claim is overtaken by its own new one.
        self._allowed(actor, lambda: claim.append(self.root.claim(self.actors[actor].name)), claims=True)
        if claim:
            self.claims[actor], self.actors[actor].epoch = claim[0], claim[0].epoch
            self.world.claimed = max(self.world.claimed, claim[0].epoch)
            self.world.counts["claims"] += 1

    def _claimed(self, actor: int) -> EpochClaim | None:
        """The claim of an actor, which makes one if it has none yet; None if that is overtaken at once."""
        if self.claims[actor] is None:
            self._claim(actor)
        return self.claims[actor]

    def _save(self, actor: int, step: int) -> None:
        claim = self._claimed(actor)
        if claim is not None:
            self.world.counts["saves"] += 1
            self._allowed(actor, lambda: save_step(self.root, step, claim), CheckpointExistsError)

    def _prune(self, actor: int, keep: int) -> None:
        claim = self._claimed(actor)
        if claim is not None:
            self._allowed(actor, lambda: self._count(self.root.prune(keep, claim).in_use))

    def _count(self, in_use: tuple[int, ...]) -> None:
        self.world.counts["kept for a reader"] += len(in_use)

    def _retire(self, actor: int, step: int) -> None:
        claim = self._claimed(actor)
        if claim is not None:
            harmless = (StepInUseError, CheckpointNotFoundError, InvalidOptionError)
            self._allowed(actor, lambda: self.root.retire(step, claim), *harmless)

    def _clean(self, actor: int) -> None:
        claim = self._claimed(actor)
        if claim is not None:
            self._allowed(actor, lambda: self.world.counts.update({"cleaned": len(self.root.clean(claim))}))

    def _read(self, step: int) -> None:
        try:
            opened = open_checkpoint(self.root.path_of(step))
        except CheckpointNotFoundError:
            return
        if opened.hold.locked:
            self.readers.append((step, opened))
            self.world.held[step] += 1
            self.world.counts["reads"] += 1

    def _allowed(self, actor: int, action: Callable[[], object], *errors: type[DcpEngineError], claims: bool = False) -> None:
        """Does something that may fail in the ways that it says, and be fenced off where a newer epoch exists."""
        epoch = self.actors[actor].epoch
        try:
            action()
        except (DcpEngineError, CheckpointException) as failure:
            error = failure.failures[0][0] if isinstance(failure, CheckpointException) else failure
            if isinstance(error, FencedError):
                self.world.counts["fenced"] += 1
                if not claims and epoch >= self._newest_epoch():
                    raise BrokenPromise(f"{self.actors[actor].name} has the newest epoch, {epoch}, and was refused") from failure
            elif not isinstance(error, errors):
                raise

    def _newest_epoch(self) -> int:
        return max(int(name) for name in os.listdir(os.path.join(self.place, ".epochs")))

    def _check_reader(self, step: int, opened: OpenCheckpoint) -> None:
        there = open_checkpoint(self.root.path_of(step))
        there.hold.release()
        if there.marker != opened.marker:
            raise BrokenPromise(f"step {step} was replaced while it was read")
        check_whole(opened)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without waits for who retires, of which nothing comes in one thread, and without a log that nobody reads."""
    patience, holds._PATIENCE_SECS = holds._PATIENCE_SECS, 0.0
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        holds._PATIENCE_SECS = patience
        logging.disable(logging.NOTSET)


def run(*, full: bool, seed: int, workers: int = 1, num_examples: int | None = None) -> Outcome:
    """Runs the machine.

    Args:
        full: many more runs.
        seed: of what hypothesis draws.
        workers: not used: one process stands for all.
        num_examples: runs of the machine, if not as many as usual.
    """
    began = time.monotonic()
    Writers.totals.clear()
    options = settings(
        max_examples=num_examples or (_FULL if full else _QUICK),
        stateful_step_count=_NUM_RULES,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    bad: tuple[str, ...] = ()
    with _quiet():
        try:
            run_state_machine_as_test(_seeded(seed), settings=options)
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            bad = ("\n".join([f"{type(error).__name__}: {error}", *notes]),)
    counts = Writers.totals
    points = counts["interleaved"] + counts["killed"] + counts["clock jumps"]
    return Outcome(part=PART, points=points, seed=seed, facts=dict(sorted(counts.items())), bad=bad, secs=time.monotonic() - began)


def _seeded(number: int) -> type[Writers]:
    machine: type[Writers] = seed(number)(Writers)
    return machine
