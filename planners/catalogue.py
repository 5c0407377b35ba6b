"""What a checkpoint holds, under the names that the state uses."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from dcp_engine.errors import CorruptCheckpointError, KeyMismatchError
from dcp_engine.planners.rename import rename_all
from dcp_engine.planners.selection import Selection
from dcp_engine.stored_tensors import stored_tensors_of
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

    @property
    def names(self) -> Collection[str]:
        """The names alone, in a dict: asked for every key of a state, a mapping written in Python takes several times as long."""
        return self.entries.keys_of if isinstance(self.entries, _Entries) else self.entries

    def __contains__(self, name: object) -> bool:
        return name in self.names


def read_catalogue(metadata: Metadata, rename: Callable[[str], str] | None, selection: Selection) -> Catalogue:
    """Reads a checkpoint's keys, of any reader.

    Raises:
        DuplicateKeyError: two keys get one name.
        KeyMismatchError: a pattern of the selection selects nothing.
        CorruptCheckpointError: a tie to a key that is not there.
        Any error that the reader's own metadata raises when looked at, untouched.
    """
    recorded: Mapping[str, Any] = metadata.state_dict_metadata
    ties = _ties(metadata)
    names = rename_all([*recorded, *(alias for alias in ties if alias not in recorded)], rename)
    unmatched = selection.unmatched(names)
    if unmatched:
        raise KeyMismatchError(
            f"keys= asks for what the checkpoint does not hold: {', '.join(map(repr, unmatched[:10]))}",
            missing=unmatched,
            remedy="patterns are matched against the keys after rename",
        )
    chosen = sorted(names if selection.is_all else filter(selection, names))
    keys = {name: names[name] for name in chosen}
    loose = {key for key, owner in ties.items() if owner not in recorded}
    for key in keys.values() if loose else ():
        if key in loose:
            raise CorruptCheckpointError(
                "a key was saved as a tie to another one, which the checkpoint does not hold",
                tensor=key,
                expected=f"an entry for {ties[key]!r}",
            )
    digest = hashlib.blake2b("\0".join(itertools.chain(keys, keys.values())).encode(errors="surrogatepass"), digest_size=16)
    return Catalogue(_Entries(keys, ties, recorded), digest.digest())


def _ties(metadata: Metadata) -> Mapping[str, str]:
    stored = stored_tensors_of(metadata)
    if stored is not None:
        return stored.ties  # without a look at planner_data, which is large and would be decoded
    planner_data = metadata.planner_data
    return planner_data.ties if isinstance(planner_data, PlannerData) else {}


class _Entries(Mapping[str, Entry]):
    """Name -> entry, made when it is asked for."""

    __slots__ = ("_recorded", "_ties", "keys_of")

    def __init__(self, keys: Mapping[str, str], ties: Mapping[str, str], recorded: Mapping[str, Any]) -> None:
        self.keys_of = keys
        self._ties = ties
        self._recorded = recorded

    def __len__(self) -> int:
        return len(self.keys_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_of)

    def __contains__(self, name: object) -> bool:
        return name in self.keys_of

    def __getitem__(self, name: str) -> Entry:
        key = self.keys_of[name]
        owner = self._ties.get(key, key)
        return Entry(key, owner, self._recorded[owner])
