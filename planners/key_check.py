"""Missing and unexpected keys, decided once for all ranks.

A rank's state need not hold every key of a checkpoint: it may be one stage of a pipeline, or lie outside a tensor's mesh. So each rank
reports which keys it wants, one bit per key of the checkpoint, and the coordinator decides over the union.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_engine.errors import KeyMismatchError, PlanError, RankDisagreementError
from dcp_engine.planners.catalogue import Catalogue
from dcp_engine.planners.keys import Strictness, optimizer_slot, rename_hint

__all__ = ["KeyReport", "Verdict", "judge", "listed", "report_keys"]

_NUM_SHOWN = 10


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What one rank tells the coordinator, in ``LoadPlan.planner_data``."""

    digest: bytes
    """Of the catalogue that the bits refer to."""
    wanted: bytes
    """One bit per name of the catalogue, in its order: whether this rank's state has it."""
    missing: tuple[str, ...]
    """Keys of this rank's state that the catalogue lacks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the coordinator tells every rank: keys that are left alone, each sorted."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def report_keys(catalogue: Catalogue, wanted: Collection[str], missing: Iterable[str]) -> KeyReport:
    """One rank's report. Pure."""
    bits = np.fromiter((name in wanted for name in catalogue.entries), dtype=bool, count=len(catalogue.entries))
    return KeyReport(catalogue.digest, np.packbits(bits).tobytes(), tuple(missing))


def judge(catalogue: Catalogue, reports: Sequence[object], strictness: Strictness) -> Verdict:
    """The keys that no policy makes an error.

    An optimizer's state of one parameter that is there in part is always an error: a moment without the other one trains wrongly.

    Args:
        catalogue: the coordinator's.
        reports: of all ranks, in their order.

    Raises:
        KeyMismatchError: with the complete lists of missing and unexpected keys that are errors.
        RankDisagreementError: the ranks read different checkpoints.
        PlanError: a rank sent no report.
    """
    names = list(catalogue.entries)
    wanted = np.zeros(len(names), dtype=bool)
    missing: set[str] = set()
    for rank, report in enumerate(reports):
        if not isinstance(report, KeyReport):
            raise PlanError("a rank's plan carries no list of its keys", rank=rank, remedy="use the same load planner on all ranks")
        if report.digest != catalogue.digest:
            raise RankDisagreementError("ranks see checkpoints with different keys", rank=rank, remedy="give all ranks the same path")
        wanted |= np.unpackbits(np.frombuffer(report.wanted, dtype=np.uint8), count=len(names)).astype(bool)
        missing.update(report.missing)
    there = [name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]
    unexpected = [name for name, is_wanted in zip(names, wanted, strict=True) if not is_wanted]
    if not missing and not unexpected:
        return Verdict((), ())
    verdict = Verdict(tuple(sorted(missing)), tuple(unexpected))
    half = _half_absent(there, verdict, strictness)
    fatal = Verdict(*(tuple(key for key in keys if key in half or strictness.of(key)) for keys in (verdict.missing, verdict.unexpected)))
    if fatal.missing or fatal.unexpected:
        raise KeyMismatchError(
            _message(fatal, half), missing=fatal.missing, unexpected=fatal.unexpected, remedy=_remedy(there, fatal, half)
        )
    return verdict


def _slot(key: str, strictness: Strictness) -> str | None:
    """The parameter whose optimizer state ``key`` belongs to."""
    if not strictness.is_optimizer(key) and not key.startswith("state."):
        return None
    slot = optimizer_slot(key)
    return slot[0] if slot is not None else None


def _half_absent(there: Iterable[str], verdict: Verdict, strictness: Strictness) -> frozenset[str]:
    absent: dict[str, list[str]] = {}
    for key in (*verdict.missing, *verdict.unexpected):
        owner = _slot(key, strictness)
        if owner is not None:
            absent.setdefault(owner, []).append(key)
    if not absent:
        return frozenset()
    present = {_slot(key, strictness) for key in there}
    return frozenset(key for owner, keys in absent.items() if owner in present for key in keys)


def _message(fatal: Verdict, half: Collection[str]) -> str:
    text = f"an optimizer's state of a parameter is there only in part ({len(half)} keys); " if half else ""
    return text + listed(fatal)


def listed(verdict: Verdict) -> str:
    """Numbers of missing and unexpected keys, and the first few of each."""
    parts = []
    for keys, text in ((verdict.missing, "missing from the checkpoint"), (verdict.unexpected, "in the checkpoint, but in no rank's state")):
        if keys:
            more = f", and {len(keys) - _NUM_SHOWN} more" if len(keys) > _NUM_SHOWN else ""
            parts.append(f"{len(keys)} key{'s' * (len(keys) > 1)} {text}: {', '.join(keys[:_NUM_SHOWN])}{more}")
    return "; ".join(parts)


def _remedy(there: Iterable[str], fatal: Verdict, half: Collection[str]) -> str:
    hint = rename_hint(fatal.missing, fatal.unexpected)
    if hint is not None:
        return hint
    if half:
        return "keep the optimizer's settings as they were when it was saved; strict= does not allow this"
    slots = [key for key in fatal.unexpected if optimizer_slot(key) is not None]
    if slots and not any(optimizer_slot(key) for key in there):
        return (
            "a fresh optimizer has no state to load into: take its state from get_optimizer_state_dict (or get_state_dict) of"
            " torch.distributed.checkpoint.state_dict, which initialises it"
        )
    return "make the state as it was saved, select with keys=, or allow differences with strict={'model': False, ...}"
