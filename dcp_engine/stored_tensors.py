"""What our reader tells our load planner of all tensors of a checkpoint at once, and the reads that it gets in return: columns both ways.

A hundred thousand tiny tensors cost more in records, one of each kind a tensor, than in bytes. The handshake is an attribute of the
metadata, ``stored_tensors``: a reader that sets it understands :class:`ColumnItems`; a planner that finds none makes a list of items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["ColumnItems", "StoredTensors", "WholeReads", "stored_tensors_of"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensors:
    """All entries of a checkpoint, by row. Thread-safety: not to be written to.

    Attributes:
        rows: key -> row. Aliases of ties are not there.
        dtypes: dtype of each row; ``None`` for an object.
        is_whole: whether the row is a tensor whose only chunk is all of it, and not empty.
        shapes: global shape of each such row, in elements; without meaning for others.
        num_bytes: bytes of each such row; without meaning for others.
        ties: alias key -> key under which the same tensor is stored, as ``PlannerData.ties`` tells.
    """

    rows: Mapping[str, int]
    dtypes: Sequence[torch.dtype | None]
    shapes: Sequence[tuple[int, ...]]
    is_whole: Sequence[bool]
    num_bytes: NDArray[np.int64]
    ties: Mapping[str, str]


def stored_tensors_of(metadata: object) -> StoredTensors | None:
    """The columns of a checkpoint whose reader takes reads by columns; ``None`` for any other reader."""
    stored = getattr(metadata, "stored_tensors", None)
    return stored if isinstance(stored, StoredTensors) else None


@dataclass(frozen=True, slots=True, eq=False)
class WholeReads:
    """Tensors stored whole, each to be read into one tensor, without a call of the planner for any of them.

    Attributes:
        stored: the rows that are meant.
        rows: row of each read.
        tensors: where it goes: contiguous CPU memory of its own dtype and shape, no conjugate or negative view.
        addresses: of the first byte of each tensor.
    """

    stored: StoredTensors
    rows: NDArray[np.int64]
    tensors: list[torch.Tensor]
    addresses: NDArray[np.int64]


class ColumnItems(Sequence[ReadItem]):
    """``LoadPlan.items``, of which those of tensors stored whole are made when somebody looks.

    Args:
        whole: those. They come first.
        rest: all others.
        make: gives the item of one of them by its position.

    Thread-safety: immutable.
    """

    __slots__ = ("_make", "rest", "whole")

    def __init__(self, whole: WholeReads, rest: Sequence[ReadItem], make: Callable[[int], ReadItem]) -> None:
        self.whole = whole
        self.rest = rest
        self._make = make

    def __len__(self) -> int:
        return len(self.whole.tensors) + len(self.rest)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        numbers = range(len(self))[index]
        return [self._item(number) for number in numbers] if isinstance(numbers, range) else self._item(numbers)

    def __iter__(self) -> Iterator[ReadItem]:
        return map(self._item, range(len(self)))

    def _item(self, number: int) -> ReadItem:
        num_whole = len(self.whole.tensors)
        return self._make(number) if number < num_whole else self.rest[number - num_whole]
