"""What a checkpointer keeps in a checkpoint beside the state: one entry of the checkpoint's metadata, beside the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_engine.checkpointer.cut import Fact
from dcp_engine.errors import MalformedCheckpointError, UnsupportedVersionError

__all__ = ["SaveRecord"]

_OURS: Final = "checkpointer"
_USERS: Final = "user"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """One checkpoint's entry.

    Attributes:
        world_size: ranks of the job that saved it, those of other nodes included.
        is_partial: it holds a training state only in part, so that nobody resumes from it.
        components: key of a training state -> its components that are there.
        facts: of the coordinator: where each part of the state stood.
        probe: what a fixed input gave; None where nothing was asked for.
        user: the values that the caller of ``save`` passed.
    """

    world_size: int = 1
    is_partial: bool = False
    components: Mapping[str, list[str]] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)
    probe: Mapping[str, Any] | None = None
    user: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """As ``ShardWriter`` takes it."""
        ours = {
            "version": _VERSION,
            "world_size": self.world_size,
            "is_partial": self.is_partial,
            "components": {key: list(names) for key, names in self.components.items()},
            "facts": dict(self.facts),
            "probe": None if self.probe is None else dict(self.probe),
        }
        return {_OURS: ours, _USERS: dict(self.user)}

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
        kinds: dict[str, type | tuple[type, ...]] = {
            "world_size": int,
            "is_partial": bool,
            "components": dict,
            "facts": dict,
            "probe": (dict, type(None)),
        }
        if not isinstance(ours, dict) or any(not isinstance(ours.get(name), kind) for name, kind in kinds.items()):
            raise MalformedCheckpointError("the checkpointer's entry of the metadata is none", path=path, expected=list(kinds), found=ours)
        user = metadata.get(_USERS)
        return cls(**{name: ours[name] for name in kinds}, user=user if isinstance(user, dict) else {})
