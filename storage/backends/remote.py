"""Object stores and every other storage that fsspec knows: the only file that imports it.

Objects are put whole or not at all. A file opened for writing through fsspec would commit what it holds when an error ends its ``with``
block, so nothing here opens one: new objects are spooled locally and sent by one ``pipe_file`` or ``put_file``.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import available_protocols

from dcp_engine.errors import InvalidOptionError, LimitExceededError, MissingFileError, StorageError, TruncatedFileError
from dcp_engine.storage.backends.base import Buffer
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.backends.locations import check_name
from dcp_engine.storage.backends.spool import Spool

__all__ = ["RemoteDirectory", "RemoteReadFile", "RemoteWriteFile", "knows_scheme"]

_conditional: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_conditional_lock = threading.Lock()

_PIECE_BYTES = 64 * 2**20


def knows_scheme(url: str) -> bool:
    """Whether fsspec has a driver for the URL, installed or not."""
    return all(scheme in available_protocols() for scheme in url.partition("://")[0].split("::"))


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a URL and the key in it."""
    # A cached listing would show what was there once: a marker that came meanwhile would stay unseen.
    uncached = {} if "::" in url else {"use_listings_cache": False}
    try:
        file_system, key = url_to_fs(url, **{**uncached, **options})
    except ImportError as error:
        raise InvalidOptionError(
            f"no driver for this URL: {error}", path=url, remedy="install the fsspec driver for it, as in s3fs"
        ) from error
    except (ValueError, TypeError) as error:
        raise InvalidOptionError(f"the URL or its storage_options are not understood: {error}", path=url) from error
    except Exception as error:  # drivers connect while they are made, and raise their own libraries' types
        raise storage_failure(error, "connect to the storage", path=url) from error
    return file_system, str(key).rstrip("/")


class RemoteWriteFile:
    """A new object: spooled, in memory while it is small, then sent whole. See :class:`~dcp_engine.storage.backends.base.WriteFile`."""

    def __init__(self, directory: RemoteDirectory, name: str) -> None:
        self._directory = directory
        self._name = name
        self._spool = Spool(name)
        self._dead = False

    @property
    def position(self) -> int:
        """Where the furthest byte that was written ends."""
        return self._spool.size_bytes

    def write(self, parts: Sequence[Buffer]) -> None:
        """Appends to the spool."""
        self.write_at(self._spool.size_bytes, parts)

    def write_at(self, position: int, parts: Sequence[Buffer]) -> None:
        """Writes into the spool."""
        self._check_usable()
        try:
            for part in parts:
                position += self._spool.write_at(position, part)
        except BaseException:
            self._dead = True
            raise

    def write_pieces(self, position: int, part: Buffer, seen: Callable[[memoryview], object]) -> None:
        """Writes into the spool at once."""
        self.write_at(position, [part])
        seen(memoryview(part).cast("B"))

    def settle(self, start: int, num_bytes: int) -> bool:
        """Cannot be seen: nothing is sent before the end."""
        return False

    def commit(self) -> None:
        """Sends the object, then asks the storage for its size."""
        self._check_usable()
        self._dead = True
        try:
            self._directory.put(self._name, self._spool)
        finally:
            self._spool.close()

    def abort(self) -> None:
        """Drops the spool. An object whose sending failed half-way is no object yet; the removal of the attempt takes the rest."""
        self._dead = True
        self._spool.close()

    def _check_usable(self) -> None:
        if self._dead:
            raise StorageError(
                "the object was sent or has failed before", path=self._directory.path, file=self._name, remedy="start a new attempt"
            )


class RemoteReadFile:
    """An existing object, read by ranges. See :class:`~dcp_engine.storage.backends.base.ReadFile`."""

    def __init__(self, directory: RemoteDirectory, name: str, size_bytes: int) -> None:
        self._directory = directory
        self._name = name
        self._size_bytes = size_bytes

    @property
    def size_bytes(self) -> int:
        """Size when the object was opened."""
        return self._size_bytes

    @property
    def piece_bytes(self) -> int:
        """Large: every read is a request to a server far away."""
        return _PIECE_BYTES

    def read_into(self, position: int, parts: Sequence[memoryview]) -> None:
        """Fetches one range and copies it into the parts."""
        views = [view for part in parts if (view := part.cast("B")).nbytes]
        stop = position + sum(view.nbytes for view in views)
        if stop == position:
            return
        if stop > self._size_bytes:
            self._too_short(stop, self._size_bytes)
        data = memoryview(self._directory.fetch(self._name, position, stop))
        if data.nbytes != stop - position:
            self._too_short(stop, position + data.nbytes)
        start = 0
        for view in views:
            view[:] = data[start : start + view.nbytes]
            start += view.nbytes

    def close(self) -> None:
        """Holds nothing."""

    def _too_short(self, wanted: int, found: int) -> NoReturn:
        raise TruncatedFileError(
            "the object ends too early",
            path=self._directory.path,
            file=self._name,
            expected=f"at least {wanted} bytes",
            found=f"{found} bytes",
        )


class RemoteDirectory:
    """A prefix of an object store, or a directory of another remote storage. See :class:`~dcp_engine.storage.backends.base.Directory`."""

    def __init__(self, url: str, file_system: Any, key: str) -> None:
        self._url = url
        self._fs = file_system
        self._key = key

    @classmethod
    def at(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> RemoteDirectory:
        """The directory at a URL. ``storage_options`` are keyword arguments of the fsspec file system."""
        return cls(url, *_file_system(url, storage_options or {}))

    @property
    def path(self) -> str:
        """URL."""
        return self._url

    def child(self, name: str) -> RemoteDirectory:
        """A directory in it."""
        check_name(name, path=self._url)
        return RemoteDirectory(f"{self._url}/{name}", self._fs, f"{self._key}/{name}")

    def make(self) -> None:
        """Makes the directory where the storage needs one. Object stores do not, and some of their drivers would make a bucket instead."""
        if isinstance(self._fs, AsyncFileSystem):
            return
        try:
            self._fs.makedirs(self._key, exist_ok=True)
        except Exception as error:  # drivers raise their own libraries' types
            raise storage_failure(error, "create the directory", path=self._url) from error

    def unmake(self) -> None:
        """Removes the directory that :meth:`make` made, if it is empty. Never raises."""
        if not isinstance(self._fs, AsyncFileSystem):
            with contextlib.suppress(Exception):  # an empty directory that stays harms nobody
                self._fs.rmdir(self._key)

    def create(self, name: str) -> RemoteWriteFile:
        """A new object. It exists from ``commit`` on."""
        check_name(name, path=self._url)
        if self._info(name) is not None:
            raise StorageError("the object exists already", path=self._url, file=name, remedy="start a new attempt")
        return RemoteWriteFile(self, name)

    def open(self, name: str) -> RemoteReadFile:
        """An existing object."""
        return RemoteReadFile(self, name, self.file_size(name))

    def read_small(self, name: str, limit_bytes: int) -> bytes:
        """The whole of an object of at most ``limit_bytes``."""
        file = self.open(name)
        if file.size_bytes > limit_bytes:
            raise LimitExceededError(
                "the object is too long",
                path=self._url,
                file=name,
                expected=f"at most {limit_bytes} bytes",
                found=f"{file.size_bytes} bytes",
            )
        data = bytearray(file.size_bytes)
        file.read_into(0, [memoryview(data)])
        return bytes(data)

    def file_size(self, name: str) -> int:
        """Size in bytes, asked for now."""
        check_name(name, path=self._url)
        info = self._info(name)
        if info is None:
            raise MissingFileError("the object is not there", path=self._url, file=name)
        if info["type"] != "file":
            raise MissingFileError("not an object", path=self._url, file=name, expected="an object", found=f"a {info['type']}")
        return int(info["size"])

    def names(self) -> list[str]:
        """Everything directly under the prefix, sorted; nothing, where there is no such prefix."""
        try:
            self._fs.invalidate_cache()
            entries = self._fs.ls(self._key, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # drivers raise their own libraries' types
            raise storage_failure(error, "list the objects", path=self._url) from error
        below = (str(entry).rstrip("/").rpartition("/") for entry in entries)
        return sorted(name for parent, _, name in below if parent.strip("/") == self._key.strip("/") and name)

    def kind(self) -> str | None:
        """What the URL itself names: ``"file"``, ``"directory"``, or None for nothing."""
        info = self._info("")
        return None if info is None else str(info["type"])

    def create_only(self, name: str, data: bytes) -> bool:
        """Puts an object unless there is one of that name.

        Returns:
            False if there was one.

        Raises:
            StorageError: anything else; the object may have been put all the same.
        """
        try:
            self._fs.pipe_file(self._join(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:  # drivers raise their own libraries' types
            if _is_conflict(error):
                return False
            raise storage_failure(error, "create the object", path=self._url, file=name) from error
        return True

    def replace(self, name: str, data: bytes) -> None:
        """Puts an object, whether there is one of that name or not."""
        try:
            self._fs.pipe_file(self._join(name), data)
        except Exception as error:  # drivers raise their own libraries' types
            raise storage_failure(error, "put the object", path=self._url, file=name) from error

    def remove(self, name: str) -> None:
        """Removes an object; harmless if there is none."""
        try:
            self._fs.rm_file(self._join(name))
        except FileNotFoundError:
            return
        except Exception as error:  # drivers raise their own libraries' types
            raise storage_failure(error, "remove the object", path=self._url, file=name) from error

    def creates_conditionally(self, probe: str) -> bool:
        """Whether ``create_only`` holds against other writers, found out once per storage by trying it on the object ``probe``.

        A driver may ignore the condition, or ask first and write later, which another writer can slip between.

        Raises:
            StorageError: nothing can be written there at all.
        """
        with _conditional_lock:
            known = _conditional.get(self._fs)
        if known is not None:
            return known
        answer = not _only_asks_first(self._fs) and self._probe(probe)
        with _conditional_lock:
            _conditional[self._fs] = answer
        return answer

    def put(self, name: str, spool: Spool) -> None:
        """Sends a spooled object and checks what arrived."""
        content = spool.content()
        try:
            if isinstance(content, str):
                self._fs.put_file(content, self._join(name))
            else:
                self._fs.pipe_file(self._join(name), content)
        except Exception as error:  # drivers raise their own libraries' types
            raise storage_failure(error, "send the object", path=self._url, file=name) from error
        found = self.file_size(name)
        if found != spool.size_bytes:
            raise StorageError(
                "the object did not arrive whole", path=self._url, file=name, expected=f"{spool.size_bytes} bytes", found=f"{found} bytes"
            )

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` (exclusive) of an object; fewer if it is shorter."""
        try:
            return cast("bytes", self._fs.cat_file(self._join(name), start=start, end=stop))
        except FileNotFoundError as error:
            raise MissingFileError("the object is gone", path=self._url, file=name) from error
        except Exception as error:  # drivers raise their own libraries' types
            raise storage_failure(error, f"read at byte {start}", path=self._url, file=name) from error

    def _join(self, name: str) -> str:
        return f"{self._key}/{name}" if name else self._key

    def _info(self, name: str) -> dict[str, Any] | None:
        try:
            self._fs.invalidate_cache()
            return cast("dict[str, Any]", self._fs.info(self._join(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # drivers raise their own libraries' types
            raise storage_failure(error, "look for the object", path=self._url, file=name or None) from error

    def _probe(self, name: str) -> bool:
        try:
            try:
                created = self.create_only(name, b"first")
            except StorageError:
                self.replace(name, b"first")  # raises where the storage itself is at fault; else the driver refused the condition
                return False
            with contextlib.suppress(StorageError):
                self.create_only(name, b"second")
            return created and self.read_small(name, 64) == b"first"
        finally:
            # Storages that never delete keep it: it lies in the attempt's own prefix, where nobody reads it.
            with contextlib.suppress(StorageError):
                self.remove(name)


def _only_asks_first(file_system: Any) -> bool:
    """Whether creation falls back on fsspec's own "exists, then write"."""
    if isinstance(file_system, AsyncFileSystem):
        implementation = type(file_system)._pipe_file
        return "mode" not in inspect.signature(implementation).parameters
    return type(file_system).pipe_file is fsspec.AbstractFileSystem.pipe_file


def _is_conflict(error: BaseException) -> bool:
    """Whether a driver's error says that the object exists, in a form that it did not translate."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in {"PreconditionFailed", "412"}:
            return True
        cause = cause.__cause__
    return False
