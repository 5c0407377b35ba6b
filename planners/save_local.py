"""One rank's view of the state to be saved: its leaves, the boxes that it holds, its write items and the digests of their content."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_engine.errors import StateError, UnencodableObjectError, UnsupportedTensorError
from dcp_engine.objects import encode_object
from dcp_engine.plan_columns import PlanColumns, RowMemory, compress, pack_integers, unpack_integers
from dcp_engine.planners.column_builder import ColumnBuilder
from dcp_engine.planners.local_shards import LocalTensor, describe, is_tensor_like
from dcp_engine.planners.plain_tensors import PlainTensors, take_plain
from dcp_engine.planners.replicas import ContentDigests
from dcp_engine.planners.skeleton import encode_skeleton
from dcp_engine.planners.ties import find_ties, repeated
from dcp_engine.planners.tree import flatten
from dcp_engine.types import Path

__all__ = ["LocalLayout", "LocalPlanData", "LocalState", "PlanRef"]


_NOT_PLAIN = np.array([-1])


@dataclass(frozen=True, slots=True)
class PlanRef:
    """Names a rank's part of an earlier global plan, on the way to the rank (``planner_data`` of its plan) and back.

    Attributes:
        plan_id: under which the coordinator keeps the plan.
        rank: the rank's place in the plan. In a save of another process group it may have another one.
        kept: the coordinator keeps the plan for later saves.
    """

    plan_id: str
    rank: int
    kept: bool = True


@dataclass(frozen=True, slots=True)
class LocalPlanData:
    """``planner_data`` of a local plan.

    Attributes:
        digests: content of each item, ``[num_items]``; 0 where this rank knows that no other holds the same box.
        object_bytes: encoded size of each item that is an object, ``[num_items]``; 0 for tensors and where it is unknown.
        cached: the items are those that this rank sent when that plan was made, and are not sent again; nor are the fields below.
        skeleton: the state's containers, encoded and compressed, from which its paths follow; empty where the state was not flattened.
        ties: alias key -> key with the same memory on this rank.
        unheld: keys of tensors of which this rank holds nothing, because it lies outside their mesh or its part is empty.
    """

    digests: NDArray[np.uint64]
    object_bytes: NDArray[np.int64]
    cached: PlanRef | None = None
    skeleton: bytes = b""
    ties: Mapping[str, str] = field(default_factory=dict)
    unheld: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        rest = (self.cached, self.skeleton, self.ties, self.unheld)
        return (_local_plan_data, (pack_integers(self.digests), pack_integers(self.object_bytes), *rest))


def _local_plan_data(digests: bytes | int, object_bytes: bytes | int, *rest: Any) -> LocalPlanData:
    return LocalPlanData(unpack_integers(digests, np.uint64), unpack_integers(object_bytes, np.int64), *rest)


@dataclass(frozen=True, slots=True, eq=False)
class LocalLayout:
    """All that a rank's plan depends on, but for contents: equal layouts have equal plans.

    Attributes:
        columns: the boxes.
        replicated: for each key, whether other ranks may hold its boxes.
        skeleton: the containers; None where the state was not flattened.
        absent: keys of tensors whose mesh this rank is outside of, and of those of which it holds nothing.
        ties: alias key -> key with the same memory on this rank.
    """

    columns: PlanColumns
    replicated: bytes
    skeleton: bytes | None
    absent: tuple[str, ...]
    ties: Mapping[str, str]

    def same_as(self, other: LocalLayout) -> bool:
        """Whether the same plan follows."""
        mine, theirs = ((layout.replicated, layout.skeleton, layout.absent, layout.ties) for layout in (self, other))
        return mine == theirs and self.columns.same_as(other.columns)


class LocalState:
    """The state of one save on this rank.

    Args:
        state_dict: what DCP hands to the planner.
        flattened: whether nested containers are traversed; otherwise every top-level value is a leaf.
        engine: the writer is ours, so objects are encoded by :mod:`dcp_engine.objects`.

    Attributes:
        leaves: key -> value, in the order of the items.
        paths: key -> typed path; None where not flattened.
        skeleton: the containers, encoded; empty where not flattened.
        plain: the leaves that are plain tensors in host memory.
        tensors: key -> boxes, for other leaves that are tensors and of which this rank may hold a part. :meth:`tensor` finds either.
        encoded: key -> encoded object, until somebody takes it.

    Raises:
        StateError kinds: something in the state cannot be stored; names the key. An error that a value's ``__create_write_items__`` raises
            passes unchanged, and reaches every rank.
    """

    def __init__(self, state_dict: Mapping[str, Any], *, flattened: bool, engine: bool) -> None:
        self.engine = engine
        self.paths: dict[str, Path] | None = None
        self.skeleton = b""
        self.encoded: dict[str, bytes] = {}
        self.tensors: dict[str, LocalTensor] = {}
        if flattened:
            flat = flatten(state_dict)
            self.leaves, self.paths, self.skeleton = flat.leaves, flat.paths, encode_skeleton(flat.skeleton)
        else:
            self.leaves = dict(state_dict)
            for key in self.leaves:
                if not isinstance(key, str):
                    raise StateError("a key of a state that is not flattened must be a str", expected="str", found=repr(key))
        self.plain = PlainTensors()
        self._rest: list[tuple[int, str]] = []
        """Keys that are not in ``plain``, each after the number of those before it that are."""
        self._absent: set[str] = set()
        self._numbers: tuple[list[str], NDArray[np.int64]] | None = None
        """Keys of the layout, and which of ``plain`` each is; -1 for others."""

    def describe(self) -> None:
        """Find the boxes of all tensors."""
        self.plain, self._rest = take_plain(self.leaves)
        for _, key in self._rest:
            value = self.leaves[key]
            if is_tensor_like(value):
                tensor = describe(key, value)
                if tensor is None:
                    self._absent.add(key)
                    continue
                if not self.engine and tensor.kind == "dtensor" and len(tensor.shards) > 1:
                    raise UnsupportedTensorError(
                        "this rank's rows of a DTensor are not contiguous, which this storage writer may not be able to keep apart",
                        tensor=key,
                        expected="one box of the tensor on each rank",
                        found=f"{len(tensor.shards)} boxes under {value.placements}",
                        remedy="save with dcp_engine.ShardWriter, or redistribute the tensor first",
                    )
                self.tensors[key] = tensor

    def _runs(self) -> Iterator[tuple[slice, str | None]]:
        """The leaves in their order: some plain tensors, then another key, and so on. The last run is followed by none."""
        done = 0
        for before, key in self._rest:
            yield slice(done, before), key
            done = before
        yield slice(done, None), None

    def tensor(self, key: str) -> LocalTensor | None:
        """The boxes of a tensor, a plain one included; None where the key is an object's, or this rank holds nothing of it."""
        found = self.tensors.get(key)
        return self.plain.describe(key) if found is None else found

    def items(self) -> list[WriteItem]:
        """One item a box or object, in the order of the leaves."""
        items = []
        for key in self.leaves:
            tensor = self.tensor(key)
            if tensor is not None:
                size = torch.Size(tensor.global_shape)
                items += [_tensor_item(tensor, size, shard.offsets, shard.sizes) for shard in tensor.shards]
            elif key not in self._absent:
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
        return items

    def layout(self, ties: Mapping[str, str]) -> LocalLayout | None:
        """The items as columns, and what else the plan depends on; None where columns are no fit form."""
        builder = ColumnBuilder()
        replicated = bytearray()
        numbers: list[NDArray[np.int64]] = []
        plain = self.plain
        for run, key in self._runs():
            builder.add_plain(plain.keys[run], plain.dtypes[run], plain.shapes[run])
            replicated += b"\x01" * len(plain.keys[run])
            numbers.append(np.arange(len(plain.keys))[run])
            tensor = None if key is None else self.tensors.get(key)
            if tensor is not None and tensor.shards:
                builder.add_tensor(tensor)
                replicated.append(tensor.may_be_replicated)
                numbers.append(_NOT_PLAIN)
            elif tensor is None and key is not None and key not in self._absent:
                builder.add_object(key)
                replicated.append(True)
                numbers.append(_NOT_PLAIN)
        columns = builder.build()
        self._numbers = None if columns is None else (columns.keys.names, np.concatenate(numbers))
        skeleton = None if self.paths is None else self.skeleton
        return None if columns is None else LocalLayout(columns, bytes(replicated), skeleton, self.unheld(), ties)

    def row_memory(self, columns: PlanColumns) -> RowMemory | None:
        """Where the values of a plan's rows lie; None where the plan is of other keys than :meth:`layout` gave."""
        if self._numbers is None or columns.keys.names != self._numbers[0]:
            return None
        return self.plain.memory(columns, self._numbers[1])

    def packed_skeleton(self) -> bytes:
        """The containers for the way to the coordinator; empty where not flattened."""
        return b"" if self.paths is None else compress(self.skeleton)

    def unheld(self) -> tuple[str, ...]:
        """Keys of tensors of which this rank holds nothing."""
        return (*sorted(self._absent), *(tensor.key for tensor in self.tensors.values() if not tensor.shards))

    def ties(self) -> dict[str, str]:
        """Alias key -> key with the same memory on this rank."""
        others = [tensor for tensor in self.tensors.values() if tensor.shards]
        addresses = np.array([*self.plain.addresses, *(tensor.shards[0].tensor.data_ptr() for tensor in others)], dtype=np.int64)
        keys = [*self.plain.keys, *(tensor.key for tensor in others)]
        sharing = [self.tensor(keys[number]) for number in np.flatnonzero(repeated(addresses)).tolist()]
        return find_ties([tensor for tensor in sharing if tensor is not None])

    def contents(self, *, replicated: bool) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Digests of what other ranks may hold too, and sizes of encoded objects, both aligned with :meth:`items`.

        With our writer every object is encoded here: what cannot be is refused before anything is written, and the bytes are used again.

        Args:
            replicated: more than one rank takes part in the save. Otherwise no digest is computed.
        """
        plain = self.plain
        num_items = len(self.leaves) - len(self._absent) + sum(len(tensor.shards) - 1 for tensor in self.tensors.values())
        digests = ContentDigests(num_items)
        sizes = np.zeros(num_items, dtype=np.int64)
        slot = 0
        for run, key in self._runs():
            values = plain.values[run]
            if replicated:
                digests.add_all(slot, values)
            slot += len(values)
            if key is None or key in self._absent:
                continue
            tensor = self.tensors.get(key)
            if tensor is None:
                encoded = self._encode(key, self.leaves[key], replicated)
                sizes[slot] = len(encoded)
                if replicated:
                    digests.add(slot, encoded)
                slot += 1
                continue
            # Ranks that hold no element of an empty tensor all describe it whole.
            if replicated and (tensor.may_be_replicated or 0 in tensor.global_shape):
                digests.add_all(slot, [shard.tensor for shard in tensor.shards])
            slot += len(tensor.shards)
        return digests.finish(), sizes

    def _encode(self, key: str, value: object, replicated: bool) -> bytes:
        """Encode an object where its size, its digest or its refusal is needed."""
        if not self.engine and not replicated:
            return b""
        try:
            encoded = encode_object(value, key=key)
        except UnencodableObjectError:
            if self.engine:
                raise
            return _stock_bytes(value)
        if self.engine:
            self.encoded[key] = encoded
        return encoded


def _stock_bytes(value: object) -> bytes:
    """What DCP's own writers store of an object."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _tensor_item(tensor: LocalTensor, size: torch.Size, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> WriteItem:
    start = torch.Size(offsets)
    return WriteItem(
        index=MetadataIndex(tensor.key, start),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=start, sizes=torch.Size(sizes)),
            properties=TensorProperties(dtype=tensor.dtype),  # one each: a subclass may change those of single items
            size=size,
        ),
    )
