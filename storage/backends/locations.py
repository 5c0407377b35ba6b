"""Decides what a path given by a user means: a local directory or a URL, fixed once so that a later ``chdir`` changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_engine.errors import InvalidOptionError, MalformedCheckpointError
from dcp_engine.storage.backends.base import Directory

__all__ = ["Location", "check_name", "is_remote", "is_supported_path", "locate", "resolve"]

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*"
_LOCAL_URL = re.compile(r"(?:file|local)://(.*)", re.DOTALL)
_URL = re.compile(rf"{_SCHEME}(?:::{_SCHEME})*://(.*)", re.DOTALL)
_COLLAPSED_URL = re.compile(rf"{_SCHEME}:/(?!/)", re.DOTALL)
_MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Location:
    """Where a checkpoint is or will be."""

    path: str
    """An absolute local path, or a URL. No separator at its end."""
    remote: bool
    """A URL that only fsspec understands."""

    @property
    def name(self) -> str:
        """Last component: empty for the root of a file system."""
        return self.path.rpartition("/")[2]

    def child(self, name: str) -> Location:
        """A file or directory in it."""
        return Location(f"{self.path.rstrip('/')}/{name}" if not self.path.endswith("://") else self.path + name, self.remote)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a URL of a storage other than the local file system. Raises as :func:`locate`."""
    return locate(path).remote


def locate(path: str | os.PathLike[str]) -> Location:
    """Reads a path as given by a user.

    Args:
        path: a local path (relative ones are taken from the working directory of now), a ``file://`` URL, or a URL of any storage that
            fsspec knows. ``~`` is a name like any other, as it is for ``open``.

    Raises:
        InvalidOptionError: no path at all, or a URL that lost a slash (``pathlib.Path("s3://b/x")`` is ``s3:/b/x``).
    """
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise InvalidOptionError("a checkpoint path is a str or a path object", expected="str or os.PathLike", found=repr(path)) from error
    if not text or "\0" in text or not _is_encodable(text):
        raise InvalidOptionError("this cannot be the path of a checkpoint", expected="a path or a URL", found=repr(text))
    local_url = _LOCAL_URL.fullmatch(text)
    if local_url is not None:
        if not local_url[1].startswith("/"):
            raise InvalidOptionError("a file URL holds an absolute path", expected="file:///directory/name", found=repr(text))
        text = local_url[1]
    elif (url := _URL.fullmatch(text)) is not None:
        return Location(_tidy_url(text, url[1]), remote=True)
    elif _COLLAPSED_URL.match(text):
        raise InvalidOptionError(
            "this looks like a URL that lost a slash",
            path=text,
            expected="scheme://...",
            remedy="pass URLs as str: path objects and normpath merge the two slashes (a local directory of this name is ./" + text + ")",
        )
    return Location(_absolute(text), remote=False)


def _is_encodable(text: str) -> bool:
    """Whether the system has bytes for a name: for a lone surrogate that stands for no byte it has none."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _tidy_url(text: str, rest: str) -> str:
    if not rest.strip("/"):
        raise InvalidOptionError("the URL names nothing to hold a checkpoint", expected="scheme://place/name", found=repr(text))
    parts = rest.rstrip("/").split("/")
    if ".." in parts or "." in parts:
        raise InvalidOptionError("object names know no relative parts", expected="a URL without '.' and '..'", found=repr(text))
    return text.rstrip("/")


def _absolute(text: str) -> str:
    joined = os.path.join(_working_directory(text), text)
    parts = [part for part in joined.split("/") if part not in ("", ".")]
    if ".." not in parts:
        return "/" + "/".join(parts)
    # A lexical "a/link/.." is wrong where link leads elsewhere: ask the system for all but the last name, which may be a link itself.
    if parts[-1] == "..":
        return os.path.realpath(joined)
    return os.path.join(os.path.realpath("/" + "/".join(parts[:-1])), parts[-1])


def _working_directory(text: str) -> str:
    if text.startswith("/"):
        return "/"
    try:
        return os.getcwd()
    except OSError as error:
        raise InvalidOptionError(
            "a relative path leads nowhere: the working directory is gone", path=text, found=error.strerror, remedy="pass an absolute path"
        ) from error


def check_name(name: str, *, path: str) -> None:
    """Refuses what cannot be the name of a file within one flat directory, such as a name that a hostile manifest made up.

    Raises:
        MalformedCheckpointError: the name is empty, too long, a relative part, or holds a separator or a control character.
    """
    if name in ("", ".", "..") or not name.isprintable() or "/" in name or "\\" in name or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise MalformedCheckpointError("this cannot be the name of a checkpoint's file", path=path, file=name)


def resolve(path: str | os.PathLike[str] | Location, storage_options: Mapping[str, Any] | None = None) -> Directory:
    """The directory at a path, local or remote. Nothing is read or created.

    Args:
        path: as for :func:`locate`.
        storage_options: keyword arguments of the fsspec file system; ignored for local paths.
    """
    location = path if isinstance(path, Location) else locate(path)
    if location.remote:
        from dcp_engine.storage.backends.remote import RemoteDirectory  # fsspec is only paid for where it is used

        return RemoteDirectory.at(location.path, storage_options)
    from dcp_engine.storage.backends.local import LocalDirectory

    return LocalDirectory(location.path)


def is_supported_path(path: str | os.PathLike[str]) -> bool:
    """Whether a path is local, or a URL of a scheme that fsspec knows. Asks no storage."""
    try:
        location = locate(path)
    except InvalidOptionError:
        return False
    if not location.remote:
        return True
    from dcp_engine.storage.backends.remote import knows_scheme

    return knows_scheme(location.path)
