"""The words that both ways of publishing share: an attempt, the names of a checkpoint's files, the marker that makes it one."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dcp_engine.errors import (
    CheckpointExistsError,
    CommitError,
    ConcurrentCommitError,
    MissingFileError,
    RankDisagreementError,
    RetiredError,
    TruncatedFileError,
)
from dcp_engine.storage.backends.base import Directory
from dcp_engine.storage.envelope import Marker, encode_marker, is_shard_name, parse_marker
from dcp_engine.storage.keys import SecretKey
from dcp_engine.storage.limits import MAX_MARKER_BYTES
from dcp_engine.storage.signing import sign
from dcp_engine.storage.tombstones import RETIRED, is_tombstone, parse_tombstone, retired

__all__ = [
    "INCOMPLETE",
    "MANIFEST_NAME",
    "MARKER_NAME",
    "AttemptRef",
    "Fence",
    "Publisher",
    "changed_meanwhile",
    "check_replaceable",
    "check_reported",
    "check_same_target",
    "is_own_file",
    "listing",
    "marker_of",
    "new_nonce",
    "nonce_at",
    "published_first",
    "read_marker",
    "write_whole",
]

MANIFEST_NAME = "MANIFEST"
MARKER_NAME = "COMPLETE"
INCOMPLETE: Final = "incomplete"
"""Stands for what lies at a target without a readable COMPLETE, wherever the nonce of a checkpoint is asked for."""

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class AttemptRef:
    """One attempt at writing a checkpoint, as the coordinator tells it to all ranks. May cross ranks by pickle."""

    nonce: str
    """128 random bits in hex."""
    target: str
    """Absolute path or URL that the checkpoint will have."""
    attempt: str
    """Absolute path or URL under which the files are written."""
    remote: bool
    """Published by a marker in an object store, not by a rename."""
    replaces: str | None = None
    """What was at the target and is to be replaced: the nonce of a checkpoint, ``"incomplete"``, ``"retired"``, or None for nothing."""


class Fence(Protocol):
    """Says whether a writer may still publish. One that stands for several asks each of them.

    A publisher asks right after it has made its attempt and right before the one call that publishes it. May cross processes by pickle.
    """

    def check(self) -> None:
        """Returns if this writer may go on.

        Raises:
            FencedError, or any other error of the engine: it may not. Nothing is published then, and the attempt is removed. What is no
                error of the engine is told as a ``CommitError``.
        """
        ...


class Publisher(Protocol):
    """Makes a checkpoint visible at its target whole, or not at all.

    Calls, in order, and who makes each:

    1. ``begin``: coordinator. Its result goes to all ranks.
    2. ``attempt``: all ranks, for the directory to create their files in.
    3. ``seal``: all ranks, when their files are committed.
    4. ``commit``: coordinator, when all ranks have sealed.
    5. ``abort``: coordinator, instead of ``commit`` or after it raised anything but ``CommitStateUnknownError``.

    ``revoke`` is for any rank that has lost the coordinator after it began to publish.

    Thread-safety: calls for one attempt come one after the other. May cross processes by pickle.
    """

    @property
    def target(self) -> str:
        """Absolute path or URL of the checkpoint."""
        ...

    def begin(self) -> AttemptRef:
        """Checks the target and starts an attempt beside it or under it.

        Raises:
            FencedError: or whatever else the fence raises; the attempt is gone then.
            CheckpointExistsError: the target holds something that must not be replaced.
            InvalidOptionError: the target can never be published to, such as a mount point.
            StorageError: it cannot be written there, with the reason.
        """
        ...

    def attempt(self, ref: AttemptRef) -> Directory:
        """The directory of the attempt, seen from this rank.

        Raises:
            RankDisagreementError: this rank has another target, or does not see what the coordinator created.
        """
        ...

    def seal(self, ref: AttemptRef) -> None:
        """Makes the names of this rank's files durable. Raises ``StorageError``."""
        ...

    def commit(self, ref: AttemptRef, manifest: bytes, files: Sequence[tuple[str, int]]) -> None:
        """Checks that the attempt holds exactly ``files``, adds MANIFEST and COMPLETE, and publishes. Durable when it returns.

        Args:
            manifest: content of MANIFEST.
            files: name and size in bytes of every file that the ranks wrote.

        Raises:
            MissingFileError, TruncatedFileError, CommitError: the attempt does not hold what the ranks reported.
            FencedError: or whatever else the fence raises.
            ConcurrentCommitError: another writer published here first.
            CheckpointExistsError: something else came to lie at the target.
            CommitStateUnknownError: it may be published or not; nothing was deleted, and nothing of the attempt may be.
            StorageError: the storage failed and nothing was published.
        """
        ...

    def abort(self, ref: AttemptRef) -> None:
        """Removes this attempt, never anything else, as far as possible. Never raises. Does nothing once it is or may be published."""
        ...

    def revoke(self, ref: AttemptRef) -> bool:
        """Takes the attempt away from a coordinator that may be about to publish it.

        Returns:
            Whether it will never be published; False: it is, durably.

        Raises:
            CommitStateUnknownError: neither can be told.
        """
        ...


def new_nonce() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def is_own_file(name: str) -> bool:
    """Whether a name is one that files of a checkpoint have."""
    return name in (MANIFEST_NAME, MARKER_NAME) or is_shard_name(name)


def listing(names: Iterable[str]) -> str:
    """Names for a message, the first few of them."""
    names = list(names)
    more = len(names) - _MAX_LISTED
    return ", ".join(map(repr, names[:_MAX_LISTED])) + (f" and {more} more" if more > 0 else "")


def check_same_target(target: str, ref: AttemptRef) -> None:
    """Refuses an attempt of a coordinator that publishes elsewhere. Raises ``RankDisagreementError``."""
    if target != ref.target:
        raise RankDisagreementError(
            "this rank was given another path than the coordinator",
            path=target,
            expected=repr(ref.target),
            found=repr(target),
            remedy="pass the same absolute path or URL on every rank",
        )


def marker_of(nonce: str, data: str, manifest: bytes, signing_key: SecretKey | None = None) -> bytes:
    """Content of COMPLETE for a manifest.

    Args:
        data: directory, relative to COMPLETE, that holds the other files: ``"."`` or the nonce.
        signing_key: signs it; ``None``: it is not signed.

    Raises:
        InvalidOptionError: the key cannot be had.
    """
    marker = Marker(nonce=nonce, data=data, manifest_bytes=len(manifest), manifest_sha256=hashlib.sha256(manifest).hexdigest())
    return encode_marker(marker if signing_key is None else sign(marker, signing_key))


def check_replaceable(path: str, names: Sequence[str], strangers: Sequence[str], *, overwrite: bool) -> None:
    """Whether what lies at a target may give way to a new checkpoint.

    Args:
        path: the target.
        names: what lies there, at least one.
        strangers: those of them that are no part of a checkpoint, which are never replaced.
        overwrite: the user asked to replace a checkpoint.

    Raises:
        CheckpointExistsError: it may not.
    """
    if strangers:
        raise CheckpointExistsError(
            "the target holds what is not part of a checkpoint", path=path, found=listing(strangers), remedy="save to another name"
        )
    if not overwrite:
        raise CheckpointExistsError(
            "there is a checkpoint already", path=path, found=listing(names), remedy="save to another name, or pass overwrite=True"
        )


def check_reported(path: str, files: Sequence[tuple[str, int]], sizes: Iterable[int], names: Iterable[str]) -> None:
    """Whether an attempt holds exactly what the ranks reported.

    Args:
        path: of the attempt.
        files: name and size in bytes that the ranks reported.
        sizes: what each of these files has, in bytes.
        names: everything in the attempt.

    Raises:
        TruncatedFileError, CommitError
    """
    for (name, size_bytes), found in zip(files, sizes, strict=True):
        if found != size_bytes:
            raise TruncatedFileError(
                "a file is not as long as its rank reported",
                path=path,
                file=name,
                expected=f"{size_bytes} bytes",
                found=f"{found} bytes",
                remedy="look for what else writes there, then save again",
            )
    unreported = sorted(set(names) - {name for name, _ in files})
    if unreported:
        raise CommitError(
            "the attempt holds files that no rank reported",
            path=path,
            found=listing(unreported),
            remedy="look for what else writes there, then save again",
        )


def changed_meanwhile(path: str, expected: str, found: object) -> ConcurrentCommitError:
    """The error for a target that is not what was to be replaced any more."""
    return ConcurrentCommitError(
        "another writer changed the checkpoint that was to be replaced",
        path=path,
        expected=expected,
        found=found,
        remedy="look at what is there",
    )


def published_first(path: str, expected: str, found: object) -> ConcurrentCommitError:
    """The error for a target that another attempt took."""
    return ConcurrentCommitError(
        "another writer published here first", path=path, expected=expected, found=found, remedy="keep the one that is there"
    )


def write_whole(directory: Directory, name: str, content: bytes) -> None:
    """Creates a file, writes it and commits it. After an error nothing of it stays, and no descriptor stays open.

    Raises:
        StorageError: it exists already, or the storage failed.
    """
    file = directory.create(name)
    try:
        file.write([content])
        file.commit()
    except BaseException:
        file.abort()
        raise


def read_marker(directory: Directory) -> Marker:
    """COMPLETE of a directory.

    Raises:
        MissingFileError: there is none.
        RetiredError: the checkpoint was retired.
        CorruptCheckpointError: it is damaged.
        UnsupportedVersionError: a newer release wrote it.
    """
    content = directory.read_small(MARKER_NAME, MAX_MARKER_BYTES)
    if is_tombstone(content):
        raise retired(parse_tombstone(content, path=directory.path), path=directory.path)
    return parse_marker(content, path=directory.path)


def nonce_at(directory: Directory) -> str | None:
    """Nonce of the checkpoint in a directory; None if there is no COMPLETE, ``"retired"`` for a tombstone. Else as :func:`read_marker`."""
    try:
        return read_marker(directory).nonce
    except RetiredError:
        return RETIRED
    except MissingFileError:
        return None
