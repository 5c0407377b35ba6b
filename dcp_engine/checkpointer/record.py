"""What a checkpointer keeps in a checkpoint beside the state: one entry of its metadata, next to the caller's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_engine.checkpointer.policy_record import PolicyRecord
from dcp_engine.checkpointer.recorded import Recorded
from dcp_engine.errors import MalformedCheckpointError, UnsupportedVersionError

__all__ = ["SaveRecord"]

_OURS: Final = "checkpointer"
_CALLERS: Final = "user"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """One checkpoint's entry.

    Attributes:
        recorded: what the coordinator noted of the state; None where no checkpointer wrote it.
        is_partial: it holds a training state only in part, so that nobody resumes from it.
        components: key of a training state -> its components that are there.
        policies: what policies noted.
        user: the values that the caller of ``save`` passed.
    """

    recorded: Recorded | None = None
    is_partial: bool = False
    components: Mapping[str, list[str]] = field(default_factory=dict)
    policies: PolicyRecord = field(default_factory=PolicyRecord)
    user: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """As ``ShardWriter`` takes it."""
        ours = {
            "version": _VERSION,
            "recorded": None if self.recorded is None else self.recorded.as_dict(),
            "is_partial": self.is_partial,
            "components": {key: list(names) for key, names in self.components.items()},
            "policies": self.policies.as_dict(),
        }
        return {_OURS: ours, _CALLERS: dict(self.user)}

    @classmethod
    def read(cls, metadata: Mapping[str, Any], *, path: str) -> SaveRecord:
        """Of a checkpoint's metadata. One that no checkpointer wrote is taken for a whole state of which nothing is known.

        Raises:
            MalformedCheckpointError: the entry is none. UnsupportedVersionError: a newer release wrote it.
        """
        ours = metadata.get(_OURS)
        if ours is None:
            return cls(user=metadata)
        if isinstance(ours, dict) and isinstance(ours.get("version"), int) and ours["version"] > _VERSION:
            raise UnsupportedVersionError(
                "a newer release wrote what the checkpointer keeps",
                path=path,
                expected=f"version {_VERSION}",
                found=ours["version"],
                remedy="upgrade dcp-engine",
            )
        if not isinstance(ours, dict) or not isinstance(ours.get("is_partial"), bool) or not isinstance(ours.get("components"), dict):
            raise MalformedCheckpointError("the checkpointer's entry of the metadata is none", path=path, found=repr(ours)[:300])
        recorded, user = ours.get("recorded"), metadata.get(_CALLERS)
        return cls(
            recorded=None if recorded is None else Recorded.from_dict(recorded),
            is_partial=ours["is_partial"],
            components=ours["components"],
            policies=PolicyRecord.from_dict(ours.get("policies")),
            user=user if isinstance(user, dict) else {},
        )
