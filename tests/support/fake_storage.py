"""A storage behind fsspec that models what hurts: calls that fail, calls that were applied but not acknowledged, a condition ignored.

URLs: ``fake://...``; ``createsonly://...`` for a driver that cannot replace on condition; ``ignores://...`` for a storage that ignores all
conditions; ``asksfirst://...`` for a driver that leaves creation to fsspec's own "exists, then write".
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["FakeFileSystem", "PreconditionFailedError", "fresh_options"]

_numbers = itertools.count()


def fresh_options() -> dict[str, Any]:
    """Options that make fsspec take it for a storage that it has not met."""
    return {"number": next(_numbers)}


class PreconditionFailedError(OSError):
    """What botocore says of a condition that does not hold."""

    response: ClassVar[dict[str, Any]] = {"Error": {"Code": "PreconditionFailed"}, "ResponseMetadata": {"HTTPStatusCode": 412}}


class FakeFileSystem(MemoryFileSystem):
    """State is on the class: reset it with ``monkeypatch`` and ``empty``."""

    protocol = "fake"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[dict[str, BaseException]] = {}
    """Call (``create`` for a ``pipe_file`` with a condition that there is none, ``swap`` for one with a tag) -> what it raises, having done
    nothing."""
    ignores_condition: ClassVar[bool] = False
    intercept: ClassVar[Callable[[str, str, Callable[[], Any]], Any] | None] = None
    """``(call, path, proceed)`` -> result; may raise before or after ``proceed()``."""
    _lock: ClassVar[Any] = threading.Lock()
    _inside: ClassVar[threading.local] = threading.local()

    @classmethod
    def empty(cls) -> None:
        """Forgets all objects and directories."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]

    def _do(self, call: str, path: str, proceed: Callable[[], Any]) -> Any:
        def whole() -> Any:  # as a storage does: two requests for one object come one after the other
            with self._lock:
                self._inside.active = True
                try:
                    return proceed()
                finally:
                    self._inside.active = False

        if getattr(self._inside, "active", False):
            return proceed()  # a part of a request
        if call in self.failures:
            raise self.failures[call]
        intercept = type(self).intercept
        return whole() if intercept is None else intercept(call, path, whole)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", IfMatch: str | None = None, **options: Any) -> None:
        call = "create" if mode == "create" else "pipe_file" if IfMatch is None else "swap"
        effective = "overwrite" if self.ignores_condition else mode

        def proceed() -> None:
            if IfMatch is not None and not self.ignores_condition and self._info(path)["ETag"] != IfMatch:
                raise PreconditionFailedError("At least one of the pre-conditions you specified did not hold")
            MemoryFileSystem.pipe_file(self, path, value, mode=effective, **options)

        self._do(call, path, proceed)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._do("put_file", rpath, lambda: MemoryFileSystem.put_file(self, lpath, rpath, **options))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return self._do("cat_file", path, lambda: MemoryFileSystem.cat_file(self, path, start, end, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._do("ls", path, lambda: MemoryFileSystem.ls(self, path, detail, **options))

    def info(self, path: str, **options: Any) -> Any:
        return self._do("info", path, lambda: self._info(path, **options))

    def rm_file(self, path: str) -> Any:
        return self._do("rm_file", path, lambda: MemoryFileSystem.rm_file(self, path))

    def _info(self, path: str, **options: Any) -> dict[str, Any]:
        found = dict(MemoryFileSystem.info(self, path, **options))
        if found["type"] == "file":
            found["ETag"] = hashlib.md5(MemoryFileSystem.cat_file(self, path), usedforsecurity=False).hexdigest()
        return found


class CreatesOnlyFileSystem(FakeFileSystem):
    """Creates on condition and knows no other, as Google's driver. Has the same objects as ``fake://``."""

    protocol = "createsonly"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        FakeFileSystem.pipe_file(self, path, value, mode=mode, **options)


class IgnoresConditionsFileSystem(FakeFileSystem):
    """Takes all conditions and keeps none. Has the same objects as ``fake://``."""

    protocol = "ignores"
    ignores_condition = True


class AsksFirstFileSystem(FakeFileSystem):
    """Has the same objects as ``fake://``."""

    protocol = "asksfirst"
    pipe_file = fsspec.AbstractFileSystem.pipe_file


fsspec.register_implementation("fake", FakeFileSystem, clobber=True)
fsspec.register_implementation("createsonly", CreatesOnlyFileSystem, clobber=True)
fsspec.register_implementation("ignores", IgnoresConditionsFileSystem, clobber=True)
fsspec.register_implementation("asksfirst", AsksFirstFileSystem, clobber=True)
