"""Names on the local file system: made, flushed, looked at and removed, so that each is as durable, or as gone, as it says."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from dcp_engine.storage.backends.calls import system

__all__ = [
    "file_kind",
    "flush_directory",
    "is_directory",
    "is_mount_point",
    "make_directories",
    "name_exists",
    "remove_tree",
]

# Some file systems (FUSE, CIFS) have no flush for directories and say so: there, a name is as durable as it gets.
_NO_DIRECTORY_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def file_kind(mode: int) -> str:
    """What an entry of a directory is, in words, from its ``st_mode``."""
    return next((words for test, words in _KINDS if test(mode)), "a device")


def is_directory(path: str) -> bool:
    """Whether a name leads to a directory. Raises ``OSError`` where that cannot be found out."""
    try:
        return stat.S_ISDIR(system().stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def name_exists(path: str) -> bool:
    """Whether there is anything of this name, a link to nothing included. False also where that cannot be found out."""
    try:
        system().lstat(path)
    except OSError:
        return False
    return True


def flush_directory(path: str) -> None:
    """Makes the names in a directory durable. Raises ``OSError``."""
    fd = system().open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system().fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FLUSH:
            raise
    finally:
        system().close(fd)


def is_mount_point(path: str) -> bool:
    """Whether something is mounted at a directory: also a bind mount, which shares its parent's device."""
    if os.path.ismount(path):
        return True
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            places = {line.split(b" ")[4] for line in file}
    except (OSError, IndexError):
        return False  # no such list on this system: a rename onto a bind mount then fails with EBUSY
    escaped = os.fsencode(os.path.realpath(path))
    for character in (b"\\", b" ", b"\t", b"\n"):
        escaped = escaped.replace(character, b"\\%03o" % ord(character))
    return escaped in places


def make_directories(path: str) -> None:
    """Creates a directory and its missing parents, each made durable in its own parent; modes follow the umask. Raises ``OSError``."""
    missing = []
    # What cannot be looked at is not missing: taken for that, the root itself would have no end of parents.
    while not is_directory(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        try:
            system().mkdir(path, 0o777)
        except FileExistsError as error:
            if not is_directory(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
        flush_directory(os.path.dirname(path))


def remove_tree(path: str) -> bool:
    """Removes a directory and what is in it as far as possible, never through a symbolic link. Never raises.

    Returns:
        whether it is gone. (``shutil.rmtree`` raises errors of ``close`` even when told to ignore errors.)
    """
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(system().lstat(path).st_mode):
            for name in system().listdir(path):
                remove_tree(os.path.join(path, name))
            system().rmdir(path)
        else:
            system().unlink(path)
    return not name_exists(path)
