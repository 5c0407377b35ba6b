"""What goes back to a rank: which of its own boxes it is to write, and which of them only in part."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import WriteItem

from dcp_engine.errors import PlanError
from dcp_engine.plan_columns import PlanColumns, PlanItems, pack_integers, unpack_integers

__all__ = ["Choice", "ChosenItems"]

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Some rows of a rank's local plan.

    Attributes:
        num_rows: rows of that plan.
        kept: numbers of the rows, ascending.
        cut: numbers of the rows of which only a part is meant, ascending, each also in ``kept``.
        offsets: of these parts, ``[num_cut, width]``, in elements.
        sizes: of these parts, ``[num_cut, width]``, in elements.
    """

    num_rows: int
    kept: Int64s
    cut: Int64s
    offsets: Int64s
    sizes: Int64s

    def of(self, columns: PlanColumns) -> PlanColumns:
        """The chosen rows of the rank's own columns.

        Raises:
            PlanError: the choice was made of another plan.
        """
        if len(columns) != self.num_rows:
            raise PlanError(
                "the plan that came back was not made for what this rank sent",
                expected=f"a choice among {len(columns)} items",
                found=f"a choice among {self.num_rows}",
                remedy="pass the same kind of planner to dcp.save on every rank",
            )
        if len(self.kept) == self.num_rows and not len(self.cut):
            return columns
        offsets, sizes = columns.offsets[self.kept], columns.sizes[self.kept]
        where = np.searchsorted(self.kept, self.cut)
        width = offsets.shape[1]  # other ranks may have tensors of more dimensions
        offsets[where], sizes[where] = self.offsets[:, :width], self.sizes[:, :width]
        return PlanColumns(columns.keys, columns.entries[self.kept], offsets, sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        gone = np.ones(self.num_rows, dtype=np.int64)
        gone[self.kept] = 0
        boxes = np.concatenate((self.cut[:, None], self.offsets, self.sizes), axis=1)
        return (_unpacked, (pack_integers(gone), pack_integers(boxes.T), self.offsets.shape[1]))


def _unpacked(gone: bytes | int, boxes: bytes | int, width: int) -> Choice:
    rows = unpack_integers(gone, np.int64)
    columns = unpack_integers(boxes, np.int64).reshape(2 * width + 1, -1).T
    return Choice(len(rows), np.flatnonzero(rows == 0), columns[:, 0], columns[:, 1 : width + 1], columns[:, width + 1 :])


class ChosenItems(PlanItems):
    """The items of one rank in the global plan. Only the choice travels: the rank has the columns.

    Args:
        choice: of the rank's rows.
        local: the columns that the rank sent; None on the way, until ``finish_plan`` puts the two together.
    """

    def __init__(self, choice: Choice, local: PlanColumns | None = None) -> None:
        self.choice = choice
        self._local = local
        self._chosen: PlanColumns | None = None
        self._made: list[WriteItem] | None = None

    def columns(self, known: MutableMapping[Any, Any] | None = None) -> PlanColumns | None:
        """The chosen rows; None where the items may have become something else, or are not put together yet."""
        if self._local is not None and self._chosen is None:
            self._chosen = self.choice.of(self._local)
        return self._chosen if self._made is None else None

    def __len__(self) -> int:
        return len(self.choice.kept) if self._made is None else len(self._made)

    def _items(self) -> list[WriteItem]:
        if self._made is None and self._local is None:
            raise PlanError("the items of a plan can be looked at once finish_plan has taken it", remedy="override finish_plan to see them")
        return super()._items()

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (self._made,)) if self._made is not None else (ChosenItems, (self.choice,))
