"""Components: which part of a training state a key belongs to (model, optimizer, ...), decided from the key alone.

A component gets shard files of its own, so that a serving job can be granted the weights alone, and strictness of its own on load.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Final

from dcp_engine.errors import InvalidOptionError

__all__ = ["DEFAULT_COMPONENT", "SMALL_COMPONENT", "WELL_KNOWN", "WRAPPERS", "ComponentMap"]

DEFAULT_COMPONENT: Final = "model"

WELL_KNOWN: Final[Mapping[str, str]] = {
    "model": "model",
    "optim": "optimizer",
    "optims": "optimizer",
    "optimizer": "optimizer",
    "optimizers": "optimizer",
    "scheduler": "scheduler",
    "schedulers": "scheduler",
    "lr_scheduler": "scheduler",
    "lr_schedulers": "scheduler",
    "scaler": "scaler",
    "grad_scaler": "scaler",
    "data": "data",
    "dataloader": "data",
    "data_loader": "data",
    "sampler": "data",
    "rng": "rng",
    "rng_state": "rng",
    "progress": "progress",
    "train_state": "progress",
    "counters": "progress",
    "grads": "grads",
    "ema": "ema",
    "extra": "extra",
}
"""First element of a key (up to its first dot) -> component. Of keys below :data:`WRAPPERS`, the second."""

WRAPPERS: Final = frozenset({"app", "state"})
"""Names under which scripts keep one ``Stateful`` of everything, ``{"state": TrainState(...)}``: what is below decides."""

SMALL_COMPONENT: Final = "state"
"""Component of all that is small below one of :data:`WRAPPERS`: a file each for a few hundred bytes would cost a flush each."""

_SMALL: Final = frozenset({"scheduler", "scaler", "data", "rng", "progress"})

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")


class ComponentMap:
    """Maps keys to components.

    Args:
        patterns: glob pattern of keys (``fnmatch`` rules, case-sensitive) -> component name, the first match in order wins. Keys that no
            pattern matches go by :data:`WELL_KNOWN`, and the rest to ``"model"``. ``None``: no patterns.

    Raises:
        InvalidOptionError: a component's name is not ``[a-z][a-z0-9_]{0,31}``.

    Thread-safety: immutable after construction. Picklable.
    """

    def __init__(self, patterns: Mapping[str, str] | None = None) -> None:
        self._patterns = tuple((patterns or {}).items())
        for pattern, name in self._patterns:
            if not isinstance(pattern, str) or not isinstance(name, str) or not _NAME.match(name):
                raise InvalidOptionError(
                    f"components[{pattern!r}] is not a component name",
                    expected="a name of the form [a-z][a-z0-9_]{0,31}",
                    found=repr(name),
                )

    def of(self, key: str) -> str:
        """The component of ``key``."""
        for pattern, name in self._patterns:
            if fnmatch.fnmatchcase(key, pattern):
                return name
        head, _, below = _head(key).partition(".")
        component = WELL_KNOWN.get(below or head, DEFAULT_COMPONENT)
        return SMALL_COMPONENT if below and component in _SMALL else component

    def of_all(self, keys: Sequence[str]) -> tuple[list[str], list[int]]:
        """The components of many keys: their names, each once, and for every key the index of its own."""
        heads = list(keys) if self._patterns else [_head(key) for key in keys]
        index: dict[str, int] = {}
        of_head = {head: index.setdefault(self.of(head), len(index)) for head in dict.fromkeys(heads)}
        return list(index), [of_head[head] for head in heads]


def _head(key: str) -> str:
    """The elements of a key that decide, where no pattern does."""
    head, _, rest = key.partition(".")
    return f"{head}.{rest.partition('.')[0]}" if head in WRAPPERS and rest else head
