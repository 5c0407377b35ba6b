"""What can be told of a committed step without reading its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_engine.storage.backends import Location
from dcp_engine.storage.dcp_metadata import metadata_of_manifest
from dcp_engine.storage.good_steps import check_whole
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.publish import open_checkpoint

__all__ = ["Decision", "StepInfo", "look_at_step"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The checkpoint that all ranks take. Crosses ranks by pickle.

    Attributes:
        step: its step.
        nonce: of the attempt that wrote it.
        manifest_sha256: of its MANIFEST, in hex.
    """

    step: int
    nonce: str
    manifest_sha256: str


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A committed step whose files are all there, each of the size that it must have. Crosses ranks by pickle.

    Attributes:
        step: its step.
        path: of the checkpoint.
        nonce: of the attempt that wrote it.
        manifest_sha256: of its MANIFEST, in hex.
        saved_at: when, UTC, as in RFC 3339; None where unknown.
        run_id: name of the run that wrote it; empty where unknown.
        world_size: ranks that saved it.
        stored_bytes: of its shard files.
        metadata: what its writer was given as ``metadata``.
    """

    step: int
    path: str
    nonce: str
    manifest_sha256: str
    saved_at: str | None
    run_id: str
    world_size: int
    stored_bytes: int
    metadata: Mapping[str, Any]

    @property
    def decision(self) -> Decision:
        """What other ranks must see, too."""
        return Decision(self.step, self.nonce, self.manifest_sha256)


def look_at_step(place: Location, step: int, *, storage_options: Mapping[str, Any], signing_key: SecretKey | None) -> StepInfo:
    """Look at one step. See ``RunRoot.look``.

    Args:
        place: of the step.
        step: that its name says.
        storage_options: keyword arguments of the fsspec file system of a URL.
        signing_key: whose holder must have signed it; ``None``: it need not be signed.
    """
    opened = open_checkpoint(place.path, storage_options=storage_options)
    with opened.hold:
        manifest = check_whole(opened, signing_key, step=step)
        metadata = metadata_of_manifest(manifest, path=place.path, manifest_sha256=opened.marker.manifest_sha256)
    return StepInfo(
        step=step,
        path=place.path,
        nonce=opened.marker.nonce,
        manifest_sha256=opened.marker.manifest_sha256,
        saved_at=metadata.saved_at,
        run_id=manifest.run_id,
        world_size=manifest.world_size,
        stored_bytes=sum(record.size_bytes for record in manifest.files),
        metadata=metadata.user_metadata,
    )
