"""The two ends of a checkpoint's visibility: a publisher makes one appear, ``open_checkpoint`` says whether one is there."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_engine.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpEngineError,
    DigestMismatchError,
    IncompleteCheckpointError,
    LimitExceededError,
    MissingFileError,
    RetiredError,
    StorageError,
    TruncatedFileError,
)
from dcp_engine.storage.attempts import MANIFEST_NAME, MARKER_NAME, AttemptRef, Fence, Publisher, is_own_file, listing, read_marker
from dcp_engine.storage.backends import Directory, Location, locate, resolve
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.backends.directories import file_kind, name_exists
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.envelope import Marker, is_nonce
from dcp_engine.storage.holds import Hold, hold_for_reading
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.limits import MAX_RECORD_STORED_BYTES, RECORD_BYTES
from dcp_engine.storage.publish_posix import PosixPublisher
from dcp_engine.storage.steps import parse_step_name

__all__ = ["AttemptRef", "OpenCheckpoint", "Publisher", "attach_checkpoint", "open_checkpoint", "open_publisher", "require_unchanged"]

_MAX_REPLACED = 5
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A committed checkpoint whose MANIFEST is the one that COMPLETE names."""

    marker: Marker
    manifest_bytes: bytes
    """Content of MANIFEST."""
    directory: Directory
    """Where MANIFEST and the shards are."""
    hold: Hold = field(default_factory=Hold, compare=False)
    """Keeps retention away from a local checkpoint while it is read: released by whoever reads, at the latest with this object."""


def open_publisher(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    fence: Fence | None = None,
    signing_key: SecretKey | None = None,
) -> Publisher:
    """A publisher for one checkpoint. Cheap: nothing is looked at before ``begin``.

    Args:
        path: what the checkpoint will be called: a path or a URL.
        storage_options: keyword arguments of the fsspec file system; ignored for local paths.
        overwrite: replace a checkpoint that is there already, once the new one is complete.
        fence: asked before anything is published.
        signing_key: signs COMPLETE; ``None``: it is not signed.

    Raises:
        InvalidOptionError: the path cannot be one.
    """
    location = locate(path)
    if not location.remote:
        return PosixPublisher(location, overwrite=overwrite, fence=fence, signing_key=signing_key)
    from dcp_engine.storage.publish_remote import RemotePublisher  # fsspec is only paid for where it is used

    return RemotePublisher(location, storage_options=storage_options, overwrite=overwrite, fence=fence, signing_key=signing_key)


def open_checkpoint(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> OpenCheckpoint:
    """Opens a committed checkpoint and reads its MANIFEST, of which size and SHA-256 are checked; its content is not.

    What is opened stays until its ``hold`` is released, as far as the file system has locks.

    Raises:
        CheckpointNotFoundError: there is no checkpoint; ``found`` says what is there instead.
        RetiredError: there was one.
        IncompleteCheckpointError: there are files of one, but it was never committed.
        UnsupportedVersionError: a newer release wrote it.
        CorruptCheckpointError: COMPLETE or MANIFEST is damaged, or MANIFEST is missing.
        StoragePermissionError: not allowed to read it. StorageError: the storage failed.
        InvalidOptionError: the path cannot be one.
    """
    location = locate(path)
    if not location.remote:
        _require_directory(location.path)
    directory = resolve(location, storage_options)
    hold = Hold() if location.remote else hold_for_reading(location.path)
    try:
        return _open_held(location, directory, hold, storage_options)
    except BaseException:
        hold.release()
        raise


def _open_held(location: Location, directory: Directory, hold: Hold, storage_options: Mapping[str, Any] | None) -> OpenCheckpoint:
    try:
        marker = read_marker(directory)
    except MissingFileError as error:
        if location.remote:
            _require_no_object(directory)
        raise _what_is_there(directory, error) from error
    for _ in range(_MAX_REPLACED):
        try:
            data = _data_directory(location, marker, storage_options)
            return OpenCheckpoint(marker, _read_manifest(data, marker), data, hold)
        except CorruptCheckpointError:
            latest = read_marker(directory)
            if latest == marker:
                raise
            marker = latest  # replaced between COMPLETE and MANIFEST
    raise CheckpointNotFoundError(
        "the checkpoint is replaced faster than it can be opened", path=location.path, remedy="save to names of their own"
    )


def require_unchanged(path: str | os.PathLike[str], marker: Marker, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Tells a checkpoint that is damaged from one that somebody replaced or removed while it was read: call it when a read has failed.

    Args:
        marker: of the ``OpenCheckpoint`` that was read.

    Raises:
        CheckpointNotFoundError: the checkpoint that was opened is no longer there. RetiredError: likewise, and why.
    """
    try:
        found = read_marker(resolve(path, storage_options)).nonce
    except RetiredError:
        raise
    except MissingFileError:
        found = "no checkpoint"
    except DcpEngineError:
        return
    if found != marker.nonce:
        raise CheckpointNotFoundError(
            "the checkpoint was replaced or removed while it was read",
            path=str(path),
            expected=marker.nonce,
            found=found,
            remedy="load again; do not overwrite or delete checkpoints that are being read",
        )


def attach_checkpoint(
    path: str | os.PathLike[str], marker: Marker, manifest_bytes: bytes, *, storage_options: Mapping[str, Any] | None = None
) -> OpenCheckpoint:
    """The same checkpoint that another rank has opened, without reading COMPLETE and MANIFEST again.

    Args:
        marker: of the other rank's ``OpenCheckpoint``.
        manifest_bytes: likewise.

    Raises:
        MissingFileError: this rank sees no directory where the data must be.
    """
    location = locate(path)
    directory = _data_directory(location, marker, storage_options)
    return OpenCheckpoint(marker, manifest_bytes, directory, Hold() if location.remote else hold_for_reading(location.path))


def _require_directory(path: str) -> None:
    """Says what is at a local path, where it is no directory. A symbolic link to one is as good."""
    try:
        mode = system().stat(path).st_mode
    except OSError as error:
        if error.errno not in _GONE:
            raise storage_failure(error, "look at the checkpoint", path=path) from error
        found = "a symbolic link to nothing" if name_exists(path) else "nothing"
        raise CheckpointNotFoundError("there is no checkpoint", path=path, found=found, remedy="check the path") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointNotFoundError(
            "there is no checkpoint", path=path, expected="a directory", found=file_kind(mode), remedy="check the path"
        )


def _require_no_object(directory: Directory) -> None:
    """Says so where a URL names an object itself."""
    from dcp_engine.storage.backends.remote import RemoteDirectory

    if isinstance(directory, RemoteDirectory) and directory.kind() == "file":
        raise CheckpointNotFoundError(
            "there is no checkpoint", path=directory.path, expected="a prefix", found="an object", remedy="check the URL"
        )


def _what_is_there(directory: Directory, error: MissingFileError) -> DcpEngineError:
    """The error for a directory without COMPLETE."""
    try:
        names = directory.names()
    except StorageError as failure:
        if failure.errno not in _GONE:
            raise
        names = []  # retired meanwhile
    steps = [name for name in names if parse_step_name(name) is not None]
    own = [name for name in names if is_own_file(name) or is_nonce(name)]
    if MARKER_NAME in names:
        return error  # something of that name that is no file
    if not names:
        return CheckpointNotFoundError("there is no checkpoint", path=directory.path, found="nothing in it", remedy="check the path")
    if ".metadata" in names:
        return CheckpointNotFoundError(
            "this is a checkpoint of torch.distributed.checkpoint's own format",
            path=directory.path,
            found="'.metadata'",
            remedy="read it with torch.distributed.checkpoint.FileSystemReader",
        )
    if own:
        return IncompleteCheckpointError(
            "the checkpoint was never committed",
            path=directory.path,
            expected=f"a file {MARKER_NAME!r}",
            found=listing(names),
            remedy="take another checkpoint; if this one was copied, copy it again",
        )
    if steps:
        return CheckpointNotFoundError(
            "this directory holds checkpoints, and is none itself",
            path=directory.path,
            found=listing(steps),
            remedy=f"open one of them, as in {steps[-1]!r}",
        )
    return CheckpointNotFoundError(
        "there is no checkpoint", path=directory.path, expected=f"a file {MARKER_NAME!r}", found=listing(names), remedy="check the path"
    )


def _data_directory(location: Location, marker: Marker, storage_options: Mapping[str, Any] | None) -> Directory:
    """Where MANIFEST and shards are: beside COMPLETE, or in the directory of that nonce."""
    if marker.data == ".":
        return resolve(location, storage_options)
    place = location.child(marker.data)
    if not place.remote:
        try:
            mode = system().lstat(place.path).st_mode
        except FileNotFoundError:
            mode = None
        except OSError as error:
            raise storage_failure(error, "look at the data directory", path=location.path, file=marker.data) from error
        # A link could lead a reader out of the checkpoint.
        if mode is None or not stat.S_ISDIR(mode):
            found = "nothing" if mode is None else file_kind(mode)
            raise MissingFileError(
                "the directory with the data is not there", path=location.path, file=marker.data, expected="a directory", found=found
            )
    return resolve(place, storage_options)


def _read_manifest(directory: Directory, marker: Marker) -> bytes:
    if not RECORD_BYTES <= marker.manifest_bytes <= RECORD_BYTES + MAX_RECORD_STORED_BYTES:
        raise LimitExceededError(
            "COMPLETE names a MANIFEST of impossible size",
            path=directory.path,
            file=MARKER_NAME,
            expected=f"{RECORD_BYTES} to {RECORD_BYTES + MAX_RECORD_STORED_BYTES} bytes",
            found=f"{marker.manifest_bytes} bytes",
        )
    size_bytes = directory.file_size(MANIFEST_NAME)
    if size_bytes != marker.manifest_bytes:
        raise TruncatedFileError(
            "MANIFEST is not as long as COMPLETE says",
            path=directory.path,
            file=MANIFEST_NAME,
            expected=f"{marker.manifest_bytes} bytes",
            found=f"{size_bytes} bytes",
        )
    manifest = directory.read_small(MANIFEST_NAME, marker.manifest_bytes)
    found = hashlib.sha256(manifest).hexdigest()
    if found != marker.manifest_sha256:
        raise DigestMismatchError(
            "MANIFEST is not the one that COMPLETE names",
            path=directory.path,
            file=MANIFEST_NAME,
            expected=marker.manifest_sha256,
            found=found,
        )
    return manifest
