"""Publishes by one small object: object stores, which can neither rename nor flush.

The files of an attempt are put under ``<target>/<nonce>/``, where nobody looks, and ``<target>/COMPLETE`` names the nonce. Creating that
object only if there is none is the commit; where a checkpoint is replaced, putting it only in place of the COMPLETE that was there. What
was answered by nothing, or by an error that does not say whether the request took effect, is read back. It may still take effect later, so
that nothing of the attempt is removed as long as that is possible (see docs/decisions/0018).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dcp_engine.errors import (
    CheckpointExistsError,
    CommitStateUnknownError,
    ConcurrentCommitError,
    CorruptCheckpointError,
    DcpEngineError,
    StorageError,
    UnsupportedVersionError,
)
from dcp_engine.storage.attempts import (
    INCOMPLETE,
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
from dcp_engine.storage.backends.answers import Answer
from dcp_engine.storage.backends.remote import RemoteDirectory
from dcp_engine.storage.backends.requests import NUM_TIMEOUTS, NUM_TRIES, pause, timed_out
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.tombstones import RETIRED

__all__ = ["PROBE_NAME", "RemotePublisher"]

_logger = logging.getLogger(__name__)

PROBE_NAME = "PROBE"
"""Object that the test for conditional creation may leave in an attempt, where a storage allows no removal."""
_NUM_REQUESTS = 16
_MAX_LOOKED_AT = 16


@dataclass(frozen=True, slots=True)
class _Condition:
    """What a put of COMPLETE depends on. At most one of both is set; if none is, nothing holds other writers off."""

    create: bool = False
    """That there is none."""
    over: str | None = None
    """That it still is the one with this tag."""

    @property
    def holds(self) -> bool:
        """Whether a put that comes late, or second, cannot displace another writer's COMPLETE."""
        return self.create or self.over is not None


class RemotePublisher:
    """See :class:`~dcp_engine.storage.attempts.Publisher`. No I/O on construction.

    Args:
        storage_options: see :meth:`RemoteDirectory.at`.
    """

    def __init__(
        self,
        location: Location,
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        fence: Fence | None = None,
        signing_key: SecretKey | None = None,
    ) -> None:
        self._target = location.path
        self._storage_options = dict(storage_options or {})
        self._overwrite = overwrite
        self._fence = fence
        self._signing_key = signing_key
        self._uncertain: set[str] = set()
        self._known: dict[str, tuple[str, ...]] = {}

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
            self._warn("create an object only if there is none")
        elif replaces is not None and not attempt.swaps(PROBE_NAME):
            self._warn("replace an object only if it still is what it was")
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
        self._known[ref.nonce] = tuple(name for name, _ in files)
        _check_files(attempt, files)
        _write_manifest(attempt, manifest)
        condition, replaced = self._check_replaced(directory, ref)
        if self._fence is not None:
            self._fence.check()
        try:
            self._publish(directory, ref, marker_of(ref.nonce, ref.nonce, manifest, self._signing_key), condition)
        except ConcurrentCommitError:
            if self._fence is not None:
                self._fence.check()  # a newer epoch revoked this attempt: that says more
            raise
        _remove_replaced(replaced)
        if ref.replaces is not None and is_nonce(ref.replaces):
            directory.child(ref.replaces).unmake()

    def abort(self, ref: AttemptRef) -> None:
        """Removes the objects of the attempt, unless COMPLETE names it or cannot be read. Gives up at the first that cannot be removed."""
        if ref.nonce in self._uncertain:
            return
        try:
            directory = self._directory()
            if nonce_at(directory) == ref.nonce:
                return
            attempt = directory.child(ref.nonce)
            # A listing may be late: what this attempt is known to have put goes in any case.
            for name in {*attempt.names(), *self._known.pop(ref.nonce, ()), MANIFEST_NAME, PROBE_NAME}:
                attempt.remove(name)
            attempt.unmake()
        except DcpEngineError as error:
            _logger.warning("could not remove the abandoned attempt %s: %s", ref.attempt, error)

    def revoke(self, ref: AttemptRef) -> bool:
        """Looks only: a put that is under way cannot be held back."""
        check_same_target(self._target, ref)
        found: object = None
        try:
            found = nonce_at(self._directory())
            if found == ref.nonce:
                return False
        except DcpEngineError as error:
            found = error
        raise CommitStateUnknownError(
            "it cannot be told whether the checkpoint was or will be published: its coordinator is lost",
            path=self._target,
            file=MARKER_NAME,
            found=found,
            remedy="make sure that the lost process is gone, then look for COMPLETE",
        )

    # -- the target ---------------------------------------------------------------------------------------------------

    def _directory(self) -> RemoteDirectory:
        return RemoteDirectory.at(self._target, self._storage_options)

    def _inspect_target(self, directory: RemoteDirectory) -> str | None:
        """What a commit will replace (see ``AttemptRef.replaces``). Raises if there is something that it must not."""
        if directory.kind() == "file":
            raise CheckpointExistsError("the name is taken", path=self._target, found="an object", remedy="save to another name")
        # Prefixes of other attempts may lie there: without COMPLETE they are nothing.
        names = [name for name in directory.names() if not is_nonce(name)]
        nonce = _nonce_there(directory)
        # A listing may be late: what COMPLETE says is there, is there, and what is not found is gone.
        if nonce is None:
            names = _still_there(directory, names)
            if not names:
                return None
        strangers = [name for name in names if not is_own_file(name)]
        check_replaceable(self._target, names or [MARKER_NAME], strangers, overwrite=self._overwrite or nonce == RETIRED)
        return nonce or INCOMPLETE

    def _check_replaced(self, directory: RemoteDirectory, ref: AttemptRef) -> tuple[_Condition, list[tuple[RemoteDirectory, str]]]:
        """On what COMPLETE may be put, and the objects that nobody needs once it is."""
        attempt = directory.child(ref.nonce)
        if ref.replaces is None:
            return _Condition(create=attempt.creates_conditionally(PROBE_NAME)), []
        # The tag comes first: if another writer slips in between, it is the tag of what is not there any more.
        vacant, tag = not directory.holds(MARKER_NAME), directory.tag(MARKER_NAME)
        if (there := self._inspect_target(directory)) != ref.replaces:
            raise changed_meanwhile(self._target, ref.replaces, there)
        if vacant and there == INCOMPLETE:
            condition = _Condition(create=attempt.creates_conditionally(PROBE_NAME))
        else:
            condition = _Condition(over=tag if attempt.swaps(PROBE_NAME) else None)
        replaced = [(directory, name) for name in directory.names() if is_own_file(name) and name != MARKER_NAME]
        if is_nonce(ref.replaces):
            old = directory.child(ref.replaces)
            replaced += [(old, name) for name in old.names() if is_own_file(name)]
        return condition, replaced

    def _publish(self, directory: RemoteDirectory, ref: AttemptRef, marker: bytes, condition: _Condition) -> None:
        """Puts COMPLETE until it is seen there, or another is. Again is harmless: nobody else ever puts these bytes."""
        failure: StorageError | None = None
        may_arrive = False
        timeouts = 0
        for number in range(NUM_TRIES):
            if number:
                pause(number)
            answer, failure = self._put_marker(directory, ref, marker, condition)
            may_arrive = may_arrive or answer in (Answer.DONE, Answer.UNKNOWN)
            timeouts += failure is not None and timed_out(failure)
            try:
                there = _nonce_there(directory)
            except StorageError as error:
                there, failure = None, failure or error
                timeouts += NUM_TIMEOUTS if timed_out(error) else 0
            if there == ref.nonce:
                return
            if there not in (None, ref.replaces):
                if may_arrive and not condition.holds:
                    break  # it may displace the other yet
                raise published_first(self._target, ref.nonce, there)
            if timeouts >= NUM_TIMEOUTS or answer in (Answer.REFUSED, Answer.ABSENT):
                break
        if failure is not None and not may_arrive:
            raise failure
        self._uncertain.add(ref.nonce)
        raise CommitStateUnknownError(
            "it cannot be told whether the checkpoint was published, or will be when a request arrives late",
            path=self._target,
            file=MARKER_NAME,
            found=str(failure) if failure is not None else "COMPLETE was put and did not appear",
            remedy="read COMPLETE before saving again; nothing was deleted",
        ) from failure

    def _put_marker(
        self, directory: RemoteDirectory, ref: AttemptRef, marker: bytes, condition: _Condition
    ) -> tuple[Answer, StorageError | None]:
        """One put of COMPLETE. Where the storage knows no conditions, what is there is looked at first."""
        if not condition.holds:
            try:
                if _nonce_there(directory) not in (None, ref.nonce, ref.replaces):
                    return Answer.EXISTS, None
            except StorageError as error:
                return Answer.BUSY, error
        return directory.put_once(MARKER_NAME, marker, create=condition.create, over=condition.over)

    def _warn(self, ability: str) -> None:
        _logger.warning(
            "the storage of %s cannot %s: two jobs that save to one path at the same time would not notice each other; make sure that only "
            "one does",
            self._target,
            ability,
        )


def _check_files(directory: RemoteDirectory, files: Sequence[tuple[str, int]]) -> None:
    """The attempt must hold exactly what the ranks reported."""
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        sizes = list(pool.map(directory.file_size, [name for name, _ in files]))
    check_reported(directory.path, files, sizes, (name for name in directory.names() if name != PROBE_NAME))


def _write_manifest(attempt: RemoteDirectory, manifest: bytes) -> None:
    """Writes MANIFEST and reads it back: what COMPLETE is going to vouch for is what the storage gives to readers."""
    write_whole(attempt, MANIFEST_NAME, manifest)
    found = attempt.read_small(MANIFEST_NAME, len(manifest))
    if found != manifest:
        raise StorageError(
            "the object did not arrive as it was sent",
            path=attempt.path,
            file=MANIFEST_NAME,
            expected=hashlib.sha256(manifest).hexdigest(),
            found=hashlib.sha256(found).hexdigest(),
        )


def _nonce_there(directory: RemoteDirectory) -> str | None:
    """Nonce of the checkpoint that is there, ``"incomplete"`` for a damaged one or None for none. Raises ``StorageError``."""
    try:
        return nonce_at(directory)
    except (CorruptCheckpointError, UnsupportedVersionError):
        return INCOMPLETE


def _still_there(directory: RemoteDirectory, names: Sequence[str]) -> list[str]:
    """Those of the listed names that are found when they are asked for. Beyond the first few, a listing is believed."""
    return [name for name in names[:_MAX_LOOKED_AT] if directory.holds(name)] + list(names[_MAX_LOOKED_AT:])


def _remove_replaced(replaced: Sequence[tuple[RemoteDirectory, str]]) -> None:
    """Removes what the new checkpoint replaced, as far as possible: it is published, and what stays harms nobody."""
    for place, name in replaced:
        try:
            place.remove(name)
        except StorageError as error:
            _logger.warning("could not remove %r of the replaced checkpoint at %s: %s", name, place.path, error)
            if timed_out(error):
                return  # the others would take as long each
