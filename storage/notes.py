"""Notes: small files that are only ever added to a directory, each whole or not there, from any number of writers."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from typing import Any, Final

from dcp_engine.errors import StorageError
from dcp_engine.storage.attempts import write_whole
from dcp_engine.storage.backends import Location, resolve
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.directories import flush_directory, make_directories
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.backends.local import LocalDirectory
from dcp_engine.storage.entry_names import trash_name
from dcp_engine.storage.texts import MAX_TEXT_FILE_BYTES

__all__ = ["add_note", "note_names", "read_note"]

_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR)


def add_note(root: Location, directory: str, name: str, content: bytes, storage_options: Mapping[str, Any] | None = None) -> None:
    """Adds a note. It is durable when this returns; after an error it is not there, or whole.

    On a file system it is written in the root under a name that the root's clean-up removes, and renamed: what a crash leaves behind is
    nobody's note. A storage behind a URL gets it by one request, which may be sent again.

    Args:
        root: directory or prefix in which the directory of notes is, or will be.
        directory: its name.
        name: of the note; nobody else may use it.
        content: at most ``MAX_TEXT_FILE_BYTES``.
        storage_options: keyword arguments of the fsspec file system of a URL.

    Raises:
        StorageError kinds: it could not be written.

    Thread-safety: callable from any thread, process and host.
    """
    place = root.child(directory)
    if place.remote:
        from dcp_engine.storage.backends.remote import RemoteDirectory  # fsspec is only paid for where it is used

        remote = RemoteDirectory.at(place.path, storage_options)
        remote.make()
        remote.replace(name, content)
        return
    temporary = os.path.join(root.path, trash_name())
    try:
        make_directories(place.path)
        write_whole(LocalDirectory(root.path), os.path.basename(temporary), content)
        try:
            system().rename(temporary, os.path.join(place.path, name))
        except OSError:
            with contextlib.suppress(OSError):
                system().unlink(temporary)
            raise
        flush_directory(place.path)
    except StorageError:
        raise
    except OSError as error:
        raise storage_failure(error, "add a note", path=place.path, file=name) from error


def note_names(root: Location, directory: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Names of all notes, sorted; none, where there is no such directory. Raises ``StorageError``."""
    try:
        return resolve(root.child(directory), storage_options).names()
    except StorageError as error:
        if error.errno in _ABSENT:
            return []
        raise


def read_note(root: Location, directory: str, name: str, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """A note. ``MissingFileError`` if it is not there or no file, ``LimitExceededError`` if it is none by its length."""
    return resolve(root.child(directory), storage_options).read_small(name, MAX_TEXT_FILE_BYTES)
