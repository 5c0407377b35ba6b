"""What a checkpoint holds, under the names that the state uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from dcp_engine.errors import CorruptCheckpointError, KeyMismatchError
from dcp_engine.planners.rename import rename_all
from dcp_engine.planners.selection import Selection
from dcp_engine.types import PlannerData

__all__ = ["Catalogue", "Entry", "read_catalogue"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the checkpoint.

    Attributes:
        key: its key in the checkpoint.
        owner: the key whose chunks hold its values: another one where it was saved as a tie.
        stored: what is recorded of the owner.
    """

    key: str
    owner: str
    stored: TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The selected keys of a checkpoint.

    Attributes:
        entries: name in the state -> entry, sorted by name: the order is the same on all ranks.
        digest: of all names and keys, to tell whether two ranks see the same checkpoint.
    """

    entries: Mapping[str, Entry]
    digest: bytes

    def __contains__(self, name: object) -> bool:
        return name in self.entries


def read_catalogue(metadata: Metadata, rename: Callable[[str], str] | None, selection: Selection) -> Catalogue:
    """Reads a checkpoint's keys, of any reader.

    Raises:
        DuplicateKeyError: two keys get one name.
        KeyMismatchError: a pattern of the selection selects nothing.
        CorruptCheckpointError: a tie to a key that is not there.
        Any error that the reader's own metadata raises when looked at, untouched.
    """
    recorded: Mapping[str, Any] = metadata.state_dict_metadata
    planner_data = metadata.planner_data
    ties = planner_data.ties if isinstance(planner_data, PlannerData) else {}
    names = rename_all([*recorded, *(alias for alias in ties if alias not in recorded)], rename)
    unmatched = selection.unmatched(names)
    if unmatched:
        raise KeyMismatchError(
            f"keys= asks for what the checkpoint does not hold: {', '.join(map(repr, unmatched[:10]))}",
            missing=unmatched,
            remedy="patterns are matched against the keys after rename",
        )
    entries = {}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(filter(selection, names)):
        key = names[name]
        owner = _owner(key, ties, recorded)
        entries[name] = Entry(key, owner, recorded[owner])
        digest.update(f"{name}\0{key}\0".encode(errors="surrogatepass"))
    return Catalogue(entries, digest.digest())


def _owner(key: str, ties: Mapping[str, str], recorded: Mapping[str, Any]) -> str:
    owner = ties.get(key, key)
    if owner not in recorded:
        raise CorruptCheckpointError(
            "a key was saved as a tie to another one, which the checkpoint does not hold", tensor=key, expected=f"an entry for {owner!r}"
        )
    return owner
