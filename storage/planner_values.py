"""The values behind a planner's items, as bytes: resolved for writing, and handed back when they were read.

Knows DCP's planners and the tensors and objects that they hold, and nothing of where the bytes lie.
"""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlanner, WriteItem

from dcp_engine.compat import is_traceable_wrapper, wait_for_collective
from dcp_engine.errors import (
    DtypeMismatchError,
    KindMismatchError,
    PlanError,
    ShapeMismatchError,
    UnencodableObjectError,
    UnsupportedTensorError,
)
from dcp_engine.memory import memory_bytes, require_memory
from dcp_engine.objects import decode_object, encode_object
from dcp_engine.plan_columns import PlanColumns, RowMemory
from dcp_engine.storage import dtypes
from dcp_engine.storage.dtypes import DtypeInfo
from dcp_engine.storage.split_memory import chunk_tensor
from dcp_engine.types import EncodedObject

__all__ = ["ObjectTarget", "RowValues", "TensorBytes", "TensorTarget", "held_values", "object_bytes", "own_state"]

_COPIED_BYTES = 16384
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def held_values(planner: SavePlanner) -> Iterator[object]:
    """The leaves of the state that a planner saves, as far as it shows it the way the stock planner does."""
    stack = [getattr(planner, "state_dict", None)]
    seen = set()  # a container may hold itself
    while stack:
        value = stack.pop()
        if not isinstance(value, Mapping | list | tuple):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack += value.values() if isinstance(value, Mapping) else value


@contextmanager
def own_state(planner: SavePlanner) -> Iterator[None]:
    """While a planner's values are written, it must hold the state that was planned: one that tells (ours does) is asked before and after.

    Raises:
        UsageError: it was given the state of another save meanwhile.
    """
    require = getattr(planner, "require_own_state", None)
    if callable(require):
        require()
    try:
        yield
    finally:  # also of a failure: what went wrong is then that the state was another one's
        if callable(require):
            require()


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Resolves one item to the row-major bytes of its box. Idempotent and thread-safe, as ``resolve_data`` is.

    Attributes:
        planner: resolves the item.
        item: of a tensor.
        sizes: extent of the box that was planned, in elements.
        dtype: the planned one.
    """

    planner: SavePlanner
    item: WriteItem
    sizes: tuple[int, ...]
    dtype: torch.dtype | None

    def __call__(self) -> NDArray[np.uint8]:
        """The bytes: a view where the tensor is contiguous CPU memory, else a copy. Of floats that a device took apart, the view may be
        blocks for :func:`~dcp_engine.storage.split_memory.staged_block`.

        Raises:
            KindMismatchError, PlanError: the planner resolved something else than it planned.
            UnsupportedTensorError: the tensor has no plain memory.
        """
        tensor = self.planner.resolve_data(self.item)
        if isinstance(tensor, torch.Tensor) and type(tensor) in _PLAIN_TYPES:
            tensor = chunk_tensor(tensor)
        if type(tensor) is torch.Tensor and _is_small(tensor, self.sizes, self.dtype):
            # An array that views a tensor takes five times as long to make as these few bytes to copy.
            return np.frombuffer(ctypes.string_at(tensor.data_ptr(), tensor.nbytes), dtype=np.uint8)
        key = self.item.index.fqn
        if not isinstance(tensor, torch.Tensor):
            raise KindMismatchError(
                "the planner planned a tensor and resolved something else",
                tensor=key,
                expected="torch.Tensor",
                found=type(tensor).__name__,
            )
        tensor = wait_for_collective(tensor)
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or is_traceable_wrapper(tensor) or _is_freed(tensor):
            raise UnsupportedTensorError(
                "the tensor has no memory of its own that could be stored",
                tensor=key,
                expected="a plain strided tensor with data",
                found=f"{type(tensor).__name__}, {tensor.layout} on {tensor.device}",
                remedy="materialise it, or save the plain tensors that it is made of",
            )
        found = (tuple(tensor.shape), tensor.dtype)
        if found != (self.sizes, self.dtype):
            raise PlanError(
                "the planner resolved a tensor that is not the box it planned",
                tensor=key,
                expected=f"sizes {self.sizes}, {self.dtype}",
                found=f"sizes {found[0]}, {found[1]}",
                remedy="transform the plan and the data in tandem",
            )
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return dtypes.carrier(plain).reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class RowValues:
    """The values behind a plan's rows. The record that a planner is asked with is made when the value is wanted.

    Attributes:
        planner: resolves the rows.
        columns: the plan.
    """

    planner: SavePlanner
    columns: PlanColumns

    def memory(self) -> RowMemory | None:
        """Where the values lie, if the planner's own class tells: an object that stands in for one of ours is asked row by row."""
        tells = getattr(type(self.planner), "row_memory", None)
        return None if tells is None else cast("RowMemory | None", tells(self.planner, self.columns))

    def tensor(self, row: int, sizes: tuple[int, ...], dtype: torch.dtype | None) -> NDArray[np.uint8]:
        """As :class:`TensorBytes`."""
        (item,) = self.columns.items((row,))
        return TensorBytes(self.planner, item, sizes, dtype)()

    def object(self, row: int) -> tuple[NDArray[np.uint8], DtypeInfo]:
        """As :func:`object_bytes`."""
        (item,) = self.columns.items((row,))
        return object_bytes(item, self.planner)


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether there is no memory behind a tensor's elements. An array of it would silently get other memory."""
    return tensor.layout is torch.strided and not tensor.data_ptr() and tensor.numel() > 0


def _is_small(tensor: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    """Whether a plain tensor is what was planned, not empty, and lies in one short run of memory as its values are."""
    return (
        tensor.dtype is dtype
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.shape == sizes
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
        and 0 < tensor.nbytes <= _COPIED_BYTES
        and tensor.data_ptr() != 0
    )


def object_bytes(item: WriteItem, planner: SavePlanner) -> tuple[NDArray[np.uint8], DtypeInfo]:
    """The bytes of an object, and whether they are in our encoding (``OBJECT``) or of a kind that only the planner knows (``OPAQUE``).

    Raises:
        UnencodableObjectError: the object cannot be represented; the error names the key.
        KindMismatchError: the planner resolved something else than bytes.
    """
    key = item.index.fqn
    info = dtypes.OBJECT
    if _serialises_as_stock(planner):
        # A stock planner would hand over a pickle, which the format never holds: take the object itself and encode it.
        data: Any = encode_object(planner.lookup_object(item.index), key=key)  # type: ignore[attr-defined]
    else:
        resolved = planner.resolve_data(item)
        if not isinstance(resolved, io.BytesIO):
            raise KindMismatchError(
                "the planner planned an object and resolved something else",
                tensor=key,
                expected="io.BytesIO",
                found=type(resolved).__name__,
            )
        info = dtypes.OBJECT if isinstance(resolved, EncodedObject) else dtypes.OPAQUE
        data = resolved.getbuffer()
    array = np.frombuffer(data, dtype=np.uint8)
    if not array.size:
        raise UnencodableObjectError("the planner serialised an object to no bytes at all", tensor=key, remedy="write at least one byte")
    return array, info


def _serialises_as_stock(planner: SavePlanner) -> bool:
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind = type(planner)
    stock = DefaultSavePlanner
    return kind.resolve_data is stock.resolve_data and kind.transform_object is stock.transform_object


class TensorTarget:
    """One tensor box to fill: asks the planner for it late, gives it back when it is whole.

    Args:
        item: of a tensor.
        planner: owns the tensor.
        dtype: the stored one.
        lock: held during each call of the planner, which promises nothing about threads.
    """

    __slots__ = ("_dtype", "_item", "_lock", "_planner", "_staged", "_tensor")

    def __init__(self, item: ReadItem, planner: LoadPlanner, dtype: torch.dtype, lock: threading.Lock) -> None:
        self._item = item
        self._planner = planner
        self._dtype = dtype
        self._lock = lock
        self._tensor: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None

    def open(self) -> NDArray[Any]:
        """The memory to fill: the tensor's own where it is plain CPU memory, else a buffer.

        Raises:
            ShapeMismatchError, DtypeMismatchError, UnsupportedTensorError: the planner's tensor cannot take the box.
        """
        with self._lock:
            self._tensor = tensor = self._planner.resolve_tensor(self._item)
        target = tensor.detach()
        self._check(target)
        if target.device.type == "cpu" and not target.is_conj() and not target.is_neg():
            return dtypes.carrier(target)
        self._staged = torch.empty(tuple(self._item.lengths), dtype=self._dtype)
        return dtypes.carrier(self._staged)

    def commit(self) -> None:
        """Everything is read: tell the planner."""
        with self._lock:
            if self._tensor is None:  # an empty box: nothing was read, but the planner may count on the pair of calls
                self._tensor = self._planner.resolve_tensor(self._item)
            if self._staged is not None:
                self._tensor.detach().copy_(self._staged)
            self._planner.commit_tensor(self._item, self._tensor)
        self._tensor = self._staged = None

    def _check(self, target: torch.Tensor) -> None:
        key = self._item.dest_index.fqn
        if tuple(target.shape) != tuple(self._item.lengths):
            raise ShapeMismatchError(
                "the planner's target is not the box that it planned",
                tensor=key,
                expected=f"sizes {tuple(self._item.lengths)}",
                found=f"sizes {tuple(target.shape)}",
            )
        if target.dtype != self._dtype:
            raise DtypeMismatchError(
                "the target's dtype is not the stored one",
                tensor=key,
                expected=f"{self._dtype} (stored)",
                found=f"{target.dtype} (target)",
                remedy='load with ReshardLoadPlanner(dtype="cast") to convert floats, or give a target of the stored dtype',
            )
        if target.device.type == "meta":
            # A copy to it would succeed and leave nothing.
            raise UnsupportedTensorError(
                "the target is on the meta device and has no memory to load into",
                tensor=key,
                remedy="call to_empty(device=...) first, or load with ReshardLoadPlanner, which gives it memory",
            )
        if _is_freed(target):
            raise UnsupportedTensorError(
                "the target's memory was freed: what is read would be lost", tensor=key, remedy="give its storage memory before the load"
            )


class ObjectTarget:
    """One object to read: its bytes, decoded when they are all there and given to the planner.

    Args:
        item: of an object.
        planner: takes it by ``load_bytes``.
        key: under which it is stored.
        num_bytes: length of its bytes.
        encoded: the bytes are in our encoding; else the planner gets them as they are.
        lock: held during each call of the planner.

    Raises:
        LimitExceededError: it is larger than this machine's memory. Said here, before its blocks are planned, which are as many.
    """

    __slots__ = ("_buffer", "_encoded", "_item", "_key", "_lock", "_num_bytes", "_planner")

    def __init__(self, item: ReadItem, planner: LoadPlanner, key: str, num_bytes: int, lock: threading.Lock, *, encoded: bool) -> None:
        require_memory(num_bytes, what="an object", tensor=key)
        self._item = item
        self._planner = planner
        self._key = key
        self._num_bytes = num_bytes
        self._encoded = encoded
        self._lock = lock
        self._buffer = np.empty(0, dtype=np.uint8)

    def open(self) -> NDArray[Any]:
        """Memory for the bytes."""
        self._buffer = np.empty(self._num_bytes, dtype=np.uint8)
        return self._buffer

    def commit(self) -> None:
        """Everything is read: decode it, and give it to the planner.

        Raises:
            MalformedCheckpointError, LimitExceededError, StateError: the bytes cannot be decoded.
        """
        value = self._payload()
        self._buffer = np.empty(0, dtype=np.uint8)
        with self._lock:
            self._planner.load_bytes(self._item, value)

    def _payload(self) -> io.BytesIO:
        if not self._encoded:
            return io.BytesIO(self._buffer.tobytes())
        if getattr(self._planner, "accepts_encoded_objects", False):
            return EncodedObject(self._buffer.tobytes())
        # A stock planner unpickles what it is handed: it gets bytes that were made here, from a value that was decoded without a pickle.
        stream = io.BytesIO()
        torch.save(decode_object(self._buffer.data, key=self._key, budget_bytes=memory_bytes()), stream)
        stream.seek(0)
        return stream
