"""``BalancedSavePlanner``: DCP's ``SavePlanner`` that writes replicas once and gives every rank about the same number of bytes."""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_engine.errors import InvalidOptionError, PlanError
from dcp_engine.garbage import without_gc
from dcp_engine.objects import encode_object
from dcp_engine.plan_columns import PlanColumns, PlanItems, RowMemory
from dcp_engine.planners.local_shards import LocalShard
from dcp_engine.planners.replicas import Choice, ReplicaPolicy
from dcp_engine.planners.save_cache import GlobalPlanCache, KnownPlan, LocalPlanCache, ReusedPlan
from dcp_engine.planners.save_choice import ChosenItems
from dcp_engine.planners.save_columns import plan_columns
from dcp_engine.planners.save_global import GlobalPlan, RankPlan, plan_globally
from dcp_engine.planners.save_local import LocalLayout, LocalPlanData, LocalState, PlanRef
from dcp_engine.planners.save_names import unite_names
from dcp_engine.planners.save_turns import SaveTurns
from dcp_engine.types import EncodedObject, EngineMetadata, EngineStorageMeta, PlannerData

__all__ = ["BalancedSavePlanner"]

DEFAULT_SPLIT_BYTES = 1 << 18

_CONTENT_CALLS = ("lookup_object", "transform_object", "resolve_data")
_PLAN_CALLS = ("create_local_plan", "create_global_plan", "finish_plan")
_NOT_PICKLED = frozenset(
    ("_local", "state_dict", "mappings", "plan", "global_plan", "metadata", "_cache", "_earlier", "_layout", "_global_cache", "_turns"),
)


class BalancedSavePlanner(DefaultSavePlanner):
    """Plans a save: replicas written once, bytes balanced over the ranks, large replicated tensors split over their replicas.

    Calls by DCP, in order, and the ranks that run each:

    1. ``set_up_planner`` (all ranks): takes the state. State of the previous save ends here.
    2. ``create_local_plan`` (all ranks): the boxes and objects that this rank holds, with digests of what others may hold too.
    3. ``create_global_plan`` (coordinator): compares replicas, drops all but one, shares out the bytes, checks that every tensor is
       covered exactly once.
    4. ``finish_plan`` (all ranks): takes the items that this rank is to write.
    5. ``resolve_data`` (all ranks, any thread, any number of times): an item's tensor, as a view on whatever device, or object.

    No rank is given a part that it does not hold. Two keys with one memory are stored once where the writer is ours.

    Subclasses extend it as they extend ``DefaultSavePlanner``. ``lookup_object(index)`` gives this rank's part of a key at the offset of
    one of its own boxes, ``transform_object(write_item, object)`` is applied to the piece that the item describes. Where either is
    overridden, ties are not looked for, since two keys may then be two values.

    Args:
        flatten_state_dict: traverse nested containers, with DCP's names. Otherwise every top-level value is one tensor or object.
        replica_policy: glob pattern of keys (``fnmatch`` rules, the first match wins) -> ``"lowest_rank"``: where replicas differ, take
            that of the lowest rank (BatchNorm's running statistics under DDP, say); ``"error"``, as for keys that match none: refuse.
        split_bytes: replicated tensors of at least this size may be split over their holders; at least 4.
        cache_plans: keep the plan, and while the state's layout is unchanged send only contents' digests to the coordinator. The cache is
            this instance's, and an error drops it: make or replace planners on all ranks together, one for each process group. Plans are
            made anew at every save where the writer is not ours or a subclass overrides calls 2 to 4, since either may look at the items.

    Raises:
        InvalidOptionError: an option is out of range.

    Thread-safety: one save at a time: of saves that overlap on one planner all but the newest fail. ``resolve_data`` may be called from any
    thread. Picklable; neither state nor cache is pickled.
    """

    _local: LocalState
    _layout: LocalLayout | None
    _cache: LocalPlanCache | None
    _earlier: LocalPlanCache | None
    _global_cache: GlobalPlanCache

    def __init__(
        self,
        *,
        flatten_state_dict: bool = True,
        replica_policy: Mapping[str, Choice] | None = None,
        split_bytes: int = DEFAULT_SPLIT_BYTES,
        cache_plans: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict=flatten_state_dict, enable_plan_caching=False)
        if isinstance(split_bytes, bool) or not isinstance(split_bytes, int) or split_bytes < 4:
            raise InvalidOptionError("split_bytes is not a size", expected="an int of at least 4", found=repr(split_bytes))
        self._policy = ReplicaPolicy(replica_policy)
        self._split_bytes = split_bytes
        self._cache_plans = cache_plans
        self._forget()

    # -- DCP's calls ------------------------------------------------------------------------------------------------------

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        """Take the state.

        Args:
            state_dict: the state; not changed. Its tensors are held until the next save.
            storage_meta: of the writer; an :class:`EngineStorageMeta` says that it is ours.
            is_coordinator: this rank makes the global plan.

        Raises:
            DuplicateKeyError: two paths of the state have one name. StateError kinds: a container that cannot be kept.
        """
        self._turns.begin()
        with without_gc():
            self._local = LocalState(state_dict, flattened=self.flatten_state_dict, engine=isinstance(storage_meta, EngineStorageMeta))
        self.state_dict = self._local.leaves
        self.mappings = dict(self._local.paths or {})
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """What this rank holds.

        Raises:
            UnsupportedTensorError: a tensor that cannot be stored. UnencodableObjectError: an object that the format cannot hold.
        """
        self.require_own_state()
        # Taken out, and put back by finish_plan: whatever fails in between, the next save plans afresh.
        cache, self._cache = self._cache if self._reuses_plans() else None, None
        with without_gc():
            self._local.describe()
            ties = self._local.ties() if self._local.engine and not self._overrides(_CONTENT_CALLS) else {}
            layout = self._local.layout(ties) if self._plans_columns() else None
            digests, object_bytes = self._local.contents(replicated=_num_ranks() > 1)
            self._layout = layout
            self._earlier = cache if cache is not None and layout is not None and cache.layout.same_as(layout) else None
            if self._earlier is not None:
                self.plan = SavePlan([], planner_data=LocalPlanData(digests, object_bytes, self._earlier.ref))
            else:
                data = LocalPlanData(digests, object_bytes, None, self._local.packed_skeleton(), ties, self._local.unheld())
                items: Any = self._local.items() if layout is None else PlanItems(layout.columns)
                self.plan = SavePlan(items, planner_data=data)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What every rank writes, and the description of the whole.

        Raises:
            ReplicaMismatchError: ranks hold different values under one key. PlanError: the ranks' parts do not cover a tensor exactly once.
        """
        cache, self._global_cache = self._global_cache, GlobalPlanCache()
        with without_gc():
            local = [cache.expand(rank, plan) for rank, plan in enumerate(all_plans)]
            known = cache.whole(all_plans)
            if known is not None and known.holds_for(local):
                plan_class: type[SavePlan] = ReusedPlan
            else:
                known = self._plan(local)
                plan_class = SavePlan
        keeps = self._reuses_plans()
        self.global_plan = [
            plan_class(
                cast(list[WriteItem], items),
                storage_data=plan.storage_data,
                planner_data=PlanRef(known.plan_id, rank, keeps),
                usable=plan.usable,
            )
            for rank, (items, plan) in enumerate(zip(known.made.items, all_plans, strict=True))
        ]
        self.metadata = self._describe(known)
        if keeps:
            cache.add(known)
            self._global_cache = cache
        return self.global_plan, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take what this rank is to write.

        Raises:
            PlanError: the coordinator used another planner, or its answer does not belong to this save.
        """
        self.require_own_state()
        ref = new_plan.planner_data
        reused = isinstance(new_plan, ReusedPlan)
        if not isinstance(ref, PlanRef) or (reused and (self._earlier is None or self._earlier.ref != ref)):
            raise PlanError(
                "the plan that came back was not made for what this rank sent",
                expected="the plan of a BalancedSavePlanner on the coordinator",
                found=f"planner_data of type {type(ref).__name__}",
                remedy="pass the same kind of planner to dcp.save on every rank",
            )
        items: Any = self._earlier.items if reused and self._earlier is not None else new_plan.items
        if isinstance(items, ChosenItems) and not items.looked_at and self._layout is not None:
            items = PlanItems(items.choice.of(self._layout.columns))
        if ref.kept and self._reuses_plans() and self._layout is not None:
            self._cache = LocalPlanCache(ref, self._layout, items)
        self._earlier = None
        self._drop_encoded(items)
        self.plan = SavePlan(items, storage_data=new_plan.storage_data, planner_data=self.mappings, usable=new_plan.usable)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """An item's content: a view of the state's memory for a tensor, a stream of bytes for an object. Idempotent and thread-safe.

        Raises:
            PlanError: this rank does not hold the item.
        """
        data = write_item.tensor_data
        if data is None:
            return self._resolved(self.transform_object(write_item, self.lookup_object(write_item.index)))
        number, shard = self._shard_around(write_item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        found = self.lookup_object(MetadataIndex(write_item.index.fqn, shard.offsets, number))
        if isinstance(found, torch.Tensor) and tuple(found.shape) == shard.sizes:
            for dim, (begin, size) in enumerate(zip(data.chunk.offsets, data.chunk.sizes, strict=True)):
                if size != shard.sizes[dim]:
                    found = found.narrow(dim, begin - shard.offsets[dim], size)
        return self._resolved(self.transform_object(write_item, found))

    # -- our writer's call ------------------------------------------------------------------------------------------------

    def row_memory(self, columns: PlanColumns) -> RowMemory | None:
        """Where the values of a plan's rows lie, so that many small ones need no ``resolve_data`` (all ranks, once a save).

        Args:
            columns: of the plan that :meth:`finish_plan` returned.

        Returns:
            None where a subclass or patch has a say in what is written, or the state is another one by now.
        """
        return None if self._overrides(_CONTENT_CALLS) else self._local.row_memory(columns)

    @property
    def leaves_tensors_alone(self) -> bool:
        """Whether nobody here looks at what tensors hold, but to compare those that other ranks may hold too: no subclass, no patch."""
        return type(self) is BalancedSavePlanner and not self._overrides((*_CONTENT_CALLS, *_PLAN_CALLS, "set_up_planner"))

    # -- DCP's extension points -------------------------------------------------------------------------------------------

    def require_own_state(self) -> None:
        """What is held is still the state of the save that the calling thread runs. Our writer asks before and after it writes.

        Raises:
            UsageError: another save was begun with this planner meanwhile.
        """
        self._turns.require_newest()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's value of a key: an object, or the local tensor of the box that begins at ``index.offset`` (``None``: its only one).

        Raises:
            PlanError: there is none.
        """
        tensor = self._local.tensor(index.fqn)
        if tensor is not None:
            for shard in tensor.shards:
                if index.offset is None or shard.offsets == tuple(index.offset):
                    return shard.tensor
        elif index.fqn in self.state_dict and index.offset is None:
            return self.state_dict[index.fqn]
        raise self._not_held(index.fqn, index.offset)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is stored of a value: a tensor as it is; an object encoded for our writer, else as ``torch.save`` bytes."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        if not self._local.engine:
            return super().transform_object(write_item, object)
        key = write_item.index.fqn
        # Encoded once for its digest already. Handed out once, then made anew: it must not outlive the save.
        encoded = self._local.encoded.pop(key, None) if object is self.state_dict.get(key) else None
        return EncodedObject(encode_object(object, key=key) if encoded is None else encoded)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # The process that DCP saves from gets the planner by pickle at every save: not the state, which it is given on its own.
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._turns = SaveTurns()
        self._local = LocalState({}, flattened=False, engine=False)
        self.state_dict: dict[str, Any] = {}
        self.mappings = {}
        self._layout = None
        self._cache = None
        self._earlier = None
        self._global_cache = GlobalPlanCache()

    def _overrides(self, calls: Sequence[str]) -> bool:
        """Whether a subclass, or whoever patched this instance, may change what these calls do."""
        return any(getattr(getattr(self, name), "__func__", None) is not getattr(BalancedSavePlanner, name) for name in calls)

    def _plans_columns(self) -> bool:
        """Whether nobody but us looks at the items, which a plan then lacks on its way."""
        return self._local.engine and not self._overrides(_PLAN_CALLS)

    def _reuses_plans(self) -> bool:
        return self._cache_plans and self._plans_columns()

    def _drop_encoded(self, items: Sequence[WriteItem]) -> None:
        """Keep of the encoded objects only those that this rank is to write."""
        if self._local.encoded:
            columns = items.columns() if isinstance(items, PlanItems) else None
            if columns is not None:
                mine = {columns.keys.names[entry] for entry in columns.entries[columns.keys.kinds[columns.entries] == 0].tolist()}
            else:
                mine = {item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO}
            self._local.encoded = {key: data for key, data in self._local.encoded.items() if key in mine}

    def _plan(self, local: Sequence[RankPlan]) -> KnownPlan:
        made = self._made(local)
        own = (self._local.packed_skeleton(), self._local.paths or {})
        names = unite_names([plan.data.skeleton for plan in local], flattened=self.flatten_state_dict, own=own)
        return KnownPlan(uuid.uuid4().hex, tuple(local), made, *names)

    def _made(self, local: Sequence[RankPlan]) -> GlobalPlan:
        """As columns, where all ranks sent some and nothing is odd about them; otherwise item by item."""
        parts: dict[Any, Any] = {}
        columns = [plan.items.columns(parts) if isinstance(plan.items, PlanItems) else None for plan in local]
        all_columns = [own for own in columns if own is not None]
        if len(all_columns) == len(local) and self._plans_columns():
            made = plan_columns(all_columns, [plan.data for plan in local], split_bytes=self._split_bytes)
            if made is not None:
                items = [ChosenItems(choice, own) for choice, own in zip(made.choices, all_columns, strict=True)]
                return GlobalPlan(items, made.described, made.ties, made.order, made.groups, by_policy=False)
        # Records of its own: those of the plan stay unmade, for the next save.
        records = [plan if own is None else RankPlan(own.items(), plan.data) for plan, own in zip(local, columns, strict=True)]
        return plan_globally(records, policy=self._policy, split_bytes=self._split_bytes, keep_empty=not self._local.engine)

    def _describe(self, known: KnownPlan) -> Metadata:
        """New at every save: the writer fills it in."""
        stored = known.made.metadata
        if not self._local.engine:
            # Goes to disk by pickle: nothing of ours may be in it.
            assert isinstance(stored, dict)
            return Metadata(dict(stored), planner_data=None if known.mapping is None else dict(known.mapping))
        planner_data = PlannerData(known.mapping, skeleton=known.skeleton, ties=known.made.ties)
        # Columns become records in the metadata alone, when somebody looks.
        return EngineMetadata(cast(Any, dict(stored) if isinstance(stored, dict) else stored), planner_data=planner_data)

    def _shard_around(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, LocalShard]:
        tensor = self._local.tensor(key)
        for number, shard in enumerate(tensor.shards if tensor is not None else ()):
            inside = zip(offsets, sizes, shard.offsets, shard.sizes, strict=True)
            if all(begin <= offset and offset + size <= begin + length for offset, size, begin, length in inside):
                return number, shard
        raise self._not_held(key, offsets)

    def _not_held(self, key: str, offset: Sequence[int] | None) -> PlanError:
        return PlanError(
            "this rank is asked for a part of the state that it does not hold",
            tensor=key,
            found=None if offset is None else f"offsets {tuple(offset)}",
            remedy="change the state and the plan in tandem",
        )

    def _resolved(self, value: Any) -> torch.Tensor | io.BytesIO:
        # Lazily, here: it allocates memory.
        return value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value


def _num_ranks() -> int:
    """At least as many as take part in the save: a planner is not told the process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
