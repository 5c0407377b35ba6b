"""Missing and unexpected keys: which of them are errors, decided once for all ranks.

A rank's state need not hold every key of a checkpoint: it may be one stage of a pipeline, or lie outside a tensor's mesh. So each rank
reports which keys it wants, one bit per key of the checkpoint, and the coordinator decides over the union.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_engine.components import DEFAULT_COMPONENT, SMALL_COMPONENT, WELL_KNOWN, ComponentMap
from dcp_engine.errors import InvalidOptionError, KeyMismatchError, PlanError, RankDisagreementError
from dcp_engine.planners.catalogue import Catalogue
from dcp_engine.planners.rename import rename_hint

__all__ = ["KeyReport", "Strictness", "Verdict", "judge", "listed", "report_keys"]

_NUM_SHOWN = 10


class Strictness:
    """Whether missing and unexpected keys are errors, by component.

    Args:
        strict: for all components, or per component; components that are not named are strict. Names of top-level entries that stand for a
            component (``optim``) are taken for it.
        components: glob pattern of keys -> component, before the well-known names (:mod:`dcp_engine.components`).

    Raises:
        InvalidOptionError: a name that is no component, or a value that is not a bool.

    Thread-safety: immutable after construction.
    """

    def __init__(self, strict: bool | Mapping[str, bool], components: Mapping[str, str] | None = None) -> None:
        self._components = ComponentMap(components)
        if isinstance(strict, bool):
            self._default, self._by_component = strict, {}
            return
        if not isinstance(strict, Mapping):
            raise InvalidOptionError("strict is neither a bool nor a mapping of components to bools", found=repr(strict))
        known = {DEFAULT_COMPONENT, SMALL_COMPONENT, *WELL_KNOWN.values(), *(components or {}).values()}
        self._default, self._by_component = True, dict[str, bool]()
        for name, value in strict.items():
            component = name if name in known else WELL_KNOWN.get(name)
            if component is None or not isinstance(value, bool):
                raise InvalidOptionError(
                    f"strict[{name!r}] is not a component's strictness",
                    expected=f"True or False for one of {', '.join(sorted(known))}",
                    found=repr(value),
                )
            self._by_component[component] = value

    def of(self, key: str) -> bool:
        """Whether a missing or unexpected ``key`` is an error."""
        return self._by_component.get(self._components.of(key), self._default) if self._by_component else self._default

    def component(self, key: str) -> str:
        """The component of ``key``, by which ``strict`` names it."""
        return self._components.of(key)

    def is_optimizer(self, key: str) -> bool:
        """Whether ``key`` is of the optimizer's component."""
        return self._components.of(key) == "optimizer"


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
    num_names = len(catalogue.entries)
    if len(wanted) == num_names:  # wanted are names of the catalogue: all of them
        bits = np.ones(num_names, dtype=bool)
    else:
        bits = np.fromiter((name in wanted for name in catalogue.entries), dtype=bool, count=num_names)
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
    if not missing and wanted.all():
        return Verdict((), ())
    there = [name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]
    unexpected = [name for name, is_wanted in zip(names, wanted, strict=True) if not is_wanted]
    verdict = Verdict(tuple(sorted(missing)), tuple(unexpected))
    slots = _OptimizerSlots((*names, *verdict.missing), strictness)
    half = _half_absent(there, verdict, slots)
    fatal = Verdict(*(tuple(key for key in keys if key in half or strictness.of(key)) for keys in (verdict.missing, verdict.unexpected)))
    if fatal.missing or fatal.unexpected:
        raise KeyMismatchError(
            _message(fatal, half), missing=fatal.missing, unexpected=fatal.unexpected, remedy=_remedy(there, fatal, half, slots, strictness)
        )
    return verdict


class _OptimizerSlots:
    """Tells an optimizer's state from other keys: by its component, or since ``param_groups`` stand beside ``state``, whatever its name.

    A module, too, may be called ``state``.
    """

    def __init__(self, keys: Iterable[str], strictness: Strictness) -> None:
        self._strictness = strictness
        self._heads = {head for head, found, _ in (f".{key}".partition(".param_groups.") for key in keys) if found}

    def owner(self, key: str) -> str | None:
        """Key up to the name of the parameter whose state ``key`` is a part of, such as ``optimizer.state.layer.weight``."""
        head, found, rest = f".{key}".partition(".state.")
        parameter, dot, _ = rest.rpartition(".")
        if not found or not dot or not (head in self._heads or self._strictness.is_optimizer(key)):
            return None
        return f"{head}.state.{parameter}"[1:]


def _half_absent(there: Iterable[str], verdict: Verdict, slots: _OptimizerSlots) -> frozenset[str]:
    absent: dict[str, list[str]] = {}
    for key in (*verdict.missing, *verdict.unexpected):
        owner = slots.owner(key)
        if owner is not None:
            absent.setdefault(owner, []).append(key)
    if not absent:
        return frozenset()
    present = set(map(slots.owner, there))
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


def _remedy(there: Iterable[str], fatal: Verdict, half: Collection[str], slots: _OptimizerSlots, strictness: Strictness) -> str:
    hint = rename_hint(fatal.missing, fatal.unexpected)
    if hint is not None:
        return hint
    if half:
        return "keep the optimizer's settings as they were when it was saved; strict= does not allow this"
    if any(map(slots.owner, fatal.unexpected)) and not any(map(slots.owner, there)):
        return (
            "a fresh optimizer has no state to load into: take its state from get_optimizer_state_dict (or get_state_dict) of"
            " torch.distributed.checkpoint.state_dict, which initialises it"
        )
    lenient = ", ".join(f"{component!r}: False" for component in sorted({*map(strictness.component, (*fatal.missing, *fatal.unexpected))}))
    map_names = "map names with rename=, " if fatal.missing and fatal.unexpected else ""
    return f"make the state as it was saved, select with keys=, {map_names}or allow differences with strict={{{lenient}}}"
