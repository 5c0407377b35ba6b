"""What a writer puts into plans, so that what comes back can be told from what belongs to another save."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from dcp_engine.storage.attempts import AttemptRef

__all__ = ["LocalTicket", "Ticket", "attempt_of", "token_of"]


@dataclass(frozen=True, slots=True)
class LocalTicket:
    """What a rank puts into its local plan: proof, when the central plan comes back, that it belongs to this save of this rank."""

    token: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the coordinator adds to a rank's plan: where to write, and as whom."""

    token: str
    attempt: AttemptRef
    rank: int
    world_size: int


def token_of(plan: SavePlan) -> str:
    """The token in a rank's local plan; empty in a plan that is not of :class:`~dcp_engine.storage.ShardWriter`."""
    return plan.storage_data.token if isinstance(plan.storage_data, LocalTicket) else ""


def attempt_of(plan: SavePlan) -> AttemptRef | None:
    """The attempt that a central plan belongs to; None in a plan that is not of :class:`~dcp_engine.storage.ShardWriter`."""
    return plan.storage_data.attempt if isinstance(plan.storage_data, Ticket) else None
