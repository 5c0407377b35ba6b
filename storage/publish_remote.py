"""Publishes by one small object: object stores, which can neither rename nor flush.

The files of an attempt are put under ``<target>/<nonce>/``, where nobody looks, and ``<target>/COMPLETE`` names the nonce. Creating that
object only if there is none is the commit. A reply that got lost is answered by reading it back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dcp_engine.errors import (
    CheckpointExistsError,
    CommitStateUnknownError,
    ConcurrentCommitError,
    CorruptCheckpointError,
    DcpEngineError,
    StorageError,
    StoragePermissionError,
    UnsupportedVersionError,
)
from dcp_engine.storage.attempts import (
    MANIFEST_NAME,
    MARKER_NAME,
    AttemptRef,
    Fence,
    changed_meanwhile,
    check_replaceable,
    check_reported,
    check_same_target,
    is_own_file,
    marker_of,
    new_nonce,
    nonce_at,
    published_first,
    write_whole,
)
from dcp_engine.storage.backends import Location
from dcp_engine.storage.backends.remote import RemoteDirectory
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.tombstones import RETIRED

__all__ = ["PROBE_NAME", "RemotePublisher"]

_logger = logging.getLogger(__name__)

PROBE_NAME = "PROBE"
"""Object that the test for conditional creation may leave in an attempt, where a storage allows no removal."""
_INCOMPLETE = "incomplete"
_NUM_TRIES = 4
_FIRST_WAIT_SECS = 0.5
_NUM_REQUESTS = 16


class RemotePublisher:
    """See :class:`~dcp_engine.storage.attempts.Publisher`. No I/O on construction.

    Args:
        storage_options: keyword arguments of the fsspec file system.
    """

    def __init__(
        self,
        location: Location,
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        fence: Fence | None = None,
    ) -> None:
        self._target = location.path
        self._storage_options = dict(storage_options or {})
        self._overwrite = overwrite
        self._fence = fence
        self._uncertain: set[str] = set()

    @property
    def target(self) -> str:
        """URL of the checkpoint."""
        return self._target

    def begin(self) -> AttemptRef:
        """Checks the target; creates nothing but, once per storage, a probe."""
        directory = self._directory()
        replaces = self._inspect_target(directory)
        nonce = new_nonce()
        attempt = directory.child(nonce)
        attempt.make()
        if not attempt.creates_conditionally(PROBE_NAME):
            _logger.warning(
                "the storage of %s cannot create an object only if there is none: two jobs that save to one path at the same time "
                "would not notice each other; make sure that only one does",
                self._target,
            )
        if self._fence is not None:
            self._fence.check()
        return AttemptRef(nonce=nonce, target=self._target, attempt=attempt.path, remote=True, replaces=replaces)

    def attempt(self, ref: AttemptRef) -> RemoteDirectory:
        """The attempt's prefix."""
        check_same_target(self._target, ref)
        return self._directory().child(ref.nonce)

    def seal(self, ref: AttemptRef) -> None:
        """Nothing to do: an object is durable when its put returns."""

    def commit(self, ref: AttemptRef, manifest: bytes, files: Sequence[tuple[str, int]]) -> None:
        """MANIFEST, then COMPLETE, which must not exist."""
        check_same_target(self._target, ref)
        directory = self._directory()
        attempt = directory.child(ref.nonce)
        _check_files(attempt, files)
        write_whole(attempt, MANIFEST_NAME, manifest)
        replaced = self._check_replaced(directory, ref)
        if self._fence is not None:
            self._fence.check()
        try:
            self._publish(directory, ref, marker_of(ref.nonce, ref.nonce, manifest))
        except ConcurrentCommitError:
            if self._fence is not None:
                self._fence.check()  # a newer epoch revoked this attempt: that says more
            raise
        for place, name in replaced:
            try:
                place.remove(name)
            except StorageError as error:
                _logger.warning("could not remove %r of the replaced checkpoint at %s: %s", name, place.path, error)
        if ref.replaces is not None and is_nonce(ref.replaces):
            directory.child(ref.replaces).unmake()

    def abort(self, ref: AttemptRef) -> None:
        """Removes the objects of the attempt, unless COMPLETE names it or cannot be read."""
        if ref.nonce in self._uncertain:
            return
        try:
            directory = self._directory()
            if nonce_at(directory) == ref.nonce:
                return
            attempt = directory.child(ref.nonce)
            for name in attempt.names():
                attempt.remove(name)
            attempt.unmake()
        except DcpEngineError as error:
            _logger.warning("could not remove the abandoned attempt %s: %s", ref.attempt, error)

    # -- the target ---------------------------------------------------------------------------------------------------

    def _directory(self) -> RemoteDirectory:
        return RemoteDirectory.at(self._target, self._storage_options)

    def _inspect_target(self, directory: RemoteDirectory) -> str | None:
        """What a commit will replace (see ``AttemptRef.replaces``). Raises if there is something that it must not."""
        if directory.kind() == "file":
            raise CheckpointExistsError("the name is taken", path=self._target, found="an object", remedy="save to another name")
        # Prefixes of other attempts may lie there: without COMPLETE they are nothing.
        names = [name for name in directory.names() if not is_nonce(name)]
        strangers = [name for name in names if not is_own_file(name)]
        try:
            nonce = nonce_at(directory)
        except (CorruptCheckpointError, UnsupportedVersionError):
            nonce = _INCOMPLETE
        if nonce is None and not names:
            return None
        # A listing may be late: what COMPLETE says is there, is there.
        check_replaceable(self._target, names or [MARKER_NAME], strangers, overwrite=self._overwrite or nonce == RETIRED)
        return nonce or _INCOMPLETE

    def _check_replaced(self, directory: RemoteDirectory, ref: AttemptRef) -> list[tuple[RemoteDirectory, str]]:
        """The objects that nobody needs once the new checkpoint is published."""
        if ref.replaces is None:
            return []
        if (there := self._inspect_target(directory)) != ref.replaces:
            raise changed_meanwhile(self._target, ref.replaces, there)
        replaced = [(directory, name) for name in directory.names() if is_own_file(name) and name != MARKER_NAME]
        if is_nonce(ref.replaces):
            old = directory.child(ref.replaces)
            replaced += [(old, name) for name in old.names() if is_own_file(name)]
        return replaced

    def _publish(self, directory: RemoteDirectory, ref: AttemptRef, marker: bytes) -> None:
        """Puts COMPLETE, again where it cannot be told whether it arrived: nobody but this attempt ever puts these bytes."""
        failure: StorageError | None = None
        for number in range(_NUM_TRIES):
            if number:
                time.sleep(_FIRST_WAIT_SECS * 2 ** (number - 1))
            try:
                self._put_marker(directory, ref, marker)
                failure = None
            except StorageError as error:
                failure = error
            try:
                there = nonce_at(directory)
            except StorageError as error:
                failure = failure or error
                continue
            except (CorruptCheckpointError, UnsupportedVersionError):
                there = _INCOMPLETE
            if there == ref.nonce:
                return
            if there not in (None, ref.replaces):
                raise published_first(self._target, ref.nonce, there)
            if isinstance(failure, StoragePermissionError):
                raise failure
        self._uncertain.add(ref.nonce)
        raise CommitStateUnknownError(
            "it cannot be told whether the checkpoint was published",
            path=self._target,
            file=MARKER_NAME,
            found=str(failure) if failure is not None else "COMPLETE was put and did not appear",
            remedy="read COMPLETE before saving again; nothing was deleted",
        ) from failure

    def _put_marker(self, directory: RemoteDirectory, ref: AttemptRef, marker: bytes) -> None:
        if ref.replaces is not None:
            directory.replace(MARKER_NAME, marker)
        elif directory.child(ref.nonce).creates_conditionally(PROBE_NAME):
            directory.create_only(MARKER_NAME, marker)
        elif nonce_at(directory) is None:
            directory.replace(MARKER_NAME, marker)


def _check_files(directory: RemoteDirectory, files: Sequence[tuple[str, int]]) -> None:
    """The attempt must hold exactly what the ranks reported."""
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        sizes = list(pool.map(directory.file_size, [name for name, _ in files]))
    check_reported(directory.path, files, sizes, (name for name in directory.names() if name != PROBE_NAME))
