"""Object stores and every other storage that fsspec knows: the only file that imports it.

Each request is bounded in time, and sent again where that can help (see :mod:`dcp_engine.storage.backends.requests`). One that was given up
may still take effect later, so what is sent again always says the same as before.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import available_protocols

from dcp_engine.errors import InvalidOptionError, LimitExceededError, MissingFileError, StorageError
from dcp_engine.storage.backends import conditions
from dcp_engine.storage.backends.answers import Answer, answer_of
from dcp_engine.storage.backends.failures import storage_failure
from dcp_engine.storage.backends.locations import check_name
from dcp_engine.storage.backends.remote_files import RemoteReadFile, RemoteWriteFile
from dcp_engine.storage.backends.requests import NUM_TIMEOUTS, NUM_TRIES, Requests, pause, split_options, timed_out, unclear
from dcp_engine.storage.backends.spool import Spool

__all__ = ["RemoteDirectory", "knows_scheme"]

T = TypeVar("T")

# The end of an upload in parts that was acknowledged, but not heard, is answered by "no such upload" when a driver repeats it.
_PUT_AGAIN = frozenset({Answer.BUSY, Answer.UNKNOWN, Answer.ABSENT})
_S3 = frozenset({"s3", "s3a"})


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


def _single_shot(url: str, options: Mapping[str, Any], usual: Any) -> Any:
    """A file system whose driver sends each request once, where that can be had; else the usual one.

    What a driver repeats on its own account hides answers: "denied" may come after a request that got none, and that may take effect later.
    """
    if not _is_s3(usual) or "::" in url:
        return usual
    config = {**options.get("config_kwargs", {}), "retries": {"total_max_attempts": 1}}
    file_system, _ = _file_system(url, {**options, "config_kwargs": config})
    file_system.retries = 1
    return file_system


def _is_s3(file_system: Any) -> bool:
    protocol = file_system.protocol
    return not _S3.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)


class RemoteDirectory:
    """A prefix of an object store, or a directory of another remote storage. See :class:`~dcp_engine.storage.backends.base.Directory`."""

    def __init__(self, url: str, file_system: Any, key: str, requests: Requests, single_shot: Any) -> None:
        self._url = url
        self._fs = file_system
        self._key = key
        self._requests = requests
        self._single_shot = single_shot

    @classmethod
    def at(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> RemoteDirectory:
        """The directory at a URL.

        Args:
            storage_options: keyword arguments of the fsspec file system, and ``request_timeout_secs``: how long the storage may take to
                answer one request, and a second more for each MiB that it carries. Default: 60.
        """
        requests, driver = split_options(storage_options or {}, path=url)
        file_system, key = _file_system(url, driver)
        return cls(url, file_system, key, requests, _single_shot(url, driver, file_system))

    @property
    def path(self) -> str:
        """URL."""
        return self._url

    @property
    def storage(self) -> tuple[Any, str]:
        """The driver, and the bucket or its like: what is one storage with one set of rules."""
        return self._fs, self._key.rpartition("://")[2].strip("/").partition("/")[0]

    def child(self, name: str) -> RemoteDirectory:
        """A directory in it."""
        check_name(name, path=self._url)
        return RemoteDirectory(f"{self._url}/{name}", self._fs, f"{self._key}/{name}", self._requests, self._single_shot)

    def make(self) -> None:
        """Makes the directory where the storage needs one. Object stores do not, and some of their drivers would make a bucket instead."""
        if not isinstance(self._fs, AsyncFileSystem):
            self._ask("create the directory", lambda: self._fs.makedirs(self._key, exist_ok=True))

    def unmake(self) -> None:
        """Removes the directory that :meth:`make` made, if it is empty. Never raises."""
        if not isinstance(self._fs, AsyncFileSystem):
            with contextlib.suppress(Exception):  # an empty directory that stays harms nobody
                self._requests.once(lambda: self._fs.rmdir(self._key))

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
        """The whole of an object of at most ``limit_bytes``, as of one moment: one request reads it, whoever replaces it meanwhile."""
        check_name(name, path=self._url)
        try:
            data = self.fetch(name, 0, limit_bytes + 1)
        except StorageError as error:
            # S3 refuses any range of an object without bytes.
            if unclear(error) or self.file_size(name):
                raise
            data = b""
        if len(data) <= limit_bytes:
            return data
        raise LimitExceededError(
            "the object is too long",
            path=self._url,
            file=name,
            expected=f"at most {limit_bytes} bytes",
            found=f"{self.file_size(name)} bytes",
        )

    def file_size(self, name: str) -> int:
        """Size in bytes, asked for now."""
        check_name(name, path=self._url)
        info = self._info(name)
        if info is None:
            raise MissingFileError("the object is not there", path=self._url, file=name)
        if info["type"] != "file":
            raise MissingFileError("not an object", path=self._url, file=name, expected="an object", found=f"a {info['type']}")
        return int(info["size"])

    def tag(self, name: str) -> str | None:
        """What tells this content of an object from any other it may get (``ETag``); None where there is no object or no such thing."""
        info = self._info(name)
        tag = None if info is None else info.get("ETag")
        return str(tag) if tag else None

    def names(self) -> list[str]:
        """Everything directly under the prefix, sorted; nothing, where there is no such prefix. May be late."""

        def listed() -> list[Any]:
            self._fs.invalidate_cache()
            return list(self._fs.ls(self._key, detail=False))

        entries = self._ask("list the objects", listed, absent=[])
        below = (str(entry).rstrip("/").rpartition("/") for entry in entries)
        return sorted(name for parent, _, name in below if parent.strip("/") == self._key.strip("/") and name)

    def holds(self, name: str) -> bool:
        """Whether there is anything of this name, asked for now. Any name will do: nothing is opened by it."""
        return self._info(name) is not None

    def kind(self) -> str | None:
        """What the URL itself names: ``"file"``, ``"directory"``, or None for nothing."""
        info = self._info("")
        return None if info is None else str(info["type"])

    def put_once(self, name: str, data: bytes, *, create: bool = False, over: str | None = None) -> tuple[Answer, StorageError | None]:
        """Puts an object by one request, and says what is known of it.

        Args:
            create: only if there is no object of that name.
            over: only in place of the content with this :meth:`tag`; see :meth:`swaps`.

        Returns:
            the answer, and the error that it came as, unless it is ``DONE``.
        """
        conditions_of_put: dict[str, Any] = {"mode": "create"} if create else {} if over is None else {"IfMatch": over}
        place = self._join(name)
        try:
            self._requests.once(lambda: self._single_shot.pipe_file(place, data, **conditions_of_put), num_bytes=len(data))
        except Exception as error:  # noqa: BLE001 - drivers raise their own libraries' types
            failure = storage_failure(error, "create the object" if create else "put the object", path=self._url, file=name)
            failure.__cause__ = error
            return answer_of(error), failure
        return Answer.DONE, None

    def put_until_answered(self, name: str, data: bytes, *, create: bool = False, over: str | None = None) -> tuple[Answer, bool]:
        """Puts an object, again until the storage says whether it took effect. Parameters as for :meth:`put_once`.

        Returns:
            ``DONE`` or ``EXISTS`` (the condition does not hold), and whether an earlier request got no answer, so that what is
            there may be its work.

        Raises:
            StorageError: it was refused, or there is no answer; then the object may have been put all the same.
        """
        may_be_ours, number, timeouts = False, 0, 0
        while True:
            number += 1
            answer, failure = self.put_once(name, data, create=create, over=over)
            if failure is None or answer is Answer.EXISTS:
                return answer, may_be_ours
            may_be_ours = may_be_ours or answer is Answer.UNKNOWN
            timeouts += timed_out(failure)
            if answer in (Answer.REFUSED, Answer.ABSENT) or number == NUM_TRIES or timeouts == NUM_TIMEOUTS:
                raise failure
            pause(number)

    def create_only(self, name: str, data: bytes) -> bool:
        """Puts an object unless there is one of that name.

        Returns:
            False if there was one, unless a request of this call has put it. Data that nobody else would put make that certain.

        Raises:
            StorageError: anything else; the object may have been put all the same, or may be later.
        """
        answer, may_be_ours = self.put_until_answered(name, data, create=True)
        if answer is Answer.DONE:
            return True
        return may_be_ours and self.fetch(name, 0, len(data) + 1) == data

    def replace(self, name: str, data: bytes) -> None:
        """Puts an object, whether there is one of that name or not. Raises ``StorageError``; it may have been put all the same."""
        self._ask("put the object", lambda: self._fs.pipe_file(self._join(name), data), name, num_bytes=len(data))

    def remove(self, name: str) -> None:
        """Removes an object; harmless if there is none."""
        self._ask("remove the object", lambda: self._fs.rm_file(self._join(name)), name, absent=None)

    def creates_conditionally(self, probe: str) -> bool:
        """Whether ``create`` holds against other writers, found out once per storage by trying it on the object ``probe``.

        A driver may ignore the condition, or ask first and write later, which another writer can slip between.

        Raises:
            StorageError: it could not be found out, or nothing can be written there at all.
        """
        return conditions.known("create", self, lambda: not _only_asks_first(self._fs) and conditions.creates(self, probe))

    def swaps(self, probe: str) -> bool:
        """Whether ``over`` holds against other writers, found out likewise. Only S3's own and compatible storages are asked."""
        return conditions.known("swap", self, lambda: _takes_tags(self._fs) and conditions.swaps(self, probe))

    def put(self, name: str, spool: Spool) -> None:
        """Sends a spooled object and checks what arrived."""
        place = self._join(name)

        def send() -> None:
            # The request may outlive this call, and the spool: what it sends is its own.
            with spool.lent() as content:
                if isinstance(content, str):
                    self._fs.put_file(content, place)
                else:
                    self._fs.pipe_file(place, content)

        self._ask("send the object", send, name, num_bytes=spool.size_bytes, again=_PUT_AGAIN)
        info = self._info(name)
        found = "no object" if info is None else f"{info['size']} bytes"
        if found != (expected := f"{spool.size_bytes} bytes"):
            raise StorageError("the object did not arrive whole", path=self._url, file=name, expected=expected, found=found)

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` (exclusive) of an object; fewer if it is shorter."""

        def read() -> bytes:
            return cast("bytes", self._fs.cat_file(self._join(name), start=start, end=stop))

        data = self._ask(f"read at byte {start}", read, name, num_bytes=stop - start, absent=None)
        if data is None:
            raise MissingFileError("the object is not there", path=self._url, file=name)
        return data

    def _join(self, name: str) -> str:
        return f"{self._key}/{name}" if name else self._key

    def _info(self, name: str) -> dict[str, Any] | None:
        def looked() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return cast("dict[str, Any]", self._fs.info(self._join(name)))

        return self._ask("look for the object", looked, name or None, absent=None)

    def _ask(self, action: str, call: Callable[[], T], name: str | None = None, **options: Any) -> T:
        """The result of a request, or of what is ``absent=`` where there is nothing. Raises ``StorageError``."""
        absences = [options.pop("absent")] if "absent" in options else []
        try:
            return self._requests.ask(call, **options)
        except Exception as error:  # drivers raise their own libraries' types
            if absences and answer_of(error) is Answer.ABSENT:
                return cast("T", absences[0])
            raise storage_failure(error, action, path=self._url, file=name) from error


def _implementation(file_system: Any) -> Any:
    """What puts the bytes."""
    return type(file_system)._pipe_file if isinstance(file_system, AsyncFileSystem) else type(file_system).pipe_file


def _only_asks_first(file_system: Any) -> bool:
    """Whether creation falls back on fsspec's own "exists, then write"."""
    implementation = _implementation(file_system)
    if isinstance(file_system, AsyncFileSystem):
        return "mode" not in inspect.signature(implementation).parameters
    return implementation is fsspec.AbstractFileSystem.pipe_file


def _takes_tags(file_system: Any) -> bool:
    """Whether a driver passes on, or may pass on, the condition that an object still is what it was."""
    return _is_s3(file_system) or "IfMatch" in inspect.signature(_implementation(file_system)).parameters
