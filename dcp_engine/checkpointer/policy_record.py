"""What policies note of a save, in plain values in the checkpoint's metadata: what the next process and retention go by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.policies import HealthVerdict, Pace

__all__ = ["PolicyRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """One save's entry.

    Attributes:
        health: what was said of the state.
        is_pinned: it is a milestone, whatever later processes are told to keep.
        running_secs: that the run had trained.
        failures: how often it had been started again.
        stalls: for how long each of the newest saves before had kept training from training, in seconds, oldest first.
        durable_secs: how long the newest of them took to be durable.
    """

    health: HealthVerdict = field(default_factory=lambda: HealthVerdict(is_healthy=None))
    is_pinned: bool = False
    running_secs: float = 0.0
    failures: int = 0
    stalls: tuple[float, ...] = ()
    durable_secs: float = 0.0

    def pace(self, step: int) -> Pace:
        """Of a process that goes on behind this step."""
        pace = Pace(running_secs=self.running_secs, failures=self.failures, stalls=self.stalls, durable_secs=self.durable_secs)
        return pace.restarted(step)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint's metadata."""
        return {
            "is_healthy": self.health.is_healthy,
            "unhealthy_because": self.health.reason,
            "is_pinned": self.is_pinned,
            "running_secs": self.running_secs,
            "failures": self.failures,
            "stalls": list(self.stalls),
            "durable_secs": self.durable_secs,
        }

    @classmethod
    def from_dict(cls, value: object) -> PolicyRecord:
        """The inverse of :meth:`as_dict`; None gives what is known of a save without policies. Unknown entries are passed over.

        Raises:
            MalformedCheckpointError: this is nothing that :meth:`as_dict` gives.
        """
        if value is None:
            return cls()
        if isinstance(value, Mapping):
            is_healthy, reason, failures = value.get("is_healthy"), value.get("unhealthy_because"), value.get("failures")
            stalls = value.get("stalls")
            secs = (value.get("running_secs"), value.get("durable_secs"), *(stalls if isinstance(stalls, list | tuple) else [None]))
            if (
                (is_healthy is None or isinstance(is_healthy, bool))
                and isinstance(reason, str)
                and isinstance(failures, int)
                and failures >= 0
                and isinstance(value.get("is_pinned"), bool)
                and all(isinstance(one, int | float) and 0 <= one < math.inf for one in secs)
            ):
                return cls(
                    health=HealthVerdict(is_healthy=is_healthy, reason=reason),
                    is_pinned=value["is_pinned"],
                    running_secs=float(value["running_secs"]),
                    failures=failures,
                    stalls=tuple(map(float, value["stalls"])),
                    durable_secs=float(value["durable_secs"]),
                )
        raise MalformedCheckpointError(
            "what policies noted in the checkpoint's metadata is nothing of theirs", expected="entries of a save", found=repr(value)[:300]
        )
