"""Whether a state's value can take what a checkpoint holds for its key: kind, shape and dtype, all offenders in one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_engine.errors import DtypeMismatchError, KindMismatchError, ShapeMismatchError, StateError
from dcp_engine.planners.catalogue import Entry
from dcp_engine.planners.dtype_policy import DtypePolicy, refusal
from dcp_engine.planners.local_shards import is_tensor_like

__all__ = ["Misfit", "check_dtype", "check_kind", "check_shape", "raise_misfits"]


@dataclass(frozen=True, slots=True)
class Misfit:
    """One key whose value cannot be loaded."""

    error: type[StateError]
    key: str
    stored: str
    wanted: str
    remedy: str


_TEXT: dict[type[StateError], str] = {
    KindMismatchError: "a tensor on one side and an object on the other",
    ShapeMismatchError: "of another shape in the checkpoint than in the state",
    DtypeMismatchError: "of another dtype in the checkpoint than in the state",
}
"""In the order in which they are raised."""


def check_kind(key: str, value: object, entry: Entry) -> Misfit | None:
    """A tensor is loaded into a tensor, an object replaces an object."""
    is_stored_tensor = isinstance(entry.stored, TensorStorageMetadata)
    if is_tensor_like(value) == is_stored_tensor:
        return None
    found = type(value).__name__
    if is_stored_tensor:
        assert isinstance(entry.stored, TensorStorageMetadata)
        size, dtype = list(entry.stored.size), entry.stored.properties.dtype
        return Misfit(KindMismatchError, key, f"tensor {size} {dtype}", found, f"put a tensor of shape {size} in place of the {found}")
    return Misfit(KindMismatchError, key, "an object", found, "put a value there that is not a tensor, such as None: it is replaced whole")


def check_shape(key: str, shape: Sequence[int], entry: Entry) -> Misfit | None:
    """The global shapes must be equal: nothing is broadcast or cut."""
    assert isinstance(entry.stored, TensorStorageMetadata)
    if entry.stored.size == shape:
        return None
    return Misfit(ShapeMismatchError, key, str(list(entry.stored.size)), str(list(shape)), "build the state with the sizes that were saved")


def check_dtype(key: str, dtype: torch.dtype, entry: Entry, policy: DtypePolicy) -> Misfit | None:
    """By the dtype policy."""
    assert isinstance(entry.stored, TensorStorageMetadata)
    stored = entry.stored.properties.dtype
    reason = refusal(stored, dtype, policy)
    return None if reason is None else Misfit(DtypeMismatchError, key, str(stored), str(dtype), reason)


def raise_misfits(misfits: Sequence[Misfit]) -> None:
    """Raises one error that lists all offenders, of the first kind of error found; returns where there are none."""
    if not misfits:
        return
    first = next(misfit for error in _TEXT for misfit in misfits if misfit.error is error)
    parts = []
    for error, text in _TEXT.items():
        some = [misfit for misfit in misfits if misfit.error is error]
        if some:
            listed = ", ".join(f"{misfit.key!r} (checkpoint {misfit.stored}, state {misfit.wanted})" for misfit in some)
            parts.append(f"{len(some)} value{'s' * (len(some) > 1)} {text}: {listed}")
    raise first.error("; ".join(parts), tensor=first.key, expected=first.stored, found=first.wanted, remedy=first.remedy)
