"""The ranks of a checkpointer, and how they agree on something before they do it."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_engine.background.members import members_of
from dcp_engine.errors import CoordinationError, UsageError
from dcp_engine.storage.rank_group import RankGroup

__all__ = ["Ranks"]

_DOING = "ranks agreed on a save or a restore"
_REMEDY = "call save() and restore() on all ranks alike, in the same order; else see why another rank died or did not come in time"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Told:
    """What one rank tells the others."""

    value: Any


class Ranks:
    """Ranks that make the same calls in the same order, each in the thread that trains.

    Args:
        group: gloo, for nobody else; None: this process alone.
        leader: the lowest of them, by its number among all ranks of the job.

    Attributes:
        group, leader: as given.
        rank: of this process among them.
        size: how many there are.

    Thread-safety: none; one thread makes all calls.
    """

    def __init__(self, group: dist.ProcessGroup | None, leader: int = 0) -> None:
        self.group = group
        self.leader = leader
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, *, timeout_secs: float) -> Ranks:
        """A gloo group of their own for these ranks, all of which call this: what they agree on comes between no collectives of training.

        Args:
            process_group: whose ranks. None: all.
            timeout_secs: of its collectives.

        Raises:
            BackgroundSaveError: this rank is not in the group. CoordinationError: the group cannot be made.
        """
        members = members_of(process_group)
        if members is None:
            return cls(None)
        return cls(_new_group(None if process_group is None else members, timeout_secs))

    def of_node(self, *, timeout_secs: float) -> Ranks:
        """Those of them that are on this node. All ranks call this.

        A node is what torchrun takes for one (``GROUP_RANK``), or else a host.
        """
        if self.group is None:
            return self
        node = os.environ.get("GROUP_RANK") or platform.node()
        nodes = self.everyone(node)
        members = [dist.get_global_rank(self.group, rank) for rank, name in enumerate(nodes) if name == node]
        return Ranks(_new_group(members, timeout_secs), nodes.index(node))

    def require_whole_job(self) -> None:
        """Refuse what was made before the job's ranks knew each other: each of them would take itself for the whole job.

        Raises:
            UsageError: says so.
        """
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                "the checkpointer was made before the process group: this rank would save as if it were alone",
                expected="init_process_group(), then Checkpointer(...)",
                found=f"a process group of {dist.get_world_size()} ranks by now",
                rank=dist.get_rank(),
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the lowest of them."""
        return self.rank == 0

    def first(self, make: Callable[[], _Value]) -> _Value:
        """What the first rank makes, told to all.

        Raises:
            DcpEngineError: on all ranks, where it fails. It must be picklable.
        """
        if self.group is None:
            return make()
        told: list[Any] = self.everyone_makes(lambda: make() if self.is_first else None)
        value: _Value = told[0]
        return value

    def everyone(self, value: _Value) -> list[_Value]:
        """The values of all, by rank."""
        return self.everyone_makes(lambda: value)

    def everyone_makes(self, make: Callable[[], _Value]) -> list[_Value]:
        """What each rank makes, told to all.

        Raises:
            DcpEngineError: of the lowest rank that fails, on all of them.
        """
        if self.group is None:
            return [make()]
        told: _Told | None = None
        error: BaseException | None = None
        try:
            told = _Told(make())
        except Exception as failure:  # noqa: BLE001  whatever it is, it is told to all
            error = failure
        return [one.value for one in RankGroup(self.group, doing=_DOING, remedy=_REMEDY).exchange(told, error, _Told)]

    def agree(self, error: Exception | None) -> None:
        """Go on if no rank has an error.

        Raises:
            DcpEngineError: of the lowest rank that has one, on all of them.
        """
        if self.group is not None:
            RankGroup(self.group, doing=_DOING, remedy=_REMEDY).agree(error)
        elif error is not None:
            raise error

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank. Raises as :meth:`highest`."""
        return bool(self.highest(int(flag)))

    def highest(self, value: int) -> int:
        """The greatest of all ranks' numbers: one all-reduce.

        Raises:
            CoordinationError: a rank is gone.
        """
        if self.group is None:
            return value
        number = torch.tensor([value])
        try:
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:  # that is what torch.distributed raises
            raise CoordinationError("the ranks that save have lost each other", found=str(error)[:1000], remedy=_REMEDY) from error
        return int(number.item())

    def close(self) -> None:
        """Give up the group, where the job has not destroyed it already."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError, RuntimeError):  # destroyed before, with the group whose part it is
                dist.destroy_process_group(group)


def _new_group(members: list[int] | None, timeout_secs: float) -> dist.ProcessGroup:
    try:
        group = dist.new_group(
            members, backend="gloo", timeout=timedelta(seconds=timeout_secs), use_local_synchronization=members is not None
        )
    except RuntimeError as error:
        raise CoordinationError("the process group of a checkpointer cannot be made", found=str(error)[:1000]) from error
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    return group
