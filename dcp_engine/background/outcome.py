"""How a save ends, in the one text on which all its ranks agree: it is the value of one key of the process group's store.

The states and who may write them (everything is written by ``compare_set``, so that the first one holds)::

    (none) ── the coordinator, right before it publishes ──> PUBLISHING ── it has published ──────────> PUBLISHED
       │                                                         ├────── it could not, or was revoked ─> FAILED
       └── any rank that has failed, or found a rank failed ──> FAILED   └── nobody can tell ──────────> UNKNOWN
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from dcp_engine.errors import BackgroundSaveError, CommitStateUnknownError, DcpEngineError

__all__ = ["Outcome", "State"]

_MAX_TEXT = 2000
"""Characters of one text: the store is no place for more."""


class State(StrEnum):
    """See the module."""

    PUBLISHING = "publishing"
    PUBLISHED = "published"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of the end of a save.

    Attributes:
        state: see the module.
        rank: the coordinator's, or that of the rank that failed; None where it is no rank's fault.
        phase: what the failed rank was doing; empty where nothing failed.
        kind: of the error, as its class has it.
        message, found, remedy: of the error.
        is_told: the ranks get the error itself, by the exchange in which they are; this is for those that do not.
    """

    state: State
    rank: int | None = None
    phase: str = ""
    kind: str = ""
    message: str = ""
    found: str | None = None
    remedy: str | None = None
    is_told: bool = False

    @classmethod
    def of(cls, error: BaseException, *, rank: int | None, phase: str, is_told: bool = False) -> Outcome:
        """A failure; UNKNOWN for the error that says so."""
        state = State.UNKNOWN if isinstance(error, CommitStateUnknownError) else State.FAILED
        if not isinstance(error, DcpEngineError):
            error = BackgroundSaveError("a rank failed to save", found=f"{type(error).__name__}: {error}")
        return cls(
            state,
            rank if error.rank is None else error.rank,
            error.phase or phase,
            error.kind,
            error.message[:_MAX_TEXT],
            None if error.found is None else str(error.found)[:_MAX_TEXT],
            error.remedy,
            is_told,
        )

    @property
    def is_final(self) -> bool:
        """Whether it will not change any more."""
        return self.state is not State.PUBLISHING

    def error(self, *, path: str | None, step: int | None) -> DcpEngineError:
        """The error to raise for it, the same on all ranks."""
        return _class_of(self.kind)(
            self.message,
            path=path or None,
            step=step,
            rank=self.rank,
            phase=self.phase or None,
            found=self.found,
            remedy=self.remedy,
        )

    def encode(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Outcome:
        """Of another rank's :meth:`encode`."""
        values = json.loads(text)
        return cls(**{**values, "state": State(values["state"])})


def _class_of(kind: str) -> type[DcpEngineError]:
    pending: list[type[DcpEngineError]] = [DcpEngineError]
    for cls in pending:
        if cls.kind == kind:
            return cls
        pending += cls.__subclasses__()
    return BackgroundSaveError
