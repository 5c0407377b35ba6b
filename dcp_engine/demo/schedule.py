"""Which jobs the demo runs one after the other, and what each of them must prove. No I/O and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dcp_engine.errors import InvalidOptionError

__all__ = ["DemoConfig", "Drop", "Leg", "plan_legs"]

_MIN_NUM_SAVES = 4


class Drop(StrEnum):
    """A part of the training state that can be left out of the checkpoints on purpose."""

    RNG = "rng"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    DATA = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What to train and how often to save.

    Attributes:
        steps: length of the training run.
        save_every: steps between saves; at least four saves must fit.
        drop: part of the state to leave out; None for none.
        width: features of the model; a multiple of 8.
        layers: blocks of the model.
        window_bytes: tokens of one window; even.
        batch: windows in the global batch; even.
    """

    steps: int = 32
    save_every: int = 4
    drop: Drop | None = None
    width: int = 128
    layers: int = 4
    window_bytes: int = 128
    batch: int = 16

    def __post_init__(self) -> None:
        for name, multiple in (("steps", 1), ("save_every", 1), ("width", 8), ("layers", 1), ("window_bytes", 2), ("batch", 2)):
            value = getattr(self, name)
            if value < 1 or value % multiple:
                kind = "a positive whole number" if multiple == 1 else f"a positive multiple of {multiple}"
                raise InvalidOptionError(f"--{name.replace('_', '-')} is out of range", expected=kind, found=value)
        min_steps = _MIN_NUM_SAVES * self.save_every
        if self.steps < min_steps:
            raise InvalidOptionError(
                "--steps is too small for a crash and two comebacks",
                expected=f"at least {_MIN_NUM_SAVES} saves, that is {min_steps} steps with --save-every {self.save_every}",
                found=f"{self.steps} steps",
                remedy="raise --steps or lower --save-every",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One job.

    Attributes:
        name: of its folder.
        title: what it is, for people.
        num_ranks: processes that torchrun starts.
        resumed_from: step of the checkpoint that it must start from; None for a fresh start.
        last_step: step after which it ends; the killed job ends earlier.
        save_every: steps between saves; 0 for none.
        die_at: step in whose save a rank is killed; 0 for none.
        bitwise: it must repeat the reference bit for bit, because neither its layout nor any job before it was another.
    """

    name: str
    title: str
    num_ranks: int
    resumed_from: int | None
    last_step: int
    save_every: int = 0
    die_at: int = 0
    bitwise: bool

    @property
    def first_step(self) -> int:
        """The first step that it trains."""
        return (self.resumed_from or 0) + 1

    @property
    def num_steps(self) -> int:
        """Steps that it trains, the killed job at least."""
        return (self.die_at or self.last_step) - self.first_step + 1


def plan_legs(config: DemoConfig) -> tuple[Leg, ...]:
    """The reference first, then the run under test: killed, rehearsed on the layout it had, taken up on 2 ranks, finished on 4."""
    every = config.save_every
    num_saves = config.steps // every
    die_at = every * max(2, num_saves * 3 // 8)
    newest = die_at - every
    back_on_four = every * (num_saves * 5 // 8)
    back_on_four = max(back_on_four, die_at)
    return (
        Leg(name="reference", title="never stops", num_ranks=4, resumed_from=None, last_step=config.steps, bitwise=True),
        Leg(
            name="killed",
            title="killed in a save",
            num_ranks=4,
            resumed_from=None,
            last_step=config.steps,
            save_every=every,
            die_at=die_at,
            bitwise=True,
        ),
        Leg(name="same-4", title="back on the same 4", num_ranks=4, resumed_from=newest, last_step=die_at, bitwise=True),
        Leg(
            name="on-2",
            title="back on 2",
            num_ranks=2,
            resumed_from=newest,
            last_step=back_on_four,
            save_every=every,
            bitwise=False,
        ),
        Leg(
            name="on-4",
            title="back on 4",
            num_ranks=4,
            resumed_from=back_on_four,
            last_step=config.steps,
            save_every=every,
            bitwise=False,
        ),
    )
