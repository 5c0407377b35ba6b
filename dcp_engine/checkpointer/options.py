"""What a checkpointer is told when it is made, checked at once: a wrong option must not be found by the first save, an hour later."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dcp_engine.errors import InvalidOptionError
from dcp_engine.policies import Health, Keep, Room, When
from dcp_engine.storage import ShardReader, ShardWriter
from dcp_engine.storage.keys import KeySource
from dcp_engine.storage.label import check_run_id

__all__ = ["CheckpointerOptions", "Mode"]

Mode = Literal["min", "max"]

_IF_BUSY: Final = ("wait", "skip", "error")
_ALWAYS: Final = frozenset({"path", "process_group", "storage_options", "signing_key", "encryption_key"})
"""Options of writers and readers that the checkpointer itself has, or decides."""
_OF_EACH_SAVE: Final = frozenset({"step", "run_id", "metadata", "fence", "overwrite"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointerOptions:
    """See ``Checkpointer``, whose arguments they are.

    Raises:
        InvalidOptionError: one is out of range.
    """

    run_id: str = ""
    save_every: int | Mapping[str, int] | None = None
    when: When | Literal["auto"] | None = None
    keep: Keep | None = None
    health: Health | None = None
    room: Room | None = None
    best: tuple[str, Mode] | None = None
    if_busy: str = "wait"
    node_local: bool = False
    max_fallbacks: int = 3
    writer_options: Mapping[str, Any] = field(default_factory=dict)
    reader_options: Mapping[str, Any] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    signing_key: KeySource | None = field(default=None, repr=False)
    encryption_key: KeySource | None = field(default=None, repr=False)
    timeout_secs: float = 1800.0

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        if self.if_busy not in _IF_BUSY:
            raise InvalidOptionError("if_busy is not known", expected=f"one of {list(_IF_BUSY)}", found=repr(self.if_busy)[:300])
        if not isinstance(self.node_local, bool):
            raise InvalidOptionError("node_local is not a bool", expected="True or False", found=repr(self.node_local)[:300])
        if isinstance(self.max_fallbacks, bool) or not isinstance(self.max_fallbacks, int) or self.max_fallbacks < 0:
            raise InvalidOptionError("max_fallbacks is no number of steps", expected="0 or more", found=repr(self.max_fallbacks)[:300])
        secs = self.timeout_secs
        if isinstance(secs, bool) or not isinstance(secs, int | float) or not 0 < secs < math.inf:
            raise InvalidOptionError("timeout_secs is no duration", expected="a finite number of seconds above 0", found=repr(secs)[:300])
        _check_cadence(self.save_every)
        if self.when is not None:
            When.of(self.when)
            if self.save_every is not None:
                raise InvalidOptionError(
                    "save_every and when contradict each other",
                    expected="one of them",
                    remedy="When(steps=...) is the same as a number of save_every",
                )
        _check_kind("keep", self.keep, Keep, "Keep(last=5)")
        _check_kind("room", self.room, Room, "Room(growth=0.1)")
        _check_kind("health", self.health, Health, 'Health(at_most={"grad_norm": 100.0})')
        _check_best(self.best)
        _check_names("writer_options", self.writer_options, ShardWriter.__init__, _ALWAYS | _OF_EACH_SAVE)
        _check_names("reader_options", self.reader_options, ShardReader.__init__, _ALWAYS)
        ShardWriter(run_id=self.run_id, **self.of_writer)
        ShardReader(**self.of_reader)

    @property
    def cadence(self) -> Mapping[str, int] | None:
        """Component -> interval in steps, ``"*"`` for all of it; None where nothing was said."""
        return {"*": self.save_every} if isinstance(self.save_every, int) else self.save_every

    @property
    def of_writer(self) -> dict[str, Any]:
        """Keyword arguments of every ``ShardWriter``."""
        return {**self.writer_options, **self._of_both}

    @property
    def of_reader(self) -> dict[str, Any]:
        """Keyword arguments of every ``ShardReader``."""
        return {**self.reader_options, **self._of_both}

    @property
    def of_root(self) -> dict[str, Any]:
        """Keyword arguments of whoever looks for steps."""
        return {"storage_options": self.storage_options, "signing_key": self.signing_key}

    @property
    def _of_both(self) -> dict[str, Any]:
        return {**self.of_root, "encryption_key": self.encryption_key}


def _check_cadence(every: object) -> None:
    intervals = every.items() if isinstance(every, Mapping) else {"*": every}.items()
    if every is None:
        return
    if not intervals:
        raise InvalidOptionError(
            "save_every names no component", expected='a number of steps, or as in {"model": 200, "*": 1000}', found="{}"
        )
    for name, interval in intervals:
        if not isinstance(name, str) or isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise InvalidOptionError(
                "save_every is no interval",
                expected='a number of steps of at least 1, or one for each component, as in {"model": 200, "*": 1000}',
                found=repr(every)[:300],
            )


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidOptionError(f"{name} is not known", expected=f"None or as in {example}", found=repr(value)[:300])


def _check_best(best: object) -> None:
    if best is None:
        return
    if not (isinstance(best, tuple) and len(best) == 2 and isinstance(best[0], str) and best[1] in ("min", "max")):
        raise InvalidOptionError("best is no metric", expected='its name and "min" or "max", as in ("loss", "min")', found=repr(best)[:300])


def _check_names(argument: str, options: object, call: Callable[..., Any], taken: frozenset[str]) -> None:
    if not isinstance(options, Mapping):
        raise InvalidOptionError(f"{argument} is not a mapping", expected="a dict of keyword arguments", found=repr(options)[:300])
    known = set(inspect.signature(call).parameters) - {"self"} - taken
    for name in options:
        if name not in known:
            why = "which the checkpointer decides" if name in taken else "which is not known"
            raise InvalidOptionError(f"{argument} holds {name!r}, {why}", expected=f"some of {sorted(known)}")
