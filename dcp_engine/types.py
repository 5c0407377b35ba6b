"""The vocabulary that planners and storage share, so that neither imports the other.

Records only: no I/O, no decisions. Everything here may cross ranks by pickle.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, StorageMeta

from dcp_engine.plan_columns import PlanColumns

__all__ = ["EncodedObject", "EngineMetadata", "EngineStorageMeta", "Path", "PlannerData", "WritePhases"]

Path = tuple[str | int, ...]
"""DCP's OBJ_PATH, where a value stands in a state: a str is a key of a mapping as text, an int an index of a sequence."""


class EncodedObject(io.BytesIO):
    """An object in the encoding of :mod:`dcp_engine.objects`, in the shape that DCP expects of bytes.

    Our save planner returns it from ``resolve_data`` when the writer is ours, and our reader hands it to ``load_bytes`` of a planner that
    says so with ``accepts_encoded_objects = True``. Any other ``BytesIO`` is opaque to the engine: it may hold a pickle.
    """


@dataclass(frozen=True, slots=True)
class WritePhases:
    """Where the time of a save went on one rank, as its writer saw it.

    Attributes:
        plan_secs: from the save's beginning to the moment when this rank may write, the exchange of plans included.
        write_secs: writing this rank's files until they are durable.
        raw_bytes: of what this rank wrote, as it lies in memory.
        stored_bytes: of this rank's files.
    """

    plan_secs: float
    write_secs: float
    raw_bytes: int
    stored_bytes: int


@dataclass
class EngineStorageMeta(StorageMeta):
    """What our writer tells a planner before planning. Its type is the handshake: a planner that receives it may use the engine's own
    plan records; one that receives anything else must emit what DCP's own writers and readers expect.
    """


@dataclass
class EngineMetadata(Metadata):
    """DCP's ``Metadata`` of a checkpoint of ours, with what the format knows beyond it.

    ``planner_data`` of it is a :class:`PlannerData` where our planner saved it, else what the stock planner put there.

    ``state_dict_metadata`` may be given as columns. They travel as such, and become DCP's records when somebody looks.
    """

    step: int | None = None
    run_id: str | None = None
    saved_at: str | None = None
    """UTC time of the save, RFC 3339."""
    nonce: str | None = None
    """Hex nonce of the attempt that wrote it: two checkpoints with one nonce are copies of each other."""
    manifest_sha256: str | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> PlanColumns | None:
        """What is stored, as columns; None where it was given as records, or somebody has looked at these and may have changed them."""
        stored = self.__dict__["_stored"]
        return stored if isinstance(stored, PlanColumns) else None


class _RecordsOnDemand:
    """``state_dict_metadata`` of :class:`EngineMetadata`. What it gives is an ordinary dict: nothing that can be done with one, be it from
    C, passes by it.
    """

    def __get__(self, metadata: EngineMetadata | None, owner: type[EngineMetadata] | None = None) -> Any:
        if metadata is None:
            return self
        stored = metadata.__dict__["_stored"]
        if isinstance(stored, PlanColumns):
            stored = metadata.__dict__["_stored"] = stored.described()
        return stored

    def __set__(self, metadata: EngineMetadata, stored: dict[str, STORAGE_TYPES] | PlanColumns) -> None:
        metadata.__dict__["_stored"] = stored


EngineMetadata.state_dict_metadata = _RecordsOnDemand()  # type: ignore[assignment]


class PlannerData(dict[str, Path]):
    """DCP's flattening (key -> path), as every stock planner understands it, and beside it what that flattening loses.

    Attributes:
        skeleton: encoded by ``planners.skeleton`` with :mod:`dcp_engine.objects`: the containers of the state with their exact types and
            key types, leaves replaced by their keys. Empty bytes when unknown.
        ties: alias key -> key under which the same storage was saved. An alias has no chunks of its own.
    """

    def __init__(
        self,
        mapping: dict[str, Path] | None = None,
        *,
        skeleton: bytes = b"",
        ties: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(mapping or {})
        self.skeleton = skeleton
        self.ties = dict(ties or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (_planner_data, (dict(self), self.skeleton, self.ties))


def _planner_data(mapping: dict[str, Path], skeleton: bytes, ties: dict[str, str]) -> PlannerData:
    return PlannerData(mapping, skeleton=skeleton, ties=ties)
