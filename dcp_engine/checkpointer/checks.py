"""Whether what was restored is what was saved, part by part. Pure: what both sides say of themselves goes in, what differs comes out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from dcp_engine.checkpointer.cut import Fact, disagreements_by_fact
from dcp_engine.checkpointer.probe import ProbeResult
from dcp_engine.checkpointer.read_back import ReadBack
from dcp_engine.checkpointer.recorded import Recorded
from dcp_engine.planners.load_report import LoadReport
from dcp_engine.train_state import Difference, TrainStateReport
from dcp_engine.train_state.report import Moved, Resized
from dcp_engine.train_state.scheduling import OptimizerCount, SchedulerCount

__all__ = ["COMPONENTS", "Finding", "Severity", "check_probe", "check_restored", "merged"]

Severity = Literal["error", "warning", "note"]

COMPONENTS: Final = ("model", "optimizer", "scaler", "scheduler", "progress", "rng", "data", "grads", "ema", "extra", "topology", "probe")
"""In the order in which a person should look: cause before effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check after a restore has to say.

    Attributes:
        kind: what it is, append-only: ``"missing_key"``, ``"unexpected_key"``, ``"cast"``, ``"not_stored"``, ``"not_restored"``,
            ``"left_out"`` (on purpose, which takes its level away all the same), ``"not_taken_up"``, ``"no_optimizer_state"``,
            ``"moved_parameter"``, ``"mixed_steps"``, ``"idle_counters"``, ``"other_position"``, ``"other_batches"``, ``"resized"``,
            ``"topology"``, ``"probe"``.
        component: whose it is, one of :data:`COMPONENTS`.
        text: one sentence that names the part, what was saved and what is there.
        severity: ``"error"``: the component is not what was saved. ``"warning"``: it is, and training goes on otherwise all the same.
            ``"note"``: worth knowing.
        rank: on which rank; None: on all.
    """

    kind: str
    component: str
    text: str
    severity: Severity
    rank: int | None = None

    def __str__(self) -> str:
        place = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.severity}: {self.component}: {self.text}{place}"


def check_restored(
    saved: Recorded | None,
    now: Recorded,
    *,
    restored: Collection[str],
    rank: int,
    report: TrainStateReport | None = None,
    load_report: LoadReport | None = None,
    read_back: ReadBack | None = None,
    scheduler_counts: SchedulerCount | None = None,
    optimizer_counts: OptimizerCount | None = "applied",
) -> tuple[Finding, ...]:
    """What one rank finds after a restore, in the order in which a person should look. Findings of all ranks are put together by
    :func:`merged`.

    Args:
        saved: what the checkpoint's metadata says of the state; None: nothing.
        now: what this rank says of the restored state, with counts that lie on a device.
        restored: the components that were restored.
        rank: of the caller.
        report: of the ``TrainState``; None for another kind of state.
        load_report: of the load planner; None without one of ours.
        read_back: of :func:`~dcp_engine.checkpointer.read_back.read_back`; None where that was not asked.
        scheduler_counts: of the ``TrainState``.
        optimizer_counts: of the ``TrainState``.
    """
    findings = [*_of_components(saved, now, restored), *_of_keys(load_report)]
    if report is not None:
        findings += [_moved(one) for one in report.moved]
        findings += [_resized(one) for one in report.resized]
    if read_back is not None:
        findings += [_not_taken_up(one) for one in read_back.differences]
        findings += [_not_begun(label) for label in read_back.not_begun if now.facts.get("progress.updates_applied", 0)]
    findings += _idle_counters(now.facts)
    others = [] if saved is None else _of_facts(saved.facts, now.facts, restored)
    if not others:  # else it is they that disagree
        mixed = disagreements_by_fact(now.facts, scheduler_counts=scheduler_counts, optimizer_counts=optimizer_counts)
        findings += [_mixed(name, text) for name, text in mixed.items()]
    if saved is not None:
        findings += [*others, *_of_batches(saved.facts, now.facts, restored), *_of_topology(saved, now, rank)]
    return _sorted(findings)


def check_probe(result: ProbeResult | None, *, was_recorded: bool) -> tuple[Finding, ...]:
    """What the probe's comparison says of the restored state.

    Args:
        result: None: no probe was given, or nothing was recorded.
        was_recorded: whether the checkpoint has values of a probe.
    """
    if result is None:
        if not was_recorded:
            return ()
        text = "the checkpoint has values of a probe, and none was given to hold against them"
        return (Finding(kind="probe", component="probe", text=text, severity="note"),)
    if result.ok:
        return ()
    rounding = result.max_relative_difference <= result.tolerance
    return (Finding(kind="probe", component="probe", text=result.text, severity="warning" if rounding else "error"),)


def merged(findings_by_rank: Sequence[Sequence[Finding]]) -> tuple[Finding, ...]:
    """The findings of all ranks: one that all of them have is of none, others say of which rank they are.

    Args:
        findings_by_rank: of each rank, by rank.
    """
    seen: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(findings_by_rank):
        for finding in findings:
            ranks = seen.setdefault(replace(finding, rank=None), [])
            if rank not in ranks:
                ranks.append(rank)
    everywhere = len(findings_by_rank)
    return _sorted(
        replace(finding, rank=rank) for finding, ranks in seen.items() for rank in ([None] if len(ranks) == everywhere else ranks)
    )


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: _place(finding.component)))


def _place(component: str) -> int:
    return COMPONENTS.index(component) if component in COMPONENTS else COMPONENTS.index("extra")


def _component_of(key: str) -> str:
    name = key.partition(".")[0]
    return name if name in COMPONENTS else "extra"


def _of_components(saved: Recorded | None, now: Recorded, restored: Collection[str]) -> list[Finding]:
    findings = []
    stored = () if saved is None else saved.components
    for name in (*stored, *(name for name in now.components if name not in stored)):
        if name in restored:
            continue
        if name not in stored and saved is not None:
            kind, text = "not_stored", f"the state has {name}, and the checkpoint has none: it is as it was before the restore"
        elif name not in now.components:
            kind, text = "not_restored", f"the checkpoint has {name}, and the state has nothing to take it up"
        else:
            kind, text = "left_out", f"{name} was left out: it is as it was before the restore"
        severity: Severity = "note" if kind == "left_out" else "error"
        findings.append(Finding(kind=kind, component=_component_of(name), text=text, severity=severity))
    return findings


def _of_keys(report: LoadReport | None) -> list[Finding]:
    if report is None:
        return []
    missing = [("missing_key", key, f"{key} is not in the checkpoint: it is as it was before the restore") for key in report.missing]
    unexpected = [("unexpected_key", key, f"{key} is in the checkpoint, and the state has no place for it") for key in report.unexpected]
    findings = [
        Finding(kind=kind, component=_component_of(_below(key)), text=text, severity="error") for kind, key, text in missing + unexpected
    ]
    for cast in report.cast:
        text = f"{cast.key} was stored as {cast.stored} and is {cast.wanted}" + ("" if cast.exact else ": rounded")
        findings.append(Finding(kind="cast", component=_component_of(_below(cast.key)), text=text, severity="warning"))
    return findings


def _below(key: str) -> str:
    """A key of the checkpoint within the training state, which lies below a key of its own."""
    first, _, rest = key.partition(".")
    return rest if rest and first not in COMPONENTS else key


def _moved(one: Moved) -> Finding:
    of = f" of optimizer {one.optimizer!r}" if one.optimizer else ""
    text = f"{one.parameter} was in group {one.saved_group}{of} and is in group {one.group}: it trains on with that group's settings"
    return Finding(kind="moved_parameter", component="optimizer", text=text, severity="warning")


def _resized(one: Resized) -> Finding:
    text = f"{one.key} was saved by {one.saved_world_size} ranks and there are {one.world_size}: took {one.took}"
    # All that are gone, and not those that this rank would have read: what all ranks say in the same words is told once.
    gone = [] if one.took == "by function" else list(range(one.world_size, one.saved_world_size))
    text += f", dropped those of ranks {gone}" if gone else ""
    # Random numbers of a rank that is gone are of no use to anybody; whatever else it kept for itself is lost.
    lost = gone and one.key != "rng"
    severity: Severity = "error" if one.took == "nothing" else "warning" if lost else "note"
    return Finding(kind="resized", component=_component_of(one.key), text=text, severity=severity)


def _not_taken_up(difference: Difference) -> Finding:
    severity: Severity = "warning" if difference.text == "was not expected" else "error"
    text = f"{difference.key} is not what was loaded: {difference.text}"
    return Finding(kind="not_taken_up", component=_component_of(difference.component), text=text, severity=severity)


def _not_begun(label: str) -> Finding:
    name = f"optimizer {label!r}" if label else "the optimizer"
    text = f"{name} has no state for any of its parameters, although updates were applied: it was lost before the save"
    return Finding(kind="no_optimizer_state", component="optimizer", text=text, severity="error")


def _mixed(name: str, text: str) -> Finding:
    return Finding(kind="mixed_steps", component=_component_of(name), text=text, severity="error")


def _idle_counters(facts: Mapping[str, Fact]) -> list[Finding]:
    if not facts["step"] or facts.get("progress.step", 1) or facts.get("progress.epoch", 1):
        return []
    text = f"the counters say that nothing was trained, and the checkpoint is of step {facts['step']}: no check could go by them"
    return [Finding(kind="idle_counters", component="progress", text=text, severity="warning")]


def _of_facts(saved: Mapping[str, Fact], now: Mapping[str, Fact], restored: Collection[str]) -> list[Finding]:
    """Facts that are others than at the save. Those of a state that has nothing to tell, and of parts that were left out, are not asked."""
    findings = []
    for name, then in saved.items():
        component = name.partition(".")[0]
        if component not in restored or _is_of_layout(name) or (name.endswith(".next_batch_hash") and not _same_batches(name, saved, now)):
            continue
        if name not in now:
            kind, text = _missing_fact(component, name, then)
        elif now[name] != then:
            kind = "other_position"
            text = f"{name} is {now[name]!r}, and was {then!r} when it was saved"
        else:
            continue
        findings.append(Finding(kind=kind, component=_component_of(component), text=text, severity="error"))
    return findings


def _missing_fact(component: str, name: str, then: Fact) -> tuple[str, str]:
    if component == "optimizer":
        return "no_optimizer_state", f"{name} had taken {then} steps when it was saved, and has no state now"
    return "other_position", f"{name} was {then!r} when it was saved, and there is no such thing now"


def _is_of_layout(name: str) -> bool:
    """What changes with the number of ranks, or is 0 wherever a checkpoint may be."""
    return name.endswith((".global_batch", ".world_size")) or name == "progress.grads_stepped"


def _same_batches(name: str, saved: Mapping[str, Fact], now: Mapping[str, Fact]) -> bool:
    size = name.removesuffix("next_batch_hash") + "global_batch"
    return saved.get(size) == now.get(size)


def _of_batches(saved: Mapping[str, Fact], now: Mapping[str, Fact], restored: Collection[str]) -> list[Finding]:
    if "data" not in restored:
        return []
    return [
        Finding(
            kind="other_batches",
            component="data",
            text=f"{name.removesuffix('.global_batch')} hands out {now[name]} samples a step over all ranks, and handed out {then}",
            severity="warning",
        )
        for name, then in saved.items()
        if name.startswith("data") and name.endswith(".global_batch") and name in now and now[name] != then
    ]


def _of_topology(saved: Recorded, now: Recorded, rank: int) -> list[Finding]:
    if saved.world_size != now.world_size:
        text = f"{now.world_size} ranks, and {saved.world_size} saved"
    elif rank == 0 and saved.layout != now.layout:  # other ranks may hold other parts of the model, and only one has left its word
        text = f"parameters lie {'; '.join(now.layout) or 'nowhere'}, and lay {'; '.join(saved.layout) or 'nowhere'}"
    else:
        return []
    return [Finding(kind="topology", component="topology", text=text, severity="note")]
