"""``ReshardLoadPlanner``: any saved layout into any wanted one, with nothing silently different."""

from __future__ import annotations

import io
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_engine.errors import InvalidOptionError, PlanError, UnsupportedTensorError, UsageError
from dcp_engine.garbage import without_gc
from dcp_engine.planners.build import build_state, collapse_containers
from dcp_engine.planners.catalogue import Catalogue, Entry, read_catalogue
from dcp_engine.planners.dtype_policy import DtypePolicy, check_policy, is_exact
from dcp_engine.planners.load_chunks import items_of_tensors
from dcp_engine.planners.load_items import LeanLoadPlan, object_item, with_items
from dcp_engine.planners.load_object import load_object
from dcp_engine.planners.load_report import Cast, LoadReport
from dcp_engine.planners.load_run import LoadRun
from dcp_engine.planners.load_whole import overrides, take_whole
from dcp_engine.planners.local_shards import LocalTensor, describe, is_tensor_like
from dcp_engine.planners.materialise import Materialiser, is_meta
from dcp_engine.planners.misfits import Misfit, check_dtype, check_kind, check_shape, raise_misfits
from dcp_engine.planners.rename import Rename, compile_rename, rename_param_names
from dcp_engine.planners.selection import Selection
from dcp_engine.planners.strictness import Strictness, Verdict, judge, listed, report_keys
from dcp_engine.planners.ties import TieCheck, find_ties
from dcp_engine.planners.tree import assign, flatten
from dcp_engine.stored_chunks import stored_chunks_of
from dcp_engine.stored_tensors import StoredTensors, stored_tensors_of
from dcp_engine.types import EngineMetadata

__all__ = ["ReshardLoadPlanner"]

logger = logging.getLogger(__name__)

_CALLS_OF_PLANS = ("create_local_plan", "create_global_plan")
_CALLS_OF_TENSORS = ("lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor", "finish_plan")


class ReshardLoadPlanner(DefaultLoadPlanner):
    """Plans a load of any stored boxes into any wanted ones, and refuses or reports whatever differs.

    Calls by DCP, in order, and the ranks that run each:

    1. ``set_up_planner`` (all ranks): flattens the state; with ``build_from_metadata`` builds it first.
    2. ``create_local_plan`` (all ranks): gives meta tensors memory, checks kinds, shapes and dtypes, intersects wanted with stored boxes.
    3. ``create_global_plan`` (coordinator): decides over the keys of all ranks together which are missing or unexpected.
    4. ``finish_plan`` (all ranks): learns that decision; :attr:`report` is there from now on.
    5. ``resolve_tensor``, ``commit_tensor``, ``load_bytes`` (all ranks, once an item, from any thread).

    A state that was only partly loaded when an error is raised is undefined. ``lookup_tensor`` (whole box of this rank) and
    ``transform_tensor`` (part of it that an item fills) are DCP's extension points and keep their meaning in subclasses.

    Args:
        strict: whether missing and unexpected keys are errors: for all, or per component (``{"model": True, "optimizer": False}``;
            components not named are strict). Where they are not, missing keys stay as they are in the state and unexpected ones are
            ignored; both are in :attr:`report` and in one warning of the log. A parameter's optimizer state that is there in part is an
            error always.
        rename: applied to each key **of the checkpoint** to obtain the state's key: prefixes and their replacements (the longest that ends
            at the end of a path element, once), or a function of any string, such as ``strip("module.", "_orig_mod.")``. The parameter
            names that an optimizer's groups list are renamed alike.
        dtype: ``"refuse"``: a stored dtype other than the state's is an error. ``"cast"``: real floats are converted, to the nearest value,
            ties to even; integers, booleans and complex numbers never are (:mod:`dcp_engine.planners.dtype_policy`).
        keys: globs over the state's keys, ``*`` also matching dots; ``"model"`` stands for all below it. Only these are loaded; all else is
            neither touched nor missing nor unexpected. A pattern that selects nothing in the checkpoint is an error.
        build_from_metadata: the state handed in is an empty dict, which is filled with all that is stored, or what ``keys`` selects:
            containers with their exact types where our planner saved them (plain dicts and lists where DCP's did, where keys are renamed,
            or where part of a sequence is selected), whole tensors on every rank. Take it from :attr:`built` after ``dcp.load({}, ...)``.
        components: glob of keys -> component, before the well-known names, as given to the writer.
        device: where meta tensors without a mesh and built tensors go. ``None``: the process group's device for the former, torch's default
            device for the latter.

    Raises:
        InvalidOptionError: an option is out of range.

    Ties: where two keys of the state are one tensor, the checkpoint is read once for both if it has them tied or has one of them only; if
    it has two different values, that is an error. Where the checkpoint has them tied and the state does not, both are filled.

    Thread-safety: one load at a time; calls of step 5 from any number of threads.
    """

    accepts_encoded_objects: ClassVar[bool] = True
    """Tells our reader to hand over :class:`dcp_engine.types.EncodedObject` as it is stored."""

    def __init__(
        self,
        *,
        strict: bool | Mapping[str, bool] = True,
        rename: Rename | None = None,
        dtype: DtypePolicy = "refuse",
        keys: Sequence[str] | None = None,
        build_from_metadata: bool = False,
        components: Mapping[str, str] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(flatten_state_dict=True, flatten_sharded_tensors=False, allow_partial_load=strict is not True)
        self.metadata: Metadata | None = None
        self._strictness = Strictness(strict, components)
        self._rename = compile_rename(rename)
        self._policy = check_policy(dtype)
        self._selection = Selection(keys)
        self._builds = build_from_metadata
        self._device = device
        self._lock = threading.Lock()
        self._load = LoadRun()

    @property
    def report(self) -> LoadReport:
        """What the last load did on this rank.

        Raises:
            UsageError: no load has got as far as ``finish_plan``.
        """
        if self._load.report is None:
            raise UsageError("there is no report before a load", remedy="call dcp.load(..., planner=planner) first")
        return self._load.report

    @property
    def built(self) -> dict[str, Any]:
        """The state that ``build_from_metadata`` made. ``dcp.load`` itself gives back only keys that the dict it was called with had.

        Raises:
            UsageError: nothing was built.
        """
        if not self._builds or self._load.report is None:
            raise UsageError("no state was built", remedy="pass build_from_metadata=True, and load first")
        return self.original_state_dict

    # -- DCP's calls ------------------------------------------------------------------------------------------------------

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Flatten the state, under the names and paths that DCP gives it; build it first where that was asked for.

        Raises:
            InvalidOptionError: the state to build is not empty.
            DuplicateKeyError: two paths of the state have one key.
        """
        self._load = LoadRun()
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        if self._builds:
            if state_dict:
                raise InvalidOptionError("build_from_metadata fills an empty dict", found=f"a state with {len(state_dict)} entries")
            self.state_dict, self.mappings = build_state(state_dict, self._metadata(), self._catalogue(), self._device, self._selection)
        else:
            with without_gc():
                flat = flatten(state_dict)
            self.state_dict, self.mappings = dict(flat.leaves), dict(flat.paths)

    def create_local_plan(self) -> LoadPlan:
        """Read items for all that this rank wants, in the state's order, and its keys for the coordinator.

        Raises:
            KindMismatchError, ShapeMismatchError, DtypeMismatchError: listing all offenders.
            UnsupportedTensorError: a tensor of the state that cannot be loaded into.
            CorruptCheckpointError: stored chunks do not cover a tensor.
            DuplicateKeyError: two keys of the checkpoint get one name.
            KeyMismatchError: ``keys`` selects nothing.
        """
        with without_gc():
            return self._local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The same plans, with what is left alone on all ranks.

        Raises:
            KeyMismatchError: one error for all ranks, with the complete lists.
            RankDisagreementError: ranks see checkpoints with different keys.
            PlanError: a rank used another kind of planner.
        """
        assert self._load.catalogue is not None
        verdict = judge(self._load.catalogue, [plan.planner_data for plan in global_plan], self._strictness)
        if verdict.missing or verdict.unexpected:
            logger.warning("keys were left alone, as strict= allows: %s", listed(verdict))
        return [replace(plan, planner_data=verdict) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Complete :attr:`report`.

        Raises:
            PlanError: the coordinator used another planner, so that nobody judged the keys; or items were changed on their way.
        """
        verdict = new_plan.planner_data
        if not isinstance(verdict, Verdict):
            raise PlanError(
                "the plan that came back says nothing about missing and unexpected keys",
                expected="the plan of a ReshardLoadPlanner on the coordinator",
                found=f"planner_data of type {type(verdict).__name__}",
                remedy="pass the same kind of planner to dcp.load on every rank, and keep LoadPlan.planner_data in subclasses",
            )
        load = self._load
        assert load.catalogue is not None
        entries = load.catalogue.entries
        new_plan = with_items(new_plan, load.items)
        load.items = []
        load.report = LoadReport(
            loaded=load.loaded,
            missing=verdict.missing,
            unexpected=verdict.unexpected,
            cast=tuple(load.casts.values()),
            renamed=tuple((entries[key].key, key) for key in load.loaded if entries[key].key != key) if self._rename else (),
            num_tensor_bytes=load.num_tensor_bytes,
        )
        # Readers fill the memory itself, past torch: without this, autograd and whoever caches by version would not know of it.
        increment_version([shard.tensor for target in load.targets.values() for shard in target.shards])
        if load.whole is not None:
            increment_version(load.whole.reads.tensors)
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object in its place in the caller's own containers.

        Raises:
            UntrustedDataError: bytes of a foreign writer that ``torch.load(weights_only=True)`` does not take.
            MalformedCheckpointError: bytes of ours that do not decode.
        """
        key = read_item.dest_index.fqn
        found = load_object(key, value)
        if self._rename is not None:
            found = rename_param_names(read_item.storage_index.fqn, found, self._rename)
        with self._lock:  # a tuple is rebuilt for each of its elements
            self.state_dict[key] = found
            assign(self.original_state_dict, self.mappings[key], found)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """This rank's whole box at ``index.offset``, detached, sharing the state's memory."""
        target = self._load.target(index.fqn)
        if target is None:
            return super().lookup_tensor(index)
        offset = (0,) * len(target.global_shape) if index.offset is None else index.offset
        number = index.index
        if number is None or not 0 <= number < len(target.shards) or target.shards[number].offsets != offset:
            number = next((number for number, shard in enumerate(target.shards) if shard.offsets == offset), None)
            if number is None:
                raise UsageError(
                    "this rank's state has no box there",
                    tensor=index.fqn,
                    expected=f"one of {[list(shard.offsets) for shard in target.shards]}",
                    found=list(offset),
                )
        return target.shards[number].tensor

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory to fill: the state's own, or a temporary of the stored dtype where the value is cast or only compared."""
        target: torch.Tensor = self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))
        key = read_item.dest_index.fqn
        cast = self._load.casts.get(key)
        dtype = target.dtype if cast is None else cast.stored
        if dtype == target.dtype and not self._load.tie_check.is_later(key):
            return target
        with self._lock:
            self._load.staged[_identity(read_item)] = target
        return torch.empty(target.shape, dtype=dtype, device=target.device)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Convert a temporary into the state.

        Raises:
            ReplicaMismatchError: keys that are one tensor in the state have different values in the checkpoint.
        """
        key = read_item.dest_index.fqn
        with self._lock:
            target = self._load.staged.pop(_identity(read_item), tensor)
        if target is not tensor and not self._load.tie_check.is_later(key):
            target.detach().copy_(tensor)
        self._load.tie_check.committed(key, target, tensor)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _metadata(self) -> Metadata:
        if self.metadata is None:
            raise UsageError("a load planner needs the checkpoint's metadata", remedy="pass it to set_up_planner")
        return self.metadata

    def _catalogue(self) -> Catalogue:
        return read_catalogue(self._metadata(), self._rename, self._selection)

    def _local_plan(self) -> LoadPlan:
        load = self._load = LoadRun()
        load.catalogue = catalogue = self._catalogue()
        collapse_containers(self.original_state_dict, self.state_dict, self.mappings, catalogue, self._selection)
        wanted = list(self.state_dict) if self._selection.is_all else [key for key in self.state_dict if self._selection(key)]
        present = [key for key in wanted if key in catalogue.names]
        absent = [key for key in wanted if key not in catalogue.names]
        stored = self._columns()
        load.whole, left = (None, present) if stored is None else take_whole(stored, self.state_dict, present)
        self._materialise(left, absent)
        raise_misfits(self._take_targets(left))
        if load.whole is not None and (tied := load.whole.sharing(load.targets.values())):
            load.whole = load.whole.without(tied)
            raise_misfits(self._take_targets(tied))
            left += tied
        items = self._items(left, find_ties(load.targets.values()))
        load.items = items if load.whole is None else load.whole.items(items, self._metadata().state_dict_metadata)
        load.loaded = tuple(present)
        report = report_keys(catalogue, set(present), self._missing(absent))
        plan = LeanLoadPlan if self._may_be_lean() else LoadPlan
        return plan(cast("list[ReadItem]", load.items), planner_data=report)

    def _may_be_lean(self) -> bool:
        """Whether nobody but us looks at items on their way: the reader is ours, and no subclass does more than we do."""
        return isinstance(self.metadata, EngineMetadata) and not overrides(self, ReshardLoadPlanner, _CALLS_OF_PLANS)

    def _columns(self) -> StoredTensors | None:
        """The checkpoint by columns, if no subclass or patch has a say in how a tensor is planned, looked up or filled."""
        ours = self._rename is None and self._may_be_lean() and not overrides(self, ReshardLoadPlanner, _CALLS_OF_TENSORS)
        return stored_tensors_of(self.metadata) if ours else None

    def _materialise(self, present: Sequence[str], absent: Sequence[str]) -> None:
        """Memory for what will be loaded, and for absent keys tied to it; other meta tensors stay as they are."""
        give_memory = Materialiser(self._device)
        for keys, only_known in ((present, False), (absent, True)):
            for key in keys:
                value = self.state_dict[key]
                if is_meta(value) and not (only_known and not give_memory.knows(value)):
                    self.state_dict[key] = memory = give_memory(key, value)
                    assign(self.original_state_dict, self.mappings[key], memory)

    def _take_targets(self, present: Sequence[str]) -> list[Misfit]:
        """Where each tensor goes, and all that does not fit."""
        load = self._load
        assert load.catalogue is not None
        misfits: list[Misfit | None] = []
        for key in present:
            entry, value = load.catalogue.entries[key], self.state_dict[key]
            misfit = check_kind(key, value, entry)
            if misfit is not None or not isinstance(entry.stored, TensorStorageMetadata):
                misfits.append(misfit)
                continue
            target = describe(key, value, loading=True)
            if target is None:  # outside the tensor's mesh
                continue
            load.targets[key] = target
            stored = entry.stored.properties.dtype
            if target.dtype != stored:
                misfits.append(check_dtype(key, target.dtype, entry, self._policy))
                if misfits[-1] is None:
                    load.casts[key] = Cast(key, stored, target.dtype, is_exact(stored, target.dtype))
            misfits.append(check_shape(key, target.global_shape, entry))
        return [misfit for misfit in misfits if misfit is not None]

    def _missing(self, absent: Sequence[str]) -> list[str]:
        """Absent keys, without those that are one tensor with a key that is loaded."""
        others: list[LocalTensor | None] = []
        for key in absent:
            value = self.state_dict[key]
            if is_tensor_like(value) and not is_meta(value):
                with suppress(UnsupportedTensorError):  # it stays as it is: no reason to refuse it
                    others.append(describe(key, value, loading=True))
        if not others:
            return list(absent)
        targets = [*self._load.targets.values(), *self._load.whole_targets()]
        ties = find_ties([*targets, *filter(None, others)])
        loaded = {ties.get(target.key, target.key) for target in targets}
        return [key for key in absent if ties.get(key, key) not in loaded]

    def _items(self, present: Sequence[str], ties: Mapping[str, str]) -> list[ReadItem]:
        load = self._load
        assert load.catalogue is not None
        entries, items = load.catalogue.entries, list[ReadItem]()
        reads: list[tuple[LocalTensor, Entry]] = []
        apart: dict[str, str] = {}
        for key in present:
            entry = entries[key]
            if isinstance(entry.stored, BytesStorageMetadata):
                items.append(object_item(key, entry.owner))
                continue
            target = load.targets.get(key)
            if target is None:
                continue
            first = ties.get(key)
            if first in load.targets:
                if entries[first].owner == entry.owner:
                    continue  # read once into the memory that both share
                apart[key] = first
            reads.append((target, entry))
            num_elements = sum(math.prod(shard.sizes) for shard in target.shards)
            load.num_tensor_bytes += num_elements * entry.stored.properties.dtype.itemsize
        load.num_tensor_bytes += 0 if load.whole is None else load.whole.num_bytes
        tensors = items_of_tensors(reads, stored_chunks_of(self._metadata()))
        load.tie_check = TieCheck(apart, {target.key: len(some) for (target, _), some in zip(reads, tensors, strict=True)})
        return list(chain(items, *tensors))


def _identity(read_item: ReadItem) -> object:
    # The number of a box does not take part in the comparison of indices.
    return read_item, read_item.dest_index.index
