"""Publishes by one rename within a directory: local disks, NFS, Lustre. An attempt is complete and flushed before it gets its name.

A replaced checkpoint and the new one swap names in one step where the system can (``RENAME_EXCHANGE``), so that no reader ever finds
neither; elsewhere the old one is moved aside first and put back if the second rename fails.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence

from dcp_engine.errors import (
    CheckpointExistsError,
    CommitStateUnknownError,
    CorruptCheckpointError,
    DcpEngineError,
    InvalidOptionError,
    RankDisagreementError,
)
from dcp_engine.storage.attempts import (
    MANIFEST_NAME,
    MARKER_NAME,
    AttemptRef,
    Fence,
    changed_meanwhile,
    check_reported,
    check_same_target,
    marker_of,
    new_nonce,
    nonce_at,
    published_first,
    write_whole,
)
from dcp_engine.storage.backends import Location
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.directories import (
    flush_directory,
    is_directory,
    make_directories,
    name_exists,
    remove_tree,
)
from dcp_engine.storage.backends.failures import PERMISSION_ERRNOS, storage_failure
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.entry_names import NAME_MAX_BYTES, attempt_name, trash_name
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.posix_target import describe, inspect_target, nonce_or_error

__all__ = ["PosixPublisher"]

_logger = logging.getLogger(__name__)

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
# With these the kernel has refused and done nothing. After any other error (EIO, ESTALE, a timeout of a network file system) the server may
# have renamed all the same.
_REFUSED = PERMISSION_ERRNOS | {
    errno.EBUSY,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EXDEV,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.ELOOP,
}
# A network file system may take a moment to show a directory that another node made.
_VISIBILITY_SECS = 15.0
_POLL_SECS = 0.25


class PosixPublisher:
    """See :class:`~dcp_engine.storage.attempts.Publisher`. No I/O on construction."""

    def __init__(
        self, location: Location, *, overwrite: bool = False, fence: Fence | None = None, signing_key: SecretKey | None = None
    ) -> None:
        self._target = location.path
        self._parent = os.path.dirname(location.path)
        self._name = location.name
        self._overwrite = overwrite
        self._fence = fence
        self._signing_key = signing_key
        self._uncertain: set[str] = set()

    @property
    def target(self) -> str:
        """Absolute path of the checkpoint."""
        return self._target

    def begin(self) -> AttemptRef:
        """Checks the target, creates the attempt directory beside it."""
        if not self._name:
            raise InvalidOptionError("the root of the file system cannot become a checkpoint", path=self._target)
        if len(os.fsencode(self._name)) > NAME_MAX_BYTES:
            raise InvalidOptionError(
                "the name of the checkpoint is too long", path=self._target, expected=f"at most {NAME_MAX_BYTES} bytes"
            )
        try:
            make_directories(self._parent)
        except OSError as error:
            raise storage_failure(error, "create the parent directory", path=self._parent) from error
        replaces = inspect_target(self._target, overwrite=self._overwrite)
        nonce = new_nonce()
        attempt = os.path.join(self._parent, attempt_name(self._name, nonce))
        try:
            system().mkdir(attempt, 0o777)
        except OSError as error:
            raise storage_failure(error, "create the attempt directory", path=attempt) from error
        try:
            flush_directory(self._parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                system().rmdir(attempt)
            raise storage_failure(error, "flush the directory", path=self._parent) from error
        ref = AttemptRef(nonce=nonce, target=self._target, attempt=attempt, remote=False, replaces=replaces)
        if self._fence is not None:
            # After the mkdir, not before: either this sees the newer epoch, or whoever made that sees this attempt and takes it away.
            try:
                self._fence.check()
            except BaseException:
                self.abort(ref)
                raise
        return ref

    def attempt(self, ref: AttemptRef) -> LocalDirectory:
        """The attempt directory, waited for a moment."""
        check_same_target(self._target, ref)
        deadline = time.monotonic() + _VISIBILITY_SECS
        while True:
            failure = None
            try:
                if is_directory(ref.attempt):
                    return LocalDirectory(ref.attempt)
            except OSError as error:  # of a network file system, perhaps for a moment
                failure = error
            if time.monotonic() >= deadline:
                if failure is not None:
                    raise storage_failure(failure, "look at the attempt directory", path=ref.attempt) from failure
                raise RankDisagreementError(
                    "this rank does not see the directory that the coordinator created",
                    path=ref.attempt,
                    found=f"no such directory on host {platform.node()!r}",
                    remedy="save to a file system that all ranks share, mounted at the same place",
                )
            time.sleep(_POLL_SECS)
            with contextlib.suppress(OSError):
                system().listdir(self._parent)  # makes a network file system ask its server again

    def seal(self, ref: AttemptRef) -> None:
        """Flushes the attempt directory."""
        try:
            flush_directory(ref.attempt)
        except OSError as error:
            raise storage_failure(error, "flush the directory", path=ref.attempt) from error

    def commit(self, ref: AttemptRef, manifest: bytes, files: Sequence[tuple[str, int]]) -> None:
        """MANIFEST, COMPLETE, rename, each flushed before the next."""
        check_same_target(self._target, ref)
        with self._explained(ref):
            directory = LocalDirectory(ref.attempt)
            check_reported(ref.attempt, files, [directory.file_size(name) for name, _ in files], directory.names())
            for name, content in ((MANIFEST_NAME, manifest), (MARKER_NAME, marker_of(ref.nonce, ".", manifest, self._signing_key))):
                write_whole(directory, name, content)
                self.seal(ref)
        retired = self._publish(ref)
        self._make_durable(ref)
        if retired is not None and not remove_tree(retired):
            _logger.warning("could not remove the replaced checkpoint %s: remove it by hand", retired)

    def abort(self, ref: AttemptRef) -> None:
        """Removes the attempt directory, if it is this attempt's."""
        if ref.nonce in self._uncertain or not os.path.basename(ref.attempt).endswith(ref.nonce):
            return
        try:
            if nonce_at(LocalDirectory(ref.attempt)) not in (None, ref.nonce):
                return  # an interrupted replacement left the old checkpoint under this name
        except CorruptCheckpointError:
            pass  # a half-written marker of our own
        except DcpEngineError as error:
            _logger.warning("the abandoned attempt %s is left alone: %s", ref.attempt, error)
            return
        if not remove_tree(ref.attempt):
            _logger.warning("could not remove the abandoned attempt %s: it is never read, remove it by hand", ref.attempt)

    @contextlib.contextmanager
    def _explained(self, ref: AttemptRef) -> Iterator[None]:
        """Where the attempt is gone because a newer epoch took it away, says so instead of what that led to."""
        try:
            yield
        except DcpEngineError:
            if self._fence is not None and not name_exists(ref.attempt):
                self._fence.check()
            raise

    def revoke(self, ref: AttemptRef) -> bool:
        """Renames the attempt away. There is one rename of it that succeeds: this one, or the one that publishes."""
        check_same_target(self._target, ref)
        if self._taken_away(ref):
            return True
        self._make_durable(ref)  # whoever published it may have been lost right before that
        return False

    def _make_durable(self, ref: AttemptRef) -> None:
        """The last step of publishing: has the checkpoint keep its name."""
        try:
            flush_directory(self._parent)
        except OSError as error:
            self._uncertain.add(ref.nonce)
            raise CommitStateUnknownError(
                "the checkpoint is in place, but it is not known whether a power cut would leave it there",
                path=self._target,
                found=f"flushing its parent failed: {error.strerror}",
                remedy="check the file system, then read the checkpoint back",
            ) from error

    def _taken_away(self, ref: AttemptRef) -> bool:
        """See :meth:`revoke`. False: it is published, durably or not."""
        trash = os.path.join(self._parent, trash_name())
        try:
            if nonce_at(LocalDirectory(self._target)) == ref.nonce:
                return False
            system().rename(ref.attempt, trash)
            if nonce_at(LocalDirectory(trash)) in (None, ref.nonce):
                remove_tree(trash)
                return True
            # An exchange of names came first, and left the replaced checkpoint there. That is retired in any case.
            remove_tree(trash)
            return nonce_at(LocalDirectory(self._target)) != ref.nonce
        except (DcpEngineError, FileNotFoundError):
            there = nonce_or_error(self._target)
            if isinstance(there, str) and there == ref.nonce:
                return False
            if not isinstance(there, DcpEngineError) and not name_exists(ref.attempt):
                return True  # another rank has taken it away
            found: object = there
        except OSError as error:
            found = error.strerror
        raise CommitStateUnknownError(
            "it cannot be told whether the checkpoint is or will be published: its coordinator is lost, its attempt cannot be taken away",
            path=self._target,
            found=found,
            remedy=f"make sure that the lost process is gone, then look at {self._target!r} and {ref.attempt!r}",
        )

    # -- the target ---------------------------------------------------------------------------------------------------

    def _publish(self, ref: AttemptRef) -> str | None:
        """Gives the attempt its name. Returns where the replaced checkpoint now lies, if there was one."""
        if ref.replaces is not None and (there := inspect_target(self._target, overwrite=self._overwrite)) != ref.replaces:
            raise changed_meanwhile(self._target, ref.replaces, there)
        trash = os.path.join(self._parent, trash_name())
        if self._fence is not None:
            self._fence.check()
        try:
            if ref.replaces is None:
                system().rename(ref.attempt, self._target)
                return None
            if self._exchanged(ref):
                self._check_exchanged(ref, ref.replaces)
            else:
                self._rename_twice(ref, trash)
        except OSError as error:
            self._look(ref, error)
        with contextlib.suppress(OSError):
            system().rename(ref.attempt, trash)  # an exchange has left the old one here
        return next((place for place in (trash, ref.attempt) if name_exists(place)), None)

    def _exchanged(self, ref: AttemptRef) -> bool:
        """Swaps the attempt and the target; False where that cannot be done. Repeated while interrupted, unless it took effect."""
        while True:
            try:
                return system().exchange(ref.attempt, self._target)
            except InterruptedError:
                there = nonce_or_error(self._target)
                if there == ref.nonce:
                    return True
                if isinstance(there, DcpEngineError):
                    raise

    def _check_exchanged(self, ref: AttemptRef, replaces: str) -> None:
        """Takes back an exchange that hit a checkpoint which came after the look at the target: nobody asked to replace that."""
        out = nonce_or_error(ref.attempt)
        if not isinstance(out, str) or out == replaces:
            return
        if not system().exchange(ref.attempt, self._target):
            self._uncertain.add(ref.nonce)
            raise CommitStateUnknownError(
                "a checkpoint that was not to be replaced could not be put back",
                path=self._target,
                found=out,
                remedy=f"it lies whole at {ref.attempt!r}: rename it by hand; nothing was deleted",
            )
        raise changed_meanwhile(self._target, replaces, out)

    def _rename_twice(self, ref: AttemptRef, trash: str) -> None:
        """Retires the old checkpoint, then gives its name to the new one; puts the old one back if that fails."""
        system().rename(self._target, trash)
        try:
            # A power cut may leave half of a rename where the file system has no journal: the old one needs a name that stays before the
            # new one can lose its own, or both are gone.
            flush_directory(self._parent)
            system().rename(ref.attempt, self._target)
        except OSError as error:
            if name_exists(self._target):
                raise
            try:
                system().rename(trash, self._target)
            except OSError as second:
                self._uncertain.add(ref.nonce)
                raise CommitStateUnknownError(
                    "the new checkpoint could not be published and the old one could not be put back",
                    path=self._target,
                    found=f"{error.strerror}, then {second.strerror}",
                    remedy=f"rename {trash!r} (the old one) or {ref.attempt!r} (the new one, whole) by hand; nothing was deleted",
                ) from error
            raise

    def _look(self, ref: AttemptRef, error: OSError) -> None:
        """Finds out what a rename that reported an error has done. Returns if the checkpoint is published after all."""
        there = nonce_or_error(self._target)
        if there == ref.nonce:
            return
        if isinstance(there, str) and there != ref.replaces:
            raise published_first(self._target, ref.nonce, there) from error
        if error.errno == errno.ENOENT and self._fence is not None and not name_exists(ref.attempt):
            self._fence.check()  # a newer epoch took the attempt away, so that nothing was renamed
        untouched = nonce_or_error(ref.attempt) == ref.nonce
        if untouched and error.errno in _OCCUPIED:
            raise CheckpointExistsError(
                "something came to lie at the target while the checkpoint was written",
                path=self._target,
                found=describe(self._target),
                remedy="save to another name",
            ) from error
        if untouched and error.errno in _REFUSED:
            raise storage_failure(error, "publish the checkpoint by renaming its attempt", path=self._target) from error
        self._uncertain.add(ref.nonce)
        raise CommitStateUnknownError(
            "it cannot be told whether the checkpoint was published",
            path=self._target,
            found=f"rename of {ref.attempt!r}: {error.strerror}",
            remedy="look at both names before saving again; nothing was deleted",
        ) from error
