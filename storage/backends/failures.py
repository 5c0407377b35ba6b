"""Turns what a storage reports into the engine's errors, in one place, so that every caller learns the same things from a failure."""

from __future__ import annotations

import errno

from dcp_engine.errors import StorageError, StorageFullError, StoragePermissionError

__all__ = ["FULL_ERRNOS", "PERMISSION_ERRNOS", "storage_failure"]

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PERMISSION_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

_REMEDIES = {
    errno.ENOSPC: "free some space there, or save elsewhere",
    errno.EDQUOT: "raise the quota or delete what is no longer needed",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or save elsewhere",
    errno.EACCES: "check owner and permissions of the directory",
    errno.EPERM: "check owner and permissions of the directory",
    errno.EROFS: "the file system is mounted read-only: save elsewhere",
    errno.ENOENT: "something removed the directory while it was in use: check clean-up jobs",
    errno.ENOTDIR: "a part of the path is a file: check the path",
    errno.ESTALE: "the network file system lost the directory: check the server and what else writes there",
    errno.EIO: "the device or the network file system failed: check the system's log",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.EBUSY: "something holds the directory, such as a mount: save to another name",
}
_REMOTE_REMEDY = "check the URL, the network and the credentials (storage_options=, or what the driver takes from the environment)"


def storage_failure(error: BaseException, action: str, *, path: str, file: str | None = None) -> StorageError:
    """The engine's error for what a system call or a remote storage raised.

    Args:
        error: what was raised. An ``OSError`` is sorted by its errno, anything else is a plain ``StorageError`` that quotes it.
        action: what was tried, as in "write the file".
        path: directory or URL.
        file: name within it.

    Returns:
        an error to be raised ``from`` the original.
    """
    code = error.errno if isinstance(error, OSError) else None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    kind: type[StorageError] = StorageError
    if code in FULL_ERRNOS:
        kind = StorageFullError
    elif code in PERMISSION_ERRNOS or isinstance(error, PermissionError):
        kind = StoragePermissionError
    # Drivers use the system's numbers for what a server said, where these mean something else.
    by_number = code is not None and ("://" not in path or code in FULL_ERRNOS)
    remedy = _REMEDIES.get(code) if code is not None and by_number else _REMOTE_REMEDY
    return kind(
        f"cannot {action}", errno=code, path=path, file=file, found=f"{type(error).__name__}: {reason}".removesuffix(": "), remedy=remedy
    )
