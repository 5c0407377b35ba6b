"""The ranks of a saver, and the part of the store that they share."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from dcp_engine import compat
from dcp_engine.errors import BackgroundSaveError

__all__ = ["members_of", "store_of"]


def members_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """The ranks that save; None without any process group.

    Raises:
        BackgroundSaveError: this rank is none of them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if group is not None and not isinstance(group, dist.ProcessGroup):  # what new_group gives those that are not in it
        raise BackgroundSaveError("this rank is not in the process group that saves", rank=dist.get_rank())
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise BackgroundSaveError("this rank is not in the process group that saves", found=f"ranks {ranks}", rank=dist.get_rank())
    return ranks


def store_of(ranks: list[int] | None, rank: int) -> Any:
    """A part of the process group's store for one saver of these ranks: the first, second, ... that each of them makes belong together.

    Args:
        ranks: of :func:`members_of`.
        rank: of this one among them.

    Raises:
        BackgroundSaveError: there is no store.
    """
    if ranks is None:
        return dist.HashStore()  # type: ignore[attr-defined]
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    store = compat.default_store()
    if store is None:
        raise BackgroundSaveError("the default process group was made without a store, which MPI does", remedy="make it with gloo or NCCL")
    shared = dist.PrefixStore(f"dcp-engine/{name}", store)  # type: ignore[attr-defined]
    return dist.PrefixStore(str(shared.add(f"made/{rank}", 1)), shared)  # type: ignore[attr-defined]
