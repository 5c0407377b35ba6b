"""How a run comes back: which step, agreed on by all ranks, and the load of it; a damaged one is passed over, loudly."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from dcp_engine.background.failures import first_failure
from dcp_engine.checkpointer.choosing import ranked
from dcp_engine.checkpointer.options import CheckpointerOptions
from dcp_engine.checkpointer.parts import Parts
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.checkpointer.record import SaveRecord
from dcp_engine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpEngineError,
    InvalidOptionError,
    KeyMismatchError,
    RankDisagreementError,
    RankFailedError,
)
from dcp_engine.planners import LoadReport, ReshardLoadPlanner
from dcp_engine.storage import RunRoot, ShardReader
from dcp_engine.storage.step_info import StepInfo
from dcp_engine.storage.steps import find_steps

__all__ = ["Restored", "Restoring"]

logger = logging.getLogger(__name__)


@dataclass
class Phases:
    """Seconds by phase, in the order in which they began."""

    secs: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Adds what passes meanwhile."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.secs[name] = self.secs.get(name, 0.0) + time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Restored:
    """A step that was loaded.

    Attributes:
        info: of the checkpoint.
        record: what the checkpointer keeps in it.
        passed_over: newer steps that are damaged, and how.
        replaceable: steps that this run comes to again, and may replace: those, and ones that hold a part of a state only.
        loaded: what was read, by key; its tensors are the state's own.
        load_report: of the load planner, where it is one of ours.
        phases: name -> seconds.
    """

    info: StepInfo
    record: SaveRecord
    passed_over: tuple[tuple[int, str], ...]
    replaceable: frozenset[int]
    loaded: Mapping[str, Any]
    load_report: LoadReport | None
    phases: Phases


@dataclass(frozen=True, slots=True)
class _Look:
    """What the first rank of a root sees of a step; nothing of a rank that does not look. Crosses ranks by pickle."""

    info: StepInfo | None = None
    record: SaveRecord | None = None
    damage: DcpEngineError | None = None


class Restoring:
    """The restores of one rank. All ranks make the same calls.

    Args:
        root: to restore from.
        options: of the checkpointer.
        ranks: all of the job.
        members: those of them that have this root.

    Thread-safety: one thread.
    """

    def __init__(self, root: RunRoot, options: CheckpointerOptions, ranks: Ranks, members: Ranks) -> None:
        self._root = root
        self._options = options
        self._ranks = ranks
        self._members = members

    def order(self, step: int | str) -> tuple[list[int], frozenset[int]]:
        """The steps to try, the same on all ranks; and those that only some nodes hold."""
        self._ranks.require_whole_job()
        if isinstance(step, bool) or not (isinstance(step, int) or step in ("latest", "best")):
            raise InvalidOptionError("this is no step to restore", expected='"latest", "best" or a number', found=repr(step)[:300])
        there, lonely = self.steps()
        if step == "latest":
            return there[::-1], lonely
        if step == "best":
            return self.best_first(there), lonely
        if step not in there:
            raise CheckpointNotFoundError(
                "there is no such step",
                path=self._root.path,
                step=int(step),
                expected=f"one of {there}" if there else "a committed step",
                found=step,
                remedy="restore one of those, or the newest",
            )
        return [step], lonely

    def steps(self) -> tuple[list[int], frozenset[int]]:
        """The steps that are committed in every root of the job, ascending, the same on all ranks; and those that only some roots hold,
        of this rank's root. One whose COMPLETE is damaged was committed.

        Raises:
            CheckpointNotFoundError: each node has steps of its own, and none is common to all.
            RankDisagreementError: the root is not the same one on all ranks. StorageError kinds.
        """
        told = self._ranks.everyone_makes(lambda: self._committed() if self._members.is_first else None)
        roots = [steps for steps in told if steps is not None]
        common = set(roots[0]).intersection(*roots)
        if not common and any(roots):
            raise CheckpointNotFoundError(
                "the nodes hold no step that all of them have",
                path=self._root.path,
                found="; ".join(f"rank {rank}: {_listed(steps)}" for rank, steps in enumerate(told) if steps is not None),
                remedy="copy one node's steps to the others, or start afresh in another root",
            )
        if not common:
            self._agree_on(None)  # a run that begins afresh because one rank looks at another place would be the worst
        return sorted(common), frozenset(told[self._members.leader] or ()) - common

    def best_first(self, steps: Collection[int]) -> list[int]:
        """The steps that the metric of ``best`` is known of, the best first; the same on all ranks.

        Evaluations say it; where none of them has the metric, what each step was saved with.

        Raises:
            InvalidOptionError: there is no such option. CheckpointNotFoundError: the metric is known of none.
        """
        best = self._options.best
        if best is None:
            raise InvalidOptionError("there is no metric to go by", expected='Checkpointer(root, best=("loss", "min"))')
        order = self._ranks.first(lambda: ranked(self._root, steps, *best, storage_options=self._options.storage_options))
        if not order:
            raise CheckpointNotFoundError(
                f"no step has the metric {best[0]!r}",
                path=self._root.path,
                found=f"{_listed(sorted(steps))}, without it",
                remedy="record_evaluation() says it, or save(metadata={name: value})",
            )
        return order

    def restore(self, parts: Parts, order: Sequence[int], *, may_fall_back: bool, planner: LoadPlanner | None) -> Restored:
        """Load the first of some steps that is good.

        Args:
            parts: to load into.
            order: the steps, the same on all ranks.
            may_fall_back: take a later one of them where one is damaged, or holds only a part of the state.
            planner: None: a strict one.

        Raises:
            CorruptCheckpointError: as many as allowed are damaged; ``found`` has them all. The state is undefined.
            CheckpointNotFoundError: none of them is a whole state. Other kinds: see ``Checkpointer.restore``.
        """
        phases = Phases()
        damaged: list[tuple[int, DcpEngineError]] = []
        partial: list[int] = []
        for step in order:
            with phases.of("decide"):
                look = self._look(step)
            error = look.damage
            if error is None:
                assert look.info is not None
                assert look.record is not None
                missing = _missing(parts, look.record)
                if missing and may_fall_back:
                    partial.append(step)
                    continue
                if missing:
                    raise _is_partial(look.info, missing)
                used = ReshardLoadPlanner(keys=parts.keys_to_load) if planner is None else planner
                loaded, error = self._load(parts, look.info, used, phases)
                if error is None:
                    return Restored(
                        info=look.info,
                        record=look.record,
                        passed_over=tuple((one, str(why)) for one, why in damaged),
                        replaceable=frozenset([one for one, _ in damaged] + partial),
                        loaded=loaded,
                        load_report=used.report if isinstance(used, ReshardLoadPlanner) else None,
                        phases=phases,
                    )
            if not may_fall_back:
                raise error
            damaged.append((step, error))
            if self._ranks.is_first:
                logger.error("step %d cannot be restored, and the one before it is taken: %s", step, error)
            if len(damaged) > self._options.max_fallbacks:
                break
        raise self._nothing_good(damaged, partial)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _committed(self) -> tuple[int, ...]:
        found = find_steps(self._root.path, **self._options.of_root)
        return tuple(sorted(found.committed + found.damaged))

    def _look(self, step: int) -> _Look:
        """What the step is, told by the first rank of each root. Damage in one of them is one of all."""

        def look() -> _Look:
            if not self._members.is_first:
                return _Look()
            try:
                info = self._root.look(step)
                return _Look(info, SaveRecord.read(info.metadata, path=info.path))
            except (CorruptCheckpointError, CheckpointNotFoundError) as error:
                error.step = step if error.step is None else error.step
                return _Look(damage=error)

        told = self._ranks.everyone_makes(look)
        return next((one for one in told if one.damage is not None), told[self._members.leader])

    def _load(self, parts: Parts, info: StepInfo, planner: LoadPlanner, phases: Phases) -> tuple[dict[str, Any], DcpEngineError | None]:
        """Load one step: what was read, and what is wrong with the checkpoint, or None.

        Raises:
            DcpEngineError: anything else that is wrong, the same on all ranks.
        """
        loaded: dict[str, Any] = {}
        error: Exception | None = None
        try:
            with phases.of("decide"):
                self._agree_on(info)
            with phases.of("read"):
                loaded = self._read(parts, info, planner)
            with phases.of("apply"):
                parts.take(loaded)
        except CheckpointException as failure:
            error = _load_error(failure, info)
        except Exception as failure:  # noqa: BLE001  whatever it is, it is told to all ranks
            error = failure
        finally:
            parts.forget()
        try:
            self._ranks.agree(error)
        except (CorruptCheckpointError, CheckpointNotFoundError) as damage:
            damage.step = info.step if damage.step is None else damage.step
            return {}, damage
        return loaded, None

    def _agree_on(self, info: StepInfo | None) -> None:
        """All ranks of the root see this very checkpoint, or that there is none."""
        try:
            self._root.decide(self._members.group, choose=lambda: info)
        except RankDisagreementError as error:
            if not self._options.node_local:
                error.remedy = f"{error.remedy}; or, where each node has a root of its own, pass node_local=True"
            raise

    def _read(self, parts: Parts, info: StepInfo, planner: LoadPlanner) -> dict[str, Any]:
        group = self._members.group
        reader = ShardReader(info.path, process_group=group, **self._options.of_reader)
        template: dict[str, Any] = {}
        error: Exception | None = None
        try:
            template = parts.template(reader.read_metadata())
        except Exception as failure:  # noqa: BLE001  the others would wait for this rank in the load
            error = failure
        self._members.agree(error)
        load(template, storage_reader=reader, planner=planner, process_group=group)
        return template

    def _nothing_good(self, damaged: Sequence[tuple[int, DcpEngineError]], partial: Sequence[int]) -> DcpEngineError:
        if not damaged:
            return CheckpointNotFoundError(
                "there are steps, and none of them is a whole state",
                path=self._root.path,
                found=f"parts only: {_listed(partial)}",
                remedy="restore a part of the state with components=, or start afresh in another root",
            )
        error = CorruptCheckpointError(
            "no step could be restored",
            path=self._root.path,
            step=damaged[0][0],
            expected=f"a good one among the newest {self._options.max_fallbacks + 1}",
            found="; ".join(f"step {step}: {why}" for step, why in damaged),
            remedy="the state is undefined now: do not train with it. Repair the steps, or restore another one by its number",
        )
        error.__cause__ = damaged[-1][1]
        return error


def _missing(parts: Parts, record: SaveRecord) -> list[str]:
    """Components that are wanted, of a checkpoint that says that it holds only some."""
    if not record.is_partial:
        return []
    return [f"{key}.{name}" for key, names in parts.components.items() for name in names if name not in record.components.get(key, ())]


def _is_partial(info: StepInfo, missing: Sequence[str]) -> KeyMismatchError:
    return KeyMismatchError(
        "the step holds only a part of the state",
        path=info.path,
        step=info.step,
        missing=tuple(missing),
        found=f"no {', '.join(missing)}",
        remedy="restore another step, or name the components that are wanted",
    )


def _load_error(error: CheckpointException, info: StepInfo) -> DcpEngineError:
    rank, first = first_failure(error)
    if not isinstance(first, DcpEngineError):
        return RankFailedError("a rank failed to load", path=info.path, step=info.step, rank=rank, found=f"{type(first).__name__}: {first}")
    first.rank = rank if first.rank is None else first.rank
    return first


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    return (f"{len(steps)} steps, the last of them " if len(steps) > 5 else "step ") + ", ".join(map(str, steps[-5:]))
