"""What a checkpoint holds of the things whose keys depend on the run that saved it, told from its keys alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcp_engine.train_state.per_rank import rank_of_name

__all__ = ["Stored", "stored_components", "stored_in"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Keys of a checkpoint that a fresh state cannot know.

    Attributes:
        ranks: key of a per-rank value -> the ranks that saved one, ascending.
        started: label of an optimizer -> the parameters for which slots are stored, blank ones included.
        grads: place below ``grads``, ``shared`` or a rank's name -> the parameters whose gradients are stored there.
    """

    ranks: Mapping[str, tuple[int, ...]]
    started: Mapping[str, frozenset[str]]
    grads: Mapping[str, frozenset[str]]


def stored_in(keys: Iterable[str], *, under: str, optimizers: Iterable[str], parameters: Iterable[str]) -> Stored:
    """Sort out the keys of a checkpoint.

    Args:
        keys: of the checkpoint, as DCP flattens them.
        under: key of the ``TrainState`` in the saved dict; empty where its state dict was the whole.
        optimizers: labels of the optimizers.
        parameters: names of the model's parameters. A slot of another one belongs to nobody here.
    """
    start = f"{under}." if under else ""
    names = frozenset(parameters)
    heads = {label: f"optimizer.{label}.state." if label else "optimizer.state." for label in optimizers}
    ranks: dict[str, list[int]] = {}
    started: dict[str, set[str]] = {label: set() for label in heads}
    grads: dict[str, set[str]] = {}
    for key in keys:
        if not key.startswith(start):
            continue
        key = key[len(start) :]
        base, _, last = key.rpartition(".")
        rank = rank_of_name(last)
        if rank is not None:
            ranks.setdefault(base, []).append(rank)
        elif key.startswith("grads."):
            place, _, name = key.removeprefix("grads.").partition(".")
            grads.setdefault(place, set()).add(name)
        else:
            for label, head in heads.items():
                if key.startswith(head):
                    started[label].update(_parameter_of(key[len(head) :], names))
    return Stored(
        ranks={base: tuple(sorted(found)) for base, found in ranks.items()},
        started={label: frozenset(found) for label, found in started.items()},
        grads={place: frozenset(found) for place, found in grads.items()},
    )


def _parameter_of(path: str, names: frozenset[str]) -> tuple[str, ...]:
    """The parameter whose slot this is: the longest name that the path begins with. Slots may nest, and names hold dots."""
    name = path.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return (name,) if name else ()


def stored_components(keys: Iterable[str], *, under: str = "state") -> frozenset[str]:
    """The components that a checkpoint holds. One that lacks a component of the state is none to resume from: weights alone, say."""
    start = f"{under}." if under else ""
    return frozenset(key[len(start) :].partition(".")[0] for key in keys if key.startswith(start))
