"""Whether what the ranks are about to save belongs to one step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcp_engine.errors import MixedStepsError

__all__ = ["Cut", "require_one_step"]

_MOST_TOLD = 20


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one rank stands. Crosses ranks by pickle.

    Attributes:
        facts: name -> number or text. Ranks that have a fact of one name must have the same; one that lacks it (a stage of a pipeline
            without that optimizer, say) says nothing.
        disagreements: what of this rank's state does not belong to one step already, in words.
    """

    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    disagreements: tuple[str, ...] = ()


def require_one_step(cuts: Sequence[Cut]) -> None:
    """Return if all ranks are at one step.

    Args:
        cuts: by rank.

    Raises:
        MixedStepsError: naming all that disagrees; its ``rank`` is the first one concerned.
    """
    found = [(rank, f"rank {rank}: {text}" if len(cuts) > 1 else text) for rank, cut in enumerate(cuts) for text in cut.disagreements]
    for name in dict.fromkeys(name for cut in cuts for name in cut.facts):
        by_value: dict[int | float | str, list[int]] = {}
        for rank, cut in enumerate(cuts):
            if name in cut.facts:
                by_value.setdefault(cut.facts[name], []).append(rank)
        if len(by_value) > 1:
            # The odd ones out are those of the smaller group; the first rank's group wins a draw.
            groups = sorted(by_value.items(), key=lambda group: -len(group[1]))
            values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups)
            found.append((groups[1][1][0], f"{name} is {values}"))
    if found:
        texts = tuple(text for _, text in found)
        raise MixedStepsError(
            "the state is not one step's",
            disagreements=texts,
            rank=found[0][0],
            expected="optimizers, schedulers, counters and data of all ranks at one step",
            found="; ".join(texts[:_MOST_TOLD]) + (f"; and {len(texts) - _MOST_TOLD} more" if len(texts) > _MOST_TOLD else ""),
            remedy="save between two steps, on all ranks after the same one, and step each scheduler, and count, once an update; a loop "
            "with rhythms of its own tells TrainState: optimizer_counts=None, scheduler_counts",
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
