"""A root in an object store: epochs by conditional creation, and tombstones in place of renames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dcp_engine.errors import (
    CorruptCheckpointError,
    DcpEngineError,
    InvalidOptionError,
    MissingFileError,
    StorageError,
    UnsupportedVersionError,
)
from dcp_engine.storage.attempts import MARKER_NAME, is_own_file, nonce_at, read_marker
from dcp_engine.storage.backends import Location
from dcp_engine.storage.backends.remote import RemoteDirectory
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.epochs import EPOCHS_NAME, EpochRecord, epoch_name
from dcp_engine.storage.holds import Hold
from dcp_engine.storage.latest import LATEST_NAME
from dcp_engine.storage.limits import MAX_MARKER_BYTES
from dcp_engine.storage.publish_remote import PROBE_NAME
from dcp_engine.storage.root_store import Retirement, refuse_checkpoint, refuse_enclosed
from dcp_engine.storage.steps import parse_step_name, step_name
from dcp_engine.storage.texts import MAX_TEXT_FILE_BYTES
from dcp_engine.storage.tombstones import RETIRED, is_tombstone, parse_tombstone, tombstone_bytes

__all__ = ["RemoteRoot"]

_logger = logging.getLogger(__name__)


class RemoteRoot:
    """See :class:`~dcp_engine.storage.root_store.RootStore`. Construction loads the driver, and asks the storage nothing.

    Raises:
        InvalidOptionError: there is no driver for the URL, or it does not understand the options.
    """

    def __init__(self, location: Location, storage_options: Mapping[str, Any]) -> None:
        self._url = location.path
        self._storage_options = storage_options
        self._directory = RemoteDirectory.at(location.path, storage_options)

    def prepare(self) -> None:
        """Looks whether the prefix can be a root."""
        refuse_enclosed(self._url, lambda url, file: _has(RemoteDirectory.at(url, self._storage_options), file))
        if self._directory.kind() == "file":
            raise InvalidOptionError("this cannot be a root", path=self._url, expected="a prefix", found="an object")
        refuse_checkpoint(self._url, self._directory.names())
        self._epochs().make()

    def create_epoch(self, record: EpochRecord) -> bool:
        """Puts the object, if there is none of that name, and reads it back where the answer was lost."""
        directory, name, content = self._epochs(), epoch_name(record.epoch), record.encode()
        failure: StorageError | None = None
        try:
            if directory.creates_conditionally(PROBE_NAME):
                directory.create_only(name, content)
            elif _content(directory, name) is None:
                _logger.warning(
                    "the storage of %s cannot create an object only if there is none: two runs that claim it at the same moment may both "
                    "go on; make sure that only one does",
                    self._url,
                )
                directory.replace(name, content)
        except StorageError as error:
            failure = error
        there = _content(directory, name)
        if there is None:
            raise failure or StorageError("the epoch was put and did not appear", path=directory.path, file=name)
        return there == content

    def revoke(self, check: Callable[[], None]) -> None:
        """Puts a tombstone where an attempt at a step would put its COMPLETE, which it only creates if there is nothing."""
        pending = []
        for name in self._directory.names():
            if parse_step_name(name) is not None:
                place = self._directory.child(name)
                nonces = [inner for inner in place.names() if is_nonce(inner)]
                if nonces and _content(place, MARKER_NAME) is None:
                    pending.append((place, nonces))
        # Whatever was seen before this belongs to older epochs: a newer one would show here, and begins no attempt before it shows.
        check()
        if not pending or not self._epochs().creates_conditionally(PROBE_NAME):
            return
        for place, nonces in pending:
            try:
                place.create_only(MARKER_NAME, tombstone_bytes(nonces))
            except StorageError:
                if _content(place, MARKER_NAME) is None:
                    raise

    def check_entry(self, step: int) -> None:
        """Prefixes lead nowhere else."""

    def hold(self, step: int) -> Hold:
        """Nothing to hold: readers of an object store are not seen."""
        return Hold()

    def retire(self, step: int, nonce: str) -> Retirement:
        """Replaces COMPLETE by a tombstone, then removes the data."""
        place = self._place(step)
        tag = place.tag(MARKER_NAME)  # before the content: if that is changed in between, it is the tag of what is not there any more
        try:
            if read_marker(place).nonce != nonce:
                return Retirement.CHANGED
        except StorageError:
            raise
        except DcpEngineError:
            return Retirement.CHANGED
        tombstone = tombstone_bytes([nonce])
        try:
            self._bury(place, tombstone, tag)
        except StorageError:
            if _content(place, MARKER_NAME) != tombstone:
                raise
        if _content(place, MARKER_NAME) != tombstone:
            if nonce_at(place) != nonce:
                return Retirement.CHANGED
            raise StorageError("the tombstone was refused, although the step is unchanged", path=place.path, remedy="retire it again")
        self._remove_data(place, (nonce,))
        return Retirement.UNGUARDED

    def clean(self, older_than_secs: float, *, keep_whole: bool) -> tuple[str, ...]:
        """Removes what is left of the data under tombstones. Nobody can publish it any more, so that its age does not matter."""
        cleaned = []
        for name in self._directory.names():
            if parse_step_name(name) is None:
                continue
            place = self._directory.child(name)
            content = _content(place, MARKER_NAME)
            if content is None or not is_tombstone(content):
                continue
            try:
                nonces = parse_tombstone(content, path=place.path).nonces
            except (CorruptCheckpointError, UnsupportedVersionError) as error:
                _logger.warning("the data of a retired step is left alone: %s", error)
                continue
            if self._remove_data(place, nonces):
                cleaned.append(name)
        return tuple(cleaned)

    def free_bytes(self) -> None:
        """Object stores do not tell."""

    def put_latest(self, content: bytes) -> None:
        """Overwrites the object."""
        self._directory.replace(LATEST_NAME, content)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _epochs(self) -> RemoteDirectory:
        return self._directory.child(EPOCHS_NAME)

    def _place(self, step: int) -> RemoteDirectory:
        return self._directory.child(step_name(step))

    def _bury(self, place: RemoteDirectory, tombstone: bytes, tag: str | None) -> None:
        """Puts a tombstone in place of the COMPLETE with this tag, where the storage can: one that comes late must not meet a newer one."""
        if tag is not None and self._epochs().swaps(PROBE_NAME):
            place.put_until_answered(MARKER_NAME, tombstone, over=tag)
        else:
            place.replace(MARKER_NAME, tombstone)

    def _remove_data(self, place: RemoteDirectory, nonces: tuple[str, ...]) -> int:
        """Removes the files of retired attempts, as far as possible, as long as the tombstone is there. Returns how many are gone."""
        removed = 0
        try:
            if nonce_at(place) != RETIRED:
                return 0
            targets = [(place, name) for name in place.names() if is_own_file(name) and name != MARKER_NAME]
            children = [place.child(nonce) for nonce in nonces]
            targets += [(child, name) for child in children for name in child.names() if is_own_file(name) or name == PROBE_NAME]
            for directory, name in targets:
                directory.remove(name)
                removed += 1
            for child in children:
                child.unmake()
        except DcpEngineError as error:
            _logger.warning("could not remove all data of the retired step %s: the next clean-up tries again: %s", place.path, error)
        return removed


def _has(directory: RemoteDirectory, name: str) -> bool:
    try:
        directory.file_size(name)
    except MissingFileError:
        return False
    return True


def _content(directory: RemoteDirectory, name: str) -> bytes | None:
    """The content of a small object; None if there is none."""
    try:
        return directory.read_small(name, max(MAX_TEXT_FILE_BYTES, MAX_MARKER_BYTES))
    except MissingFileError:
        return None
