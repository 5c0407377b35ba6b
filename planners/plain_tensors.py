"""The leaves of a state that need no description of their own: plain tensors in host memory, one box each. There may be 100,000 of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dcp_engine.plan_columns import PlanColumns, RowMemory
from dcp_engine.planners.local_shards import LocalTensor, describe

__all__ = ["PlainTensors", "take_plain"]

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_QUANTISED = frozenset(
    getattr(torch, name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
)  # torch is taking them out
_LOWEST_ADDRESS = 1 << 22
"""No allocator gives memory below. A tensor that seems to lie there is empty, or its memory was freed, and its offset alone is left."""


class PlainTensors:
    """What ``describe`` would say of each is what these lists say: its whole is its only box, and other ranks may hold it too.

    Attributes:
        keys: in the order of the state.
        values: the tensor of each, as the state holds it.
        dtypes: of each.
        shapes: of each, in elements.
        addresses: where the first element of each lay when it was taken.

    Thread-safety: once it is filled, immutable.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.values: list[torch.Tensor] = []
        self.dtypes: list[torch.dtype] = []
        self.shapes: list[torch.Size] = []
        self.addresses: list[int] = []

    def describe(self, key: str) -> LocalTensor | None:
        """One of them as ``describe`` would have it; None where the key is none of them."""
        number = self._numbers.get(key)
        return None if number is None else describe(key, self.values[number])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.keys)}

    def memory(self, columns: PlanColumns, numbers: NDArray[np.int64]) -> RowMemory:
        """Where the rows of a plan lie.

        Args:
            columns: the plan.
            numbers: for each key of the plan which of these tensors it is, -1 for none, ``[num_keys]``.

        Returns:
            An address for each row that is all of one of these tensors, still has the planned length and lies in memory as its values are.
        """
        values, num = self.values, len(self.values)
        in_place = np.fromiter(map(torch.Tensor.is_contiguous, values), dtype=np.bool_, count=num)
        in_place &= ~np.fromiter(map(torch.Tensor.is_neg, values), dtype=np.bool_, count=num)
        if any(dtype.is_complex for dtype in set(self.dtypes)):
            in_place &= ~np.fromiter(map(torch.Tensor.is_conj, values), dtype=np.bool_, count=num)
        # Anew: whoever replaced a tensor's memory since then has freed what was there.
        addresses = np.fromiter(map(torch.Tensor.data_ptr, values), dtype=np.int64, count=num)
        addresses[~in_place | (addresses < _LOWEST_ADDRESS)] = 0
        num_bytes = np.fromiter(map(attrgetter("nbytes"), values), dtype=np.int64, count=num)
        keys, entries = columns.keys, columns.entries
        itemsizes = np.array([0 if dtype is None else dtype.itemsize for dtype in keys.palette], dtype=np.int64)[keys.kinds]
        own = numbers[entries]
        whole = (own >= 0) & (columns.sizes == keys.shapes[entries]).all(axis=1)
        rows = np.flatnonzero(whole)
        own = own[rows]
        found = np.zeros(len(columns), dtype=np.int64)
        planned = columns.sizes[rows].prod(axis=1) * itemsizes[entries[rows]]
        found[rows] = np.where(num_bytes[own] == planned, addresses[own], 0)
        return RowMemory(found, values)


def take_plain(leaves: Mapping[str, Any]) -> tuple[PlainTensors, list[tuple[int, str]]]:
    """Find the plain tensors of a state.

    Args:
        leaves: key -> value.

    Returns:
        The plain tensors, and the other keys, each after the number of plain tensors before it.
    """
    plain = PlainTensors()
    rest: list[tuple[int, str]] = []
    strided, types, quantised = torch.strided, _PLAIN_TYPES, _QUANTISED
    keys, values, dtypes, shapes, addresses = plain.keys, plain.values, plain.dtypes, plain.shapes, plain.addresses
    for key, value in leaves.items():
        if (
            type(value) in types
            and value.layout is strided
            and value.is_cpu
            and not value.is_nested
            and (dtype := value.dtype) not in quantised
            and not hasattr(value, "global_shape")
            and (address := value.data_ptr()) >= _LOWEST_ADDRESS
        ):
            keys.append(key)
            values.append(value)
            dtypes.append(dtype)
            shapes.append(value.shape)
            addresses.append(address)
        else:
            rest.append((len(keys), key))
    return plain, rest
