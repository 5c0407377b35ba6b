"""Holds steps of a run under test against those of the run that never stopped, and names what differs first. Pure: no I/O and no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dcp_engine.testing.records import Scalar, StepRecord
from dcp_engine.testing.samples import all_samples

__all__ = ["RELATIVE_TOLERANCE", "Fault", "Row", "compare_ranks", "compare_step", "rank_local", "relative_difference", "step_faults"]

RELATIVE_TOLERANCE: Final = 1e-4
"""For loss and gradient norm once the topology has been another: sums in another order round differently."""

# An optimizer that went wrong takes the weights along, so that of the two it is the cause.
_STATE_ORDER: Final = ("data", "rng", "scheduler", "scaler", "progress", "grads", "optimizer", "model")
# What of a whole state is the same on every topology; losses may round differently, and the rest knows its ranks.
_SHARED_STATE: Final = ("scheduler", "scaler", "progress")
_PLACED_STATE: Final = ("progress.world_size", "progress.losses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that differs in a step.

    Attributes:
        part: of the state: ``data``, ``rng``, ``scheduler``, ``scaler``, ``progress``, ``model``, ``optimizer``, ``values``, or another
            component of the whole state.
        reason: what differs, in words.
        expected: in the run that never stopped.
        found: in the run under test.
    """

    part: str
    reason: str
    expected: object = None
    found: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step of one leg of the run under test, against the run that never stopped.

    Attributes:
        leg: name of the leg.
        layout: how the model lay over its ranks.
        step: training step.
        loss: of the run under test; NaN where none was recorded.
        reference_loss: of the run that never stopped.
        loss_difference: relative; 0 means equal bit for bit.
        grad_norm_difference: relative; 0 means equal bit for bit.
        tolerance: largest relative difference of loss and gradient norm that is allowed; 0 demands equal bits.
        fault: part of the state that differs first in this row; None if none.
        reason: what the fault shows, in words; empty without one.
        also: other parts that differ in this row: effects, most likely.
        rank: on which the fault was seen.
        expected: what the fault's value had to be.
        found: what it was.
    """

    leg: str
    layout: str
    step: int
    loss: float
    reference_loss: float
    loss_difference: float
    grad_norm_difference: float
    tolerance: float
    fault: str | None
    reason: str
    also: tuple[str, ...] = ()
    rank: int | None = None
    expected: object = None
    found: object = None


def compare_step(
    expected: StepRecord, found: StepRecord, *, leg: str, layout: str, tolerance: float, is_first: bool, rank: int | None = None
) -> Row:
    """Holds one step against the same step of the run that never stopped.

    Args:
        expected: of the run that never stopped.
        found: of the run under test.
        leg: name of the leg, for the row.
        layout: likewise.
        tolerance: largest relative difference of loss, gradient norm and other recorded floats; 0 demands equal bits.
        is_first: this is the first step after a resume: no optimizer has moved the weights since.
        rank: that recorded it.
    """
    faults = tuple(step_faults(expected, found, tolerance=tolerance, is_first=is_first))
    first = faults[0] if faults else None
    return Row(
        leg=leg,
        layout=layout,
        step=found.step,
        loss=_number(found.loss),
        reference_loss=_number(expected.loss),
        loss_difference=_difference(found.loss, expected.loss),
        grad_norm_difference=_difference(found.grad_norm, expected.grad_norm),
        tolerance=tolerance,
        fault=first.part if first else None,
        reason=first.reason if first else "",
        also=tuple(dict.fromkeys(fault.part for fault in faults if first and fault.part != first.part)),
        rank=rank,
        expected=first.expected if first else None,
        found=first.found if first else None,
    )


def compare_ranks(
    expected: Sequence[StepRecord], found: Sequence[StepRecord], *, leg: str, layout: str, bitwise: bool, tolerance: float, is_first: bool
) -> Row:
    """Holds one step of all ranks against the run that never stopped.

    On the same topology each rank is held against the same rank, bit for bit. On another one the samples of all ranks together, and the
    mean of the ranks' losses, are held against those of the straight run; and of all else, on each rank, what was the same on every rank
    of the straight run.

    Args:
        expected: one record of each rank of the run that never stopped.
        found: one of each rank of the run under test.
        leg: name of the leg, for the row.
        layout: likewise.
        bitwise: the topology is the same, and always was.
        tolerance: else the largest relative difference of floats that are not exact.
        is_first: this is the first step after a resume.

    Returns:
        The row of the rank with the first fault in the order of cause and effect; of rank 0 where there is none.
    """
    pairs = list(zip(expected, found, strict=True)) if bitwise else _on_another_topology(expected, found)
    rows = [
        compare_step(one, other, leg=leg, layout=layout, tolerance=0.0 if bitwise else tolerance, is_first=is_first, rank=rank)
        for rank, (one, other) in enumerate(pairs)
    ]
    return min(rows, key=lambda row: _place(row.fault))


def step_faults(expected: StepRecord, found: StepRecord, *, tolerance: float, is_first: bool) -> Iterator[Fault]:
    """What differs in one step, in the order of cause and effect: a wrong batch changes the loss, so the loss is asked late."""
    if found.batch != expected.batch:
        yield Fault(part="data", reason=_batch_reason(expected.batch, found.batch), expected=expected.batch, found=found.batch)
    if found.draws != expected.draws:
        yield Fault(part="rng", reason=f"drew {found.draws} instead of {expected.draws}", expected=expected.draws, found=found.draws)
    yield from _named("rng", "state of the generator", expected.generators, found.generators)
    if found.lr != expected.lr:
        yield Fault(
            part="scheduler",
            reason=f"learning rate {_rates(found.lr)} instead of {_rates(expected.lr)}",
            expected=expected.lr,
            found=found.lr,
        )
    yield from _named("scaler", "", expected.scaler, found.scaler)
    yield from _named("progress", "", expected.counters, found.counters)
    # The first step after a resume is computed before the optimizer has moved anything: only the weights can be wrong there.
    moved = "model" if is_first else "optimizer"
    yield from _named(moved, "", _measured(expected), _measured(found), tolerance=tolerance)
    yield from _named("values", "", expected.values, found.values, tolerance=tolerance)
    if expected.state and found.state:
        yield from _state_faults(expected.state, found.state)


def relative_difference(found: float, expected: float) -> float:
    """``(found - expected) / expected`` without its sign; exactly 0 for equal values, NaN where either is NaN."""
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else float("inf")


def _named(part: str, what: str, expected: Mapping[str, Scalar], found: Mapping[str, Scalar], *, tolerance: float = 0.0) -> Iterator[Fault]:
    for name in (*expected, *(name for name in found if name not in expected)):
        one, other = expected.get(name), found.get(name)
        if _is_same(one, other, tolerance):
            continue
        label = f"{what} {name!r}" if what else name
        text = f"{label} {_text(other)} instead of {_text(one)}"
        if isinstance(one, float) and isinstance(other, float):
            text += f", {relative_difference(other, one):.1e} relative"
        yield Fault(part=part, reason=text, expected=one, found=other)


def _is_same(expected: Scalar, found: Scalar, tolerance: float) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        # Not <: a difference that is no number is one.
        return relative_difference(found, expected) <= tolerance
    return type(expected) is type(found) and expected == found


def _measured(record: StepRecord) -> dict[str, Scalar]:
    return {"loss": record.loss, "gradient norm": record.grad_norm}


def _state_faults(expected: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Fault]:
    faults = [
        Fault(
            part=key.partition(".")[0],
            reason=f"{key} {'is another one' if key in expected and key in found else 'is there in one run only'}",
            expected=expected.get(key, "none"),
            found=found.get(key, "none"),
        )
        for key in (*expected, *(key for key in found if key not in expected))
        if expected.get(key) != found.get(key)
    ]
    yield from sorted(faults, key=lambda fault: _STATE_ORDER.index(fault.part) if fault.part in _STATE_ORDER else len(_STATE_ORDER))


def _place(part: str | None) -> int:
    if part is None:
        return len(_STATE_ORDER) + 1
    return _STATE_ORDER.index(part) if part in _STATE_ORDER else len(_STATE_ORDER)


def _on_another_topology(expected: Sequence[StepRecord], found: Sequence[StepRecord]) -> list[tuple[StepRecord, StepRecord]]:
    """What of a step can be the same, for each rank of the run under test."""
    batch, loss = all_samples([record.batch for record in expected]), _mean_loss(expected)
    found_batch, found_loss = all_samples([record.batch for record in found]), _mean_loss(found)
    first = expected[0]
    pairs = []
    for record in found:
        one: dict[str, Any] = {"batch": batch, "loss": loss}
        other: dict[str, Any] = {"batch": found_batch, "loss": found_loss}
        for name in _differing(expected):
            one[name] = other[name] = () if name == "lr" else None
        for name in ("scaler", "generators", "counters", "values", "state"):
            kept = _shared_names(name, [getattr(rank, name) for rank in expected])
            one[name] = {key: value for key, value in getattr(first, name).items() if key in kept}
            # What only the run under test has is a difference, too, unless it is of the kind that is left out.
            dropped = {key for rank in expected for key in getattr(rank, name)} - kept
            other[name] = {key: value for key, value in getattr(record, name).items() if key not in dropped}
        if first.state:
            other["state"] = {key: value for key, value in other["state"].items() if _is_shared_state(key)}
        pairs.append((replace(first, **one), replace(record, **other)))
    return pairs


def rank_local(ranks: Sequence[StepRecord]) -> tuple[str, ...]:
    """What of a step differs between the ranks of the straight run, so that it cannot be compared on another topology."""
    named = []
    for name in ("scaler", "generators", "counters", "values"):
        values = [getattr(rank, name) for rank in ranks]
        kept = _shared_names(name, values)
        named += [f"{name} {key!r}" for key in dict.fromkeys(key for mine in values for key in mine) if key not in kept]
    return (*_differing(ranks), *named)


def _differing(ranks: Sequence[StepRecord]) -> list[str]:
    return [name for name in ("grad_norm", "lr", "draws") if any(getattr(rank, name) != getattr(ranks[0], name) for rank in ranks)]


def _shared_names(field: str, ranks: Sequence[Mapping[str, Scalar]]) -> set[str]:
    """The names whose values are the same on all ranks."""
    first = ranks[0]
    same = {name for name, value in first.items() if all(name in rank and rank[name] == value for rank in ranks)}
    return {name for name in same if _is_shared_state(name)} if field == "state" else same


def _is_shared_state(key: str) -> bool:
    return key.partition(".")[0] in _SHARED_STATE and not key.startswith(_PLACED_STATE)


def _mean_loss(ranks: Sequence[StepRecord]) -> float | None:
    """Their mean, where they differ: ranks have equally large parts of a batch."""
    losses = [record.loss for record in ranks if record.loss is not None]
    if not losses:
        return None
    return losses[0] if all(loss == losses[0] for loss in losses) else sum(losses) / len(losses)


def _batch_reason(expected: tuple[int, ...] | str | None, found: tuple[int, ...] | str | None) -> str:
    if not isinstance(expected, tuple) or not isinstance(found, tuple):
        return "another place in the data"
    if len(expected) != len(found):
        return f"a batch of {len(found)} samples instead of {len(expected)}"
    return f"another place in the data: samples {_ids(found)} instead of {_ids(expected)}"


def _ids(batch: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, batch[:4]))}{', ...' if len(batch) > 4 else ''}]"


def _rates(lr: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in lr) or "none"


def _text(value: Scalar) -> str:
    return f"{value:.8g}" if isinstance(value, float) else f"{value}"


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _difference(found: float | None, expected: float | None) -> float:
    return 0.0 if found is None or expected is None else relative_difference(found, expected)
