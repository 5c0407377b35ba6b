"""What a restore is worth: the level that was reached, why not more, and the report that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal

from dcp_engine.checkpointer.checks import Finding
from dcp_engine.checkpointer.probe import ProbeResult
from dcp_engine.train_state import TrainStateReport

__all__ = ["Quality", "RestoreLevel", "RestoreReport", "Verdict", "decide_level"]

Quality = Literal["recoverable", "reproducible", "bitwise"]


class RestoreLevel(IntEnum):
    """How much of what makes the next step is restored. Each level has all that those below it have.

    Attributes:
        NONE: not even the parameters are those that were saved.
        PARAMETERS: the model, with its buffers.
        OPTIMIZER: the optimizers' states and settings.
        PROGRESS: counters, schedulers, scaler.
        RANDOMNESS: every rank's random number generators.
        TRAJECTORY: the position in the data, and all else that the state holds: nothing is left that would make the next step another.
    """

    NONE = 0
    PARAMETERS = 1
    OPTIMIZER = 2
    PROGRESS = 3
    RANDOMNESS = 4
    TRAJECTORY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What :func:`decide_level` says.

    Attributes:
        level: that was reached.
        quality: ``"bitwise"``: the run goes on as the run that never stopped, on kernels that are deterministic. ``"reproducible"``: all is
            restored, and sums round otherwise, on another topology for instance. ``"recoverable"``: training can go on, as another run.
        why_not_more: what stands between this and the highest level and quality, first things first; empty for those.
    """

    level: RestoreLevel
    quality: Quality
    why_not_more: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What one restore did, and what it is worth.

    Attributes:
        step: that was restored.
        path: directory or URL of its checkpoint.
        level: how much was restored.
        quality: what that is worth, see :class:`Verdict`.
        why_not_more: as in :class:`Verdict`.
        findings: of the checks, on all ranks, in the order in which a person should look.
        passed_over: newer steps that were not taken, with the text of the error of each, newest first.
        phases: seconds by phase: ``"decide"``, ``"read"``, ``"apply"``, ``"check"``, ``"probe"``; those that there were.
        probe: how the probe's values compare; None where none was recorded, or none was given.
        state_report: of this rank's ``TrainState``; None for another kind of state.
        saved_world_size: ranks that saved; None where the checkpoint does not say.
        world_size: ranks that restored.
    """

    step: int
    path: str
    level: RestoreLevel
    quality: Quality
    why_not_more: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    passed_over: tuple[tuple[int, str], ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    probe: ProbeResult | None = None
    state_report: TrainStateReport | None = None
    saved_world_size: int | None = None
    world_size: int = 1

    @property
    def total_secs(self) -> float:
        """Seconds from the call to the end of the checks: what a restart costs, without the start of the processes."""
        return sum(self.phases.values())

    def lines(self) -> list[str]:
        """All of it in words, a line each, in the order in which a person should look."""
        moved = "" if self.saved_world_size in (None, self.world_size) else f", saved by {self.saved_world_size} ranks"
        return [
            f"step {self.step} restored from {self.path} on {self.world_size} rank{'' if self.world_size == 1 else 's'}{moved}",
            *(f"passed over step {step}: {text}" for step, text in self.passed_over),
            f"level {self.level.name.lower()}, {self.quality}",
            *(f"not more because {text}" for text in self.why_not_more),
            *(str(finding) for finding in self.findings),
            *([] if self.probe is None else [f"probe: {self.probe.text}"]),
            f"{self.total_secs:.3f} s: " + ", ".join(f"{phase} {secs:.3f}" for phase, secs in self.phases.items()),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


_LEVELS: Final[Mapping[RestoreLevel, tuple[str, ...]]] = {
    RestoreLevel.PARAMETERS: ("model", "probe"),
    RestoreLevel.OPTIMIZER: ("optimizer",),
    RestoreLevel.PROGRESS: ("progress", "scheduler", "scaler"),
    RestoreLevel.RANDOMNESS: ("rng",),
    RestoreLevel.TRAJECTORY: ("data", "grads", "ema", "extra"),
}
"""What each level adds. The first component has to be there; the others are what they are where a state has them."""

_ABSENT: Final = {
    "model": "the state has none",
    "optimizer": "the state has none",
    "progress": "the state has none",
    "rng": "the state leaves the random number generators out",
    "data": "the state has none: nothing says which batch comes next",
}


def decide_level(*, restored: Collection[str], findings: Sequence[Finding]) -> Verdict:
    """What a restore is worth. Pure.

    A level is reached where no component of it, and of the levels below, was left out, and no finding of theirs is an error. It is
    ``"bitwise"`` at the highest level without any warning, on the same topology; ``"reproducible"`` where nothing but the topology, or the
    last bits of the probe, is other; else ``"recoverable"``.

    Args:
        restored: the components that were restored.
        findings: of all ranks, those of the probe among them.
    """
    reasons: list[str] = []
    level = RestoreLevel.NONE
    for one, components in _LEVELS.items():
        blocked = _blocking(components, restored, findings)
        if not blocked and not reasons:
            level = one
        reasons += blocked
    warnings = [finding for finding in findings if finding.severity == "warning"]
    topology = [finding for finding in findings if finding.component == "topology"]
    reasons += [_reason(finding) for finding in (*warnings, *topology)]
    if level < RestoreLevel.TRAJECTORY or any(finding.component != "probe" for finding in warnings):
        quality: Quality = "recoverable"
    else:
        quality = "reproducible" if reasons else "bitwise"
    return Verdict(level=level, quality=quality, why_not_more=tuple(dict.fromkeys(reasons)))


def _blocking(components: tuple[str, ...], restored: Collection[str], findings: Sequence[Finding]) -> list[str]:
    told = [one for one in findings if one.component in components and (one.severity == "error" or one.kind == "left_out")]
    first = components[0]
    is_told = first in restored or any(finding.component == first for finding in told)
    return [*([] if is_told else [f"{first}: {_ABSENT[first]}"]), *map(_reason, told)]


def _reason(finding: Finding) -> str:
    return f"{finding.component}: {finding.text}" + ("" if finding.rank is None else f" (rank {finding.rank})")
