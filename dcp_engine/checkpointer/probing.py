"""Runs a probe on the model of a training state, and all checks on a state that was restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_engine.checkpointer.checks import Finding, check_probe, check_restored, merged
from dcp_engine.checkpointer.parts import Parts
from dcp_engine.checkpointer.probe import ProbeRecord, ProbeResult, compare, run_probe
from dcp_engine.checkpointer.ranks import Ranks
from dcp_engine.checkpointer.read_back import read_back
from dcp_engine.checkpointer.recorded import Recorded, recorded
from dcp_engine.checkpointer.report import RestoreReport, decide_level
from dcp_engine.checkpointer.restoring import Restored
from dcp_engine.checkpointer.rng_guard import generators_of
from dcp_engine.components import WELL_KNOWN
from dcp_engine.train_state import TrainState

__all__ = ["probed", "report_of"]


def probed(state: TrainState | None, probe: Callable[[], Any]) -> ProbeRecord:
    """What a probe gives, without a trace in training."""
    if state is None:
        return run_probe(probe)
    return run_probe(probe, modules=state.parts("model").values(), generators=generators_of(state))


def report_of(restored: Restored, parts: Parts, ranks: Ranks, *, probe: Callable[[], Any] | None, tolerance: float) -> RestoreReport:
    """Check what was restored, on all ranks, and say what it is worth. All ranks call it alike, and get the same findings.

    Args:
        restored: the step.
        parts: what it was loaded into.
        ranks: all of the job.
        probe: as at the save; None: there is none.
        tolerance: of the probe, on another topology.

    Raises:
        ProbeError: it cannot run.
    """
    state, saved = parts.train_state, restored.record.recorded
    components = parts.components_of(state) if state is not None else [WELL_KNOWN[key] for key in parts.values if key in WELL_KNOWN]
    with restored.phases.of("check"):
        # An object of the state that fails to tell its own on one rank must not leave the others waiting.
        told = ranks.everyone_makes(lambda: _checked(restored, parts, ranks))
        findings = merged([found for _, found in told])
        now = told[ranks.rank][0]
    result = None
    with restored.phases.of("probe"):
        if probe is not None:
            result = _compared(saved, now, parts, ranks, probe, tolerance)
        findings += check_probe(result, was_recorded=saved is not None and saved.probe is not None)  # which a person looks at last
    verdict = decide_level(restored=components, findings=findings)
    return RestoreReport(
        step=restored.info.step,
        path=restored.info.path,
        level=verdict.level,
        quality=verdict.quality,
        why_not_more=verdict.why_not_more,
        findings=findings,
        passed_over=restored.passed_over,
        phases=restored.phases.secs,
        probe=result,
        state_report=None if state is None else state.report,
        saved_world_size=restored.info.world_size if saved is None else saved.world_size,
        world_size=ranks.size,
    )


def _checked(restored: Restored, parts: Parts, ranks: Ranks) -> tuple[Recorded, tuple[Finding, ...]]:
    """What this rank says of the restored state, and finds in it. Of a state that is none of ours the planner's report is all there is."""
    state = parts.train_state
    now = recorded(state, restored.info.step, world_size=ranks.size, wait_for_device=True)
    if state is None:
        return now, check_restored(None, now, restored=(), rank=ranks.rank, load_report=restored.load_report)
    key = next(key for key, one in parts.whole_states.items() if one is state)
    findings = check_restored(
        restored.record.recorded,
        now,
        restored=parts.components[key],
        rank=ranks.rank,
        report=state.report,
        load_report=restored.load_report,
        read_back=read_back(state, restored.loaded[key]),
        scheduler_counts=state.scheduler_counts,
        optimizer_counts=state.optimizer_counts,
    )
    return now, findings


def _compared(
    saved: Recorded | None, now: Recorded, parts: Parts, ranks: Ranks, probe: Callable[[], Any], tolerance: float
) -> ProbeResult | None:
    """How the first rank's values compare with those recorded, which are of the first rank, too."""

    def run() -> ProbeResult | None:
        values = probed(parts.train_state, probe)
        if not ranks.is_first or saved is None or saved.probe is None:
            return None
        same = (saved.world_size, saved.layout) == (now.world_size, now.layout)
        return compare(saved.probe, values, same_topology=same, tolerance=tolerance)

    return ranks.everyone_makes(run)[0]
