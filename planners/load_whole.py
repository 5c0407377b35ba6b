"""The reads of plain tensors that are stored whole, planned by columns: there may be a hundred thousand scalars and short vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from dcp_engine.planners.load_items import tensor_items
from dcp_engine.planners.local_shards import LocalTensor, describe
from dcp_engine.stored_tensors import ColumnItems, StoredTensors, WholeReads

__all__ = ["TakenWhole", "overrides", "take_whole"]

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))


class TakenWhole:
    """What :func:`take_whole` takes.

    Args:
        stored: the checkpoint.
        keys: of the state.
        rows: the entry of each.
        tensors: the state's value of each.

    Thread-safety: immutable.
    """

    def __init__(self, stored: StoredTensors, keys: list[str], rows: NDArray[np.int64], tensors: list[torch.Tensor]) -> None:
        # Addresses are unsigned in C, and never above 2**63.
        addresses = np.fromiter(map(torch.Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))
        self.keys = keys
        self.reads = WholeReads(stored, rows, tensors, addresses)
        self.num_bytes = int(stored.num_bytes[rows].sum())

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.keys)}

    def describe(self, key: str) -> LocalTensor | None:
        """One tensor as all others are planned; ``None`` where it was not taken."""
        number = self._numbers.get(key)
        return None if number is None else describe(key, self.reads.tensors[number], loading=True)

    def sharing(self, others: Iterable[LocalTensor] = ()) -> list[str]:
        """Keys whose memory begins where that of another key does, or of one of ``others``; or which have none."""
        addresses = self.reads.addresses
        taken = [0, *(tensor.shards[0].tensor.data_ptr() for tensor in others if tensor.shards)]
        shared = np.isin(addresses, np.array(taken, dtype=np.int64))
        if len(set(addresses.tolist())) < len(addresses):
            distinct, counts = np.unique(addresses, return_counts=True)
            shared |= np.isin(addresses, distinct[counts > 1])
        return [self.keys[number] for number in np.flatnonzero(shared).tolist()]

    def without(self, keys: Iterable[str]) -> TakenWhole:
        """All but some keys."""
        dropped = {self._numbers[key] for key in keys}
        if not dropped:
            return self
        kept = [number for number in range(len(self.keys)) if number not in dropped]
        reads = self.reads
        return TakenWhole(reads.stored, [self.keys[n] for n in kept], reads.rows[kept], [reads.tensors[n] for n in kept])

    def items(self, rest: Sequence[ReadItem], recorded: Mapping[str, Any]) -> ColumnItems:
        """The items of a plan: these, made when somebody looks, and then ``rest``.

        Args:
            rest: all other items.
            recorded: ``Metadata.state_dict_metadata``.
        """

        def make(number: int) -> ReadItem:
            key = self.keys[number]
            local, stored = self.describe(key), recorded[key]
            assert local is not None
            assert isinstance(stored, TensorStorageMetadata)
            (item,) = tensor_items(local, key, stored)
            return item

        return ColumnItems(self.reads, rest, make)


def overrides(planner: object, base: type, names: Iterable[str]) -> bool:
    """Whether a planner has methods of its own, by its class or patched in, in place of some of ``base``."""
    return any(getattr(getattr(planner, name), "__func__", None) is not getattr(base, name) for name in names)


def take_whole(stored: StoredTensors, state: Mapping[str, object], keys: Sequence[str]) -> tuple[TakenWhole, list[str]]:
    """Take what needs no plan: plain contiguous CPU tensors of the stored dtype and shape, each with memory of its own.

    Everything else is left: what does not fit, so that one error lists all of it; tied tensors, since their values must agree.

    Args:
        stored: the checkpoint.
        state: key -> value.
        keys: of the state, to be loaded from entries of the same keys.

    Returns:
        What was taken, and the keys that were left, in their order.
    """
    rows_of, dtypes, shapes, is_whole = stored.rows, stored.dtypes, stored.shapes, stored.is_whole
    strided = torch.strided
    taken: list[str] = []
    rows: list[int] = []
    tensors: list[torch.Tensor] = []
    left: list[str] = []
    for key in keys:
        value: Any = state[key]
        row = rows_of.get(key)
        dtype = None if row is None else dtypes[row]
        if (
            row is not None
            and is_whole[row]
            and type(value) in _PLAIN_TYPES
            and not hasattr(value, "global_shape")
            and value.layout is strided
            and not value.is_nested
            and value.is_cpu
            and value.dtype is dtype
            and value.shape == shapes[row]
            and value.is_contiguous()
            and not value.is_neg()
            and not (dtype in _COMPLEX and value.is_conj())
        ):
            taken.append(key)
            rows.append(row)
            tensors.append(value)
        else:
            left.append(key)
    taking = TakenWhole(stored, taken, np.array(rows, dtype=np.int64), tensors)
    shared = taking.sharing()
    if shared:
        unplanned = {*left, *shared}
        left = [key for key in keys if key in unplanned]
    return taking.without(shared), left
