"""A root on a file system: epochs by exclusive creation, everything that goes by one rename into the trash first."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable

from dcp_engine.errors import CheckpointNotFoundError, DcpEngineError, InvalidOptionError, StorageError
from dcp_engine.storage.attempts import nonce_at, write_whole
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.directories import file_kind, flush_directory, make_directories, name_exists, remove_tree
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.entry_names import is_step_attempt, is_trash, trash_name
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.epochs import EPOCHS_NAME, EpochRecord, epoch_name
from dcp_engine.storage.holds import Hold, hold_for_reading, hold_for_retiring
from dcp_engine.storage.latest import LATEST_NAME
from dcp_engine.storage.root_store import Retirement, refuse_checkpoint, refuse_enclosed
from dcp_engine.storage.steps import step_name

__all__ = ["PosixRoot"]

_logger = logging.getLogger(__name__)


class PosixRoot:
    """See :class:`~dcp_engine.storage.root_store.RootStore`. No I/O on construction."""

    def __init__(self, path: str) -> None:
        self._path = path

    def prepare(self) -> None:
        """Makes the root and its directory of epochs."""
        for path in dict.fromkeys((self._path, os.path.realpath(self._path))):
            refuse_enclosed(path, lambda place, file: name_exists(os.path.join(place, file)))
        names = self._names_if_root()
        if names is None:
            try:
                make_directories(self._path)
            except OSError as error:
                raise storage_failure(error, "create the root", path=self._path) from error
        epochs = os.path.join(self._path, EPOCHS_NAME)
        try:
            with contextlib.suppress(FileExistsError):
                system().mkdir(epochs, 0o777)
                flush_directory(self._path)
            mode = system().lstat(epochs).st_mode
        except OSError as error:
            raise storage_failure(error, "create the directory of epochs", path=self._path, file=EPOCHS_NAME) from error
        if not stat.S_ISDIR(mode):
            raise InvalidOptionError(
                "the name of the directory of epochs is taken",
                path=self._path,
                expected=f"a directory {EPOCHS_NAME!r}, or nothing of that name",
                found=file_kind(mode),
                remedy="move it away",
            )

    def create_epoch(self, record: EpochRecord) -> bool:
        """Creates the file exclusively; durable when it returns."""
        directory = LocalDirectory(os.path.join(self._path, EPOCHS_NAME))
        try:
            write_whole(directory, epoch_name(record.epoch), record.encode())
        except StorageError as error:
            if error.errno == errno.EEXIST:
                return False
            raise
        self._flush(directory.path)
        return True

    def revoke(self, check: Callable[[], None]) -> None:
        """Renames every attempt at a step, so that the rename that would publish it fails."""
        attempts = [name for name in self._names() if is_step_attempt(name) and self._is_directory(name)]
        # Whatever was seen before this belongs to older epochs: a newer one would show here, and begins no attempt before it shows.
        check()
        for name in attempts:
            try:
                system().rename(os.path.join(self._path, name), self._new_trash())
            except FileNotFoundError:
                continue  # published or given up meanwhile
            except OSError as error:
                raise storage_failure(error, "take an attempt away from an older run", path=self._path, file=name) from error
        if attempts:
            self._flush(self._path)

    def check_entry(self, step: int) -> None:
        """Refuses a symbolic link: what it leads to is not the root's to name or to retire."""
        try:
            mode = system().lstat(self._place(step)).st_mode
        except OSError:
            return  # whoever reads it says what is wrong
        if not stat.S_ISDIR(mode):
            raise CheckpointNotFoundError(
                "this is no step of the root",
                path=self._place(step),
                step=step,
                expected="a directory",
                found=file_kind(mode),
                remedy="take another step",
            )

    def hold(self, step: int) -> Hold:
        """A shared lock on COMPLETE."""
        return hold_for_reading(self._place(step))

    def retire(self, step: int, nonce: str) -> Retirement:
        """Renames the step into the trash under an exclusive lock, then removes it. Without locks the trash stays for ``clean``."""
        place = self._place(step)
        hold = hold_for_retiring(place)
        if hold is None:
            return Retirement.IN_USE if self._is(place, nonce) else Retirement.CHANGED
        guarded, trash = hold.locked, self._new_trash()
        with hold:
            if not self._is_directory(os.path.basename(place)) or not self._is(place, nonce):
                return Retirement.CHANGED
            try:
                system().rename(place, trash)
            except FileNotFoundError:
                return Retirement.CHANGED
            except OSError as error:
                raise storage_failure(error, "retire the step", path=place) from error
        self._flush(self._path)
        if not guarded:
            return Retirement.UNGUARDED
        if not remove_tree(trash):
            _logger.warning("could not remove the retired step %d, now %s: the next clean-up tries again", step, trash)
        return Retirement.DONE

    def clean(self, older_than_secs: float, *, keep_whole: bool) -> tuple[str, ...]:
        """Removes old trash. A file made for the purpose tells the time of the file system's server."""
        trash = [name for name in self._names() if is_trash(name)]
        if not trash:
            return ()
        now, removed = self._server_time(), []
        for name in trash:
            place = os.path.join(self._path, name)
            try:
                info = system().lstat(place)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise storage_failure(error, "look at the trash", path=self._path, file=name) from error
            # The rename into the trash sets ctime. A clock that was set back makes everything young, which harms nobody.
            if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)) or now - max(info.st_ctime, info.st_mtime) < older_than_secs:
                continue
            if keep_whole and self._may_be_whole(place):
                _logger.warning("%s is left alone: it may be a whole checkpoint, and there is no other in %s", place, self._path)
            elif remove_tree(place):
                removed.append(name)
            else:
                _logger.warning("could not remove %s: the next clean-up tries again", place)
        return tuple(removed)

    def free_bytes(self) -> int | None:
        """What the file system has left for this user; quotas may allow less."""
        try:
            facts = system().statvfs(self._path)
        except OSError as error:
            raise storage_failure(error, "ask for free space", path=self._path) from error
        return facts.f_bavail * facts.f_frsize

    def put_latest(self, content: bytes) -> None:
        """A new file, flushed, renamed over LATEST, flushed."""
        # Trash by its name until it is LATEST: what a crash leaves is swept like any other.
        directory, temporary = LocalDirectory(self._path), self._new_trash()
        write_whole(directory, os.path.basename(temporary), content)
        try:
            system().rename(temporary, os.path.join(self._path, LATEST_NAME))
        except OSError as error:
            with contextlib.suppress(OSError):
                system().unlink(temporary)
            raise storage_failure(error, "replace the hint at the newest step", path=self._path, file=LATEST_NAME) from error
        self._flush(self._path)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _place(self, step: int) -> str:
        return os.path.join(self._path, step_name(step))

    def _new_trash(self) -> str:
        return os.path.join(self._path, trash_name())

    def _flush(self, path: str) -> None:
        try:
            flush_directory(path)
        except OSError as error:
            raise storage_failure(error, "flush the directory", path=path) from error

    def _names(self) -> list[str]:
        return LocalDirectory(self._path).names()

    def _names_if_root(self) -> list[str] | None:
        """What is in the root; None if there is none yet."""
        try:
            mode = system().stat(self._path).st_mode
        except FileNotFoundError:
            if name_exists(self._path):
                raise InvalidOptionError("this cannot be a root", path=self._path, found="a symbolic link to nothing") from None
            return None
        except OSError as error:
            raise storage_failure(error, "look at the root", path=self._path) from error
        if not stat.S_ISDIR(mode):
            raise InvalidOptionError("this cannot be a root", path=self._path, expected="a directory", found=file_kind(mode))
        names = self._names()
        refuse_checkpoint(self._path, names)
        return names

    def _is_directory(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(system().lstat(os.path.join(self._path, name)).st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_failure(error, "look at an entry of the root", path=self._path, file=name) from error

    def _is(self, place: str, nonce: str) -> bool:
        """Whether a directory holds a certain checkpoint."""
        try:
            return nonce_at(LocalDirectory(place)) == nonce
        except StorageError:
            raise
        except DcpEngineError:
            return False

    def _may_be_whole(self, place: str) -> bool:
        try:
            found = nonce_at(LocalDirectory(place))
        except DcpEngineError:
            return True
        return found is not None and is_nonce(found)

    def _server_time(self) -> float:
        """Seconds since 1970 by the clock of the file system's server, which also dates what lies in the trash."""
        place = self._new_trash()
        try:
            system().close(system().open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
            try:
                return system().lstat(place).st_mtime
            finally:
                system().unlink(place)
        except OSError as error:
            raise storage_failure(error, "ask the file system for its time", path=self._path) from error
