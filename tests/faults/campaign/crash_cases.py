"""What is saved beside what when a process dies: the scenarios, and which of them with which states a campaign runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from faults.campaign.crash_ranks import Link, PeerGoneError, save_as_rank
from faults.campaign.crash_states import State

from dcp_engine import ShardWriter
from dcp_engine.storage.epochs import EpochClaim
from dcp_engine.storage.root import RunRoot
from dcp_engine.storage.steps import step_name

__all__ = ["SCENARIOS", "Case", "keep_two"]

SCENARIOS: Final = {
    "first": "into an empty directory, which does not exist yet",
    "next": "beside an older step",
    "overwrite": "over the same step, names exchanged",
    "two renames": "over the same step, where names cannot be exchanged",
    "retention": "under a claim of the root, beside two older steps and a dead attempt; then LATEST moves and the oldest step goes",
    "again": "once more after a failed save, by the same writer, which removes what that left",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One save, of which every call is a place to die.

    Attributes:
        scenario: of ``SCENARIOS``.
        kind: of the state, of ``crash_states.KINDS``.
        world_size: ranks that save.
        codec: of the writer.
        threads: of the writer. With one, the order of calls is the same in every run.
        version: from which the values of the states are made.
    """

    scenario: str
    kind: str
    world_size: int
    codec: str = "raw"
    threads: int = 1
    version: int = 0

    def __str__(self) -> str:
        return f"{self.scenario} save of {self.kind}, {self.world_size} ranks, {self.codec}, {self.threads} threads, values {self.version}"

    @property
    def replaces(self) -> bool:
        """The step that is saved is there already."""
        return self.scenario in ("overwrite", "two renames")

    @property
    def step(self) -> int:
        """The step that is saved."""
        return 3 if self.scenario == "retention" else 2

    @property
    def old_steps(self) -> tuple[int, ...]:
        """The steps that are there before."""
        return {"first": (), "next": (1,), "again": (1,), "retention": (1, 2)}.get(self.scenario, (self.step,))

    @property
    def retired_step(self) -> int | None:
        """The step that goes when the new one is there."""
        return 1 if self.scenario == "retention" else None

    def path(self, root: str) -> str:
        """Where the step is saved."""
        return os.path.join(root, step_name(self.step))

    def save(self, link: Link, state: State, root: str, *, goes_on: bool) -> None:
        """What a rank does. ``goes_on``: one that sees another go lives on and begins its next save, whose first call cleans up."""
        claims = (
            [RunRoot(root).claim("run")] * self.world_size if link.rank == 0 and self.scenario == "retention" else [None] * self.world_size
        )
        claim = link.scatter(claims)
        writer = ShardWriter(self.path(root), codec=self.codec, threads=self.threads, overwrite=self.replaces, fence=claim)
        try:
            if self.scenario == "again":
                try:
                    save_as_rank(link, state.ranks[link.rank], writer, give_up=link.rank == self.world_size - 1)
                except PeerGoneError:
                    link.tell()
            save_as_rank(link, state.ranks[link.rank], writer)
        except PeerGoneError:
            if goes_on:
                writer.set_up_storage_writer(link.rank == 0, rank=link.rank, use_collectives=True)
            raise
        if claim is not None and link.rank == 0:
            keep_two(RunRoot(root), self.step, claim)


def keep_two(root: RunRoot, step: int, claim: EpochClaim) -> None:
    """What a run does when a step is published: two stay."""
    root.set_latest(step, claim)
    root.prune(2, claim)
    root.clean(claim, older_than_secs=0)
