"""``TrainState``: everything that makes the next training step what it is, as one ``Stateful``."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from dcp_engine.errors import InvalidOptionError, KeyMismatchError
from dcp_engine.planners.load import ReshardLoadPlanner
from dcp_engine.train_state.accumulation import SHARED, blank_grads, check_cycle, check_grads, check_policy, grads_state, load_grads
from dcp_engine.train_state.counters import Counters
from dcp_engine.train_state.differences import Difference, differences
from dcp_engine.train_state.extras import check_extra, extra_state, load_extra
from dcp_engine.train_state.labels import check_enabled, check_labels, check_stateful, join, labelled, nest, part_of, require_type
from dcp_engine.train_state.models import load_model_state, model_state, parameter_names
from dcp_engine.train_state.optimizers import check_optimizer, check_optimizer_state, load_optimizer_state, optimizer_state
from dcp_engine.train_state.packed import pack, unpack
from dcp_engine.train_state.per_rank import NOTHING, PerRank, choose, name_of_rank, rank_of_name, ranks_to_read
from dcp_engine.train_state.report import Moved, Resized, TrainStateReport
from dcp_engine.train_state.rng import Generators
from dcp_engine.train_state.scheduling import (
    OptimizerCount,
    SchedulerCount,
    check_count,
    check_optimizer_count,
    counts_of,
    scheduler_disagreements,
    scheduler_positions,
)
from dcp_engine.train_state.stored import Stored, stored_in

__all__ = ["TrainState"]

logger = logging.getLogger(__name__)


class TrainState:
    """Model, optimizers, schedulers, scaler, progress, data, random numbers, averaged weights and extras of a training run.

    A ``Stateful`` of ``torch.distributed.checkpoint``::

        state = TrainState(model, optimizer, schedulers=scheduler)
        dcp.save({"state": state}, storage_writer=ShardWriter(path))
        state.load(ShardReader(path))                # or dcp.load({"state": state}, ...), on as many ranks as saved it

    Under the key ``"state"`` or ``"app"`` model, optimizer, averaged weights, gradients and extras have files of their own
    (``model-00000.shard``), and what is small shares ``state-00000.shard``. Saved with ``state.state_dict()`` as the whole, each component
    has its own: ``rng-00000.shard``. Under any other key all of it is one component.

    One object, a list or a dict of them is taken for most arguments; the names of a dict, or ``0``, ``1``, ... become part of the keys.

    Args:
        model: plain, compiled, DDP, FSDP2, tensor-parallel. A list: parts of one model (a pipeline's), which keep the whole's names.
            A dict: several models.
        optimizers: of the model's parameters.
        schedulers: of the optimizers, or anything with ``state_dict`` and ``load_state_dict``.
        scaler: a ``torch.amp.GradScaler``.
        counters: progress. None: a fresh one, at :attr:`counters`.
        data: loaders, samplers: anything with ``state_dict`` and ``load_state_dict``. In a :class:`PerRank` where the ranks' differ.
        ema: averaged weights: a module, or anything with ``state_dict`` and ``load_state_dict``.
        extras: name -> module, ``PerRank``, dict, or anything with ``state_dict`` and ``load_state_dict``.
        rng: whether the random number generators of every rank belong to the state.
        generators: name -> ``torch.Generator`` besides the global ones.
        numpy_generators: name -> ``numpy.random.Generator`` besides the global one.
        grads: a save inside an accumulation cycle, as ``counters.micro_step`` tells: ``"refuse"``: is an error; ``"defer"``: is an error,
            and :meth:`may_save` says False until the cycle is over; ``"save"``: holds the gradients.
        scheduler_counts: what one step of a scheduler stands for: ``"applied"`` or ``"attempted"`` updates, or an ``"epoch"``. None: any of
            them will do. See :meth:`disagreements`.
        optimizer_counts: what one step of an optimizer stands for: an ``"applied"`` update. None: no number that the counters have, as in
            loops that step their optimizers at rhythms of their own.
        process_group: whose ranks the per-rank values are of. None: the default group, or a single process where there is none.

    Raises:
        InvalidOptionError: an object of the wrong kind, or an optimizer over parameters that are not the model's; names the argument.
        DuplicateKeyError: two parameters under one name.

    Attributes:
        counters: progress of the run.
        scheduler_counts, optimizer_counts: as they were given.
        report: of the last load; None before one.

    Thread-safety: none. No method communicates with other ranks but :meth:`load`.
    """

    def __init__(
        self,
        model: Any = None,
        optimizers: Any = None,
        *,
        schedulers: Any = None,
        scaler: Any = None,
        counters: Counters | None = None,
        data: Any = None,
        ema: Any = None,
        extras: Mapping[str, Any] | None = None,
        rng: bool = True,
        generators: Mapping[str, torch.Generator] | None = None,
        numpy_generators: Mapping[str, Any] | None = None,
        grads: str = "refuse",
        scheduler_counts: SchedulerCount | None = None,
        optimizer_counts: OptimizerCount | None = "applied",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        require_type(counters, Counters, "counters", "None or Counters()")
        require_type(extras, Mapping, "extras", "None or a dict of objects by name")
        require_type(rng, bool, "rng", "True or False")
        modules = labelled(model, argument="model", is_one=lambda value: isinstance(value, nn.Module))
        self._parts = [(f"{label}." if isinstance(model, Mapping) else "", module) for label, module in modules.items()]
        self._optimizers = labelled(optimizers, argument="optimizers", is_one=lambda value: isinstance(value, Optimizer))
        self._schedulers = _stateful(schedulers, "schedulers")
        self._scaler = _stateful(scaler, "scaler")
        self._data = _stateful(data, "data")
        self._ema = labelled(ema, argument="ema", is_one=_is_object)
        self._extras = dict(extras or {})
        check_labels(self._extras, argument="extras")
        for argument, parts in (("ema", self._ema), ("extras", self._extras)):
            for label, part in parts.items():
                check_extra(part, argument=f"{argument}[{label!r}]" if label else argument)
        self.counters = Counters() if counters is None else counters
        self._grads = check_policy(grads)
        self.scheduler_counts = check_count(scheduler_counts)
        self.optimizer_counts = check_optimizer_count(optimizer_counts)
        self._group = process_group
        self._rng = PerRank(Generators(generators, numpy_generators)) if rng else None
        self._stored: Stored | None = None
        self._blanks: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.report: TrainStateReport | None = None
        self._names()

    @property
    def components(self) -> tuple[str, ...]:
        """Names of what a full state has, as the first elements of its keys; gradients, which only some saves hold, left out."""
        return tuple(name for name, parts in self._objects().items() if parts)

    def parts(self, component: str) -> dict[str, Any]:
        """The live objects of a component by label, ``""`` for one that stands alone; empty where the state has no such component.

        Those of the model are numbered: ``"0"``, ``"1"``, ...
        """
        return self._objects().get(component, {})

    # -- saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as of now: component -> its part. Tensors are the live ones: whoever keeps the result must copy them.

        Raises:
            StateError: the save falls inside an accumulation cycle, see ``grads``.
            UnencodableObjectError: a value cannot be stored; names its key.
            InvalidOptionError, DuplicateKeyError: as the constructor, of what was changed since.
        """
        stored, names = self._stored, self._names()
        if stored is None:
            check_cycle(self.counters, self._grads, unscaled=bool(self._scaler) and self.counters.grads_unscaled)
        state: dict[str, Any] = {}
        if self._parts:
            state["model"] = model_state(self._parts)
        if self._optimizers:
            state["optimizer"] = nest({label: self._optimizer_state(label, names) for label in self._optimizers})
        for component, parts in self._packed_components():
            if parts:
                state[component] = nest({label: self._packed(part, join(component, label)) for label, part in parts.items()})
        state["progress"] = {**self.counters.state_dict(), "world_size": self._world_size()}
        for component, parts in (("ema", self._ema), ("extra", self._extras)):
            if parts:
                state[component] = nest({label: self._extra(part, join(component, label)) for label, part in parts.items()})
        if self._rng is not None:
            state["rng"] = self._packed(self._rng, "rng")
        if stored is not None and stored.grads:
            state["grads"] = blank_grads(names, stored.grads, rank=self._rank(), world_size=self._world_size())
            self._blanks.update({id(grad): grad for grads in state["grads"].values() for grad in grads.values()})
        elif stored is None and self.counters.in_cycle:
            state["grads"] = grads_state(names, rank=self._rank(), world_size=self._world_size())
        return state

    def may_save(self) -> bool:
        """Whether a save now would hold the whole state: not inside an accumulation cycle, unless gradients are saved."""
        return self._grads == "save" or not self.counters.in_cycle

    @property
    def defers_saves(self) -> bool:
        """Whether a save inside an accumulation cycle is to be moved to its end."""
        return self._grads == "defer"

    # -- loading ----------------------------------------------------------------------------------------------------------

    def load(self, reader: StorageReader, *, under: str = "state", planner: LoadPlanner | None = None) -> TrainStateReport:
        """Load a checkpoint of any number of ranks, into a state that is fresh or not. All ranks call it alike.

        Args:
            reader: of the checkpoint.
            under: the key that the state had in the dict which was saved; empty where ``state_dict()`` was the whole.
            planner: None: a strict ``ReshardLoadPlanner``.

        Returns:
            What was found, also at :attr:`report`.

        Raises:
            CheckpointException: of DCP, with the ranks' errors in ``failures``: keys, shapes and dtypes that differ.
            StateError: as :meth:`load_state_dict`.
            InvalidOptionError: ``reader`` is none.
        """
        if not isinstance(reader, StorageReader):
            raise InvalidOptionError("reader is no reader", expected="a StorageReader, as in ShardReader(path)", found=repr(reader)[:300])
        self.prepare(reader, under=under)
        planner = ReshardLoadPlanner() if planner is None else planner
        try:
            if under:
                load({under: self}, storage_reader=reader, planner=planner, process_group=self._group)
            else:
                whole = self.state_dict()
                load(whole, storage_reader=reader, planner=planner, process_group=self._group)
                self.load_state_dict(whole)
        finally:
            self._stored = None
        assert self.report is not None
        return self.report

    def prepare(self, stored: StorageReader | Metadata | Iterable[str], *, under: str = "state") -> None:
        """Make the next :meth:`state_dict` the one to load this checkpoint into.

        Keys of a state depend on the run that saved it: there are as many per-rank values as there were ranks, and slots of those
        parameters that the optimizer had touched. ``dcp.load`` asks for the state before it knows the checkpoint, so it has to be told
        here where they differ.

        Args:
            stored: the checkpoint's reader, or its metadata, or its keys.
            under: as for :meth:`load`.

        Raises:
            InvalidOptionError: ``stored`` is none of these, a path for instance.
        """
        if isinstance(stored, str | bytes | os.PathLike) or not isinstance(stored, StorageReader | Metadata | Iterable):
            raise InvalidOptionError(
                "this is no checkpoint to prepare for",
                expected="a StorageReader, as in ShardReader(path), its metadata, or keys",
                found=repr(stored)[:300],
            )
        if isinstance(stored, StorageReader):
            stored = stored.read_metadata()
        keys = stored.state_dict_metadata if isinstance(stored, Metadata) else stored
        self._stored = stored_in(keys, under=under, optimizers=self._optimizers, parameters=self._names().values())

    def forget(self) -> None:
        """No load comes after :meth:`prepare`, because it failed: the next :meth:`state_dict` is one to save."""
        self._stored = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state that :meth:`state_dict` gave, here or elsewhere; :attr:`report`, and the log, say what was found.

        Everything is checked before anything is changed. Tensors of other states are copied.

        Raises:
            KeyMismatchError: a component, parameter or slot is missing or was not expected.
            StateError kinds: what is stored does not fit.
            InvalidOptionError: it is no state.
        """
        for line in self.take(state_dict).lines():
            logger.warning("the restored training state: %s", line)

    def take(self, state_dict: Mapping[str, Any]) -> TrainStateReport:
        """:meth:`load_state_dict` for a caller that tells what was found itself."""
        if not isinstance(state_dict, Mapping):
            raise InvalidOptionError("this is no state", expected="what state_dict() gave", found=repr(state_dict)[:300])
        self._stored = None
        names = self._names()
        self._check_components(state_dict)
        for label, optimizer in self._optimizers.items():
            check_optimizer_state(optimizer, names, part_of(state_dict["optimizer"], label), key=join("optimizer", label))
        values, resized = self._unpack(state_dict)
        grads = state_dict.get("grads", {})
        check_grads(grads, world_size=self._world_size(), saved_world_size=state_dict["progress"]["world_size"])

        if self._parts:
            load_model_state(self._parts, state_dict["model"])
        self.counters.load_state_dict({name: value for name, value in state_dict["progress"].items() if name != "world_size"})
        moved, unstarted = self._load_optimizers(names, state_dict.get("optimizer"))
        for component, parts in (("ema", self._ema), ("extra", self._extras)):
            for label, part in parts.items():
                if not _is_per_rank(part):
                    load_extra(part, part_of(state_dict[component], label), key=join(component, label))
        load_grads(names, {**grads.get(SHARED, {}), **grads.get(name_of_rank(self._rank()), {})}, is_ours=self._is_ours)
        for part, value in values:
            part.restore(value) if isinstance(part, PerRank) else part.load_state_dict(value)
        self.report = TrainStateReport(
            components=tuple(state_dict),
            moved=tuple(moved),
            unstarted=tuple(unstarted),
            resized=tuple(resized),
            disagreements=self.disagreements(),
        )
        return self.report

    # -- checks -----------------------------------------------------------------------------------------------------------

    def disagreements(self) -> tuple[str, ...]:
        """Schedulers that do not stand where the counters say training does, in words."""
        return scheduler_disagreements(scheduler_positions(self._schedulers), counts_of(self.counters), self.scheduler_counts)

    def differences(self, other: TrainState | Mapping[str, Any]) -> tuple[Difference, ...]:
        """What of ``other`` (a state, or what its ``state_dict()`` gave) differs from this state, bit for bit, by component and key."""
        return differences(self.state_dict(), other.state_dict() if isinstance(other, TrainState) else other)

    # -- parts ------------------------------------------------------------------------------------------------------------

    def _names(self) -> dict[nn.Parameter, str]:
        """Anew each time: wrapping and freezing go on after this object was made."""
        names = parameter_names(self._parts)
        for label, optimizer in self._optimizers.items():
            check_optimizer(optimizer, names, argument=f"optimizers[{label!r}]" if label else "optimizers")
        return names

    def _objects(self) -> dict[str, dict[str, Any]]:
        return {
            "model": {str(number): module for number, (_, module) in enumerate(self._parts)},
            "optimizer": self._optimizers,
            **dict(self._packed_components()),
            "progress": {"": self.counters},
            "ema": self._ema,
            "extra": self._extras,
            "rng": {} if self._rng is None else {"": self._rng},
        }

    def _packed_components(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        return ("scheduler", self._schedulers), ("scaler", self._scaler), ("data", self._data)

    def _optimizer_state(self, label: str, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        started = None if self._stored is None else self._stored.started[label]
        state, blanks = optimizer_state(self._optimizers[label], names, key=join("optimizer", label), started=started)
        self._blanks.update({id(blank): blank for blank in blanks})
        return state

    def _load_optimizers(self, names: Mapping[nn.Parameter, str], stored: Any) -> tuple[list[Moved], list[str]]:
        moved: list[Moved] = []
        unstarted: list[str] = []
        for label, optimizer in self._optimizers.items():
            found = load_optimizer_state(
                optimizer, names, part_of(stored, label), label=label, key=join("optimizer", label), is_ours=self._is_ours
            )
            moved += found[0]
            unstarted += found[1]
        return moved, unstarted

    def _extra(self, part: Any, key: str) -> Any:
        return self._packed(part, key) if _is_per_rank(part) else extra_state(part, key=key)

    def _packed(self, part: Any, key: str) -> Any:
        """One packed value, or for a per-rank one this rank's (and while loading, all that it is to read) by their names."""
        if not isinstance(part, PerRank):
            return pack(part.state_dict(), key=key)
        rank = self._rank()
        mine = pack(part.state(), key=join(key, name_of_rank(rank)))
        saved = () if self._stored is None else self._stored.ranks.get(key, ())
        if not saved:
            return {name_of_rank(rank): mine}
        wanted = ranks_to_read(saved, rank=rank, world_size=self._world_size(), wants_all=part.on_resize is not None)
        return {name_of_rank(one): mine for one in wanted}

    def _unpack(self, state_dict: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], list[Resized]]:
        """The objects whose state is one value, with what each is to take up; generators last, since what comes before them may draw."""
        parts = [(name, label, part) for name, parts in self._packed_components() for label, part in parts.items()]
        parts += [("extra", label, part) for label, part in self._extras.items() if _is_per_rank(part)]
        parts += [] if self._rng is None else [("rng", "", self._rng)]
        values: list[tuple[Any, Any]] = []
        resized: list[Resized] = []
        for component, label, part in parts:
            key, stored = join(component, label), part_of(state_dict[component], label)
            if not isinstance(part, PerRank):
                value = unpack(stored, key=key)
                check_enabled(part, value, key=key)
                values.append((part, value))
                continue
            by_rank = {one: unpack(value, key=join(key, name)) for name, value in stored.items() if (one := rank_of_name(name)) is not None}
            value, report = choose(
                by_rank,
                key=key,
                rank=self._rank(),
                world_size=self._world_size(),
                saved_world_size=state_dict["progress"]["world_size"],
                on_resize=part.on_resize,
            )
            resized += [] if report is None else [report]
            values += [] if value is NOTHING else [(part, value)]
        return values, resized

    def _check_components(self, state_dict: Mapping[str, Any]) -> None:
        wanted = set(self.components)
        labels = [(component, label) for component, parts in (*self._packed_components(), ("ema", self._ema)) for label in parts if label]
        labels += [("optimizer", label) for label in self._optimizers if label] + [("extra", label) for label in self._extras]
        missing = wanted - state_dict.keys()
        missing |= {join(component, label) for component, label in labels if label not in state_dict.get(component, (label,))}
        unexpected = state_dict.keys() - wanted - {"grads"}
        if missing or unexpected:
            raise KeyMismatchError(
                "the stored training state has other components",
                missing=tuple(sorted(missing)),
                unexpected=tuple(sorted(unexpected)),
                found=f"missing {sorted(missing)}, unexpected {sorted(unexpected)}",
                remedy="pass TrainState the same objects as in the run that saved",
            )

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return self._blanks.get(id(tensor)) is tensor

    def _rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    def _world_size(self) -> int:
        return dist.get_world_size(self._group) if dist.is_initialized() else 1


def _stateful(value: Any, argument: str) -> dict[str, Any]:
    parts = labelled(value, argument=argument, is_one=_is_object)
    check_stateful({label: part for label, part in parts.items() if not _is_per_rank(part)}, argument=argument)
    return parts


def _is_object(value: Any) -> bool:
    """Neither a list nor a dict of objects, unless that has a state of its own."""
    return hasattr(value, "state_dict") or not isinstance(value, Mapping | list | tuple)


def _is_per_rank(value: Any) -> bool:
    return isinstance(value, PerRank)
