"""``Counters``: how far training has come, and where inside an accumulation cycle it stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_engine.errors import InvalidOptionError, KeyMismatchError, UsageError

__all__ = ["Counters"]

_STORED = (
    "step",
    "updates_applied",
    "micro_step",
    "epoch",
    "batch_in_epoch",
    "samples",
    "tokens",
    "grads_unscaled",
    "grads_clipped",
    "grads_stepped",
)

_NUMBERS = tuple(name for name in _STORED if not name.startswith("grads_"))


@dataclass(slots=True, kw_only=True)
class Counters:
    """Progress of training. The loop moves it: :meth:`micro_batch` after each backward, :meth:`update` after each ``optimizer.step()``.

    Two numbers count updates. A GradScaler that finds an infinite gradient skips the update: it was attempted and not applied. Adam's bias
    correction and a scheduler that is stepped only then go by ``updates_applied``, everything else by ``step``.

    Attributes:
        step: updates attempted, the number that names a checkpoint.
        updates_applied: updates that changed the parameters.
        micro_step: micro-batches whose gradients are in ``.grad`` now; 0 between cycles.
        epoch: epochs that are done.
        batch_in_epoch: micro-batches of the current epoch that training has consumed.
        samples: samples consumed, over all ranks if the loop counts them so.
        tokens: tokens consumed, likewise.
        grads_unscaled: the scaler has unscaled the gradients of this cycle.
        grads_clipped: they have been clipped.
        grads_stepped: an optimizer has taken them, and they are not cleared yet.
        max_losses: how many of the last losses are kept.
        losses: the last losses, oldest first.

    Thread-safety: none.
    """

    step: int = 0
    updates_applied: int = 0
    micro_step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    grads_unscaled: bool = False
    grads_clipped: bool = False
    grads_stepped: bool = False
    max_losses: int = 100
    losses: deque[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in (*_NUMBERS, "max_losses"):
            _check_number(name, getattr(self, name))
        self.losses = deque(maxlen=self.max_losses)

    @property
    def in_cycle(self) -> bool:
        """Gradients of part of a step are held: the parameters alone are not the state."""
        return self.micro_step != 0

    def micro_batch(self, *, samples: int = 0, tokens: int = 0) -> None:
        """One micro-batch has gone forward and backward. ``InvalidOptionError``: a number is none, or negative."""
        _check_number("samples", samples)
        _check_number("tokens", tokens)
        self.micro_step += 1
        self.batch_in_epoch += 1
        self.samples += samples
        self.tokens += tokens

    def update(self, *, applied: bool = True, loss: float | None = None) -> None:
        """An update was attempted and the gradients are cleared: the cycle is over.

        Args:
            applied: False where the scaler skipped it: ``scaler.get_scale() >= scale_before_update``.
            loss: for the history.

        Raises:
            InvalidOptionError: the loss is no number.
        """
        if loss is not None and not hasattr(loss, "__float__"):
            raise InvalidOptionError("loss is no number", expected="None, a number, or a tensor with one element", found=repr(loss)[:300])
        self.step += 1
        self.updates_applied += bool(applied)
        self.micro_step = 0
        self.grads_unscaled = self.grads_clipped = self.grads_stepped = False
        if loss is not None:
            self.losses.append(float(loss))

    def end_epoch(self) -> None:
        """The data of the epoch is used up."""
        if self.in_cycle:
            raise UsageError("an epoch ends inside an accumulation cycle", found=f"micro_step {self.micro_step}", remedy="update first")
        self.epoch += 1
        self.batch_in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers by name, and the losses as a tuple."""
        return {**{name: getattr(self, name) for name in _STORED}, "losses": tuple(self.losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take all of it, or nothing.

        Raises:
            KeyMismatchError: a number is missing.
            InvalidOptionError: one is no number, or this is no progress at all.
        """
        if not isinstance(state_dict, Mapping):
            raise InvalidOptionError("this is no progress", expected="what state_dict() gave", found=repr(state_dict)[:300])
        missing = tuple(sorted({*_STORED, "losses"} - state_dict.keys()))
        if missing:
            raise KeyMismatchError("the stored progress is not complete", missing=missing)
        for name in _NUMBERS:
            _check_number(name, state_dict[name])
        for name in _STORED:
            setattr(self, name, state_dict[name])
        self.losses = deque(state_dict["losses"], maxlen=self.max_losses)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidOptionError(f"{name} is no count", expected="an int of 0 or more", found=repr(value)[:300])
