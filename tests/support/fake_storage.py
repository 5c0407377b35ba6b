"""A storage behind fsspec that models what hurts: calls that fail, calls that were applied but not acknowledged, a condition ignored.

URLs: ``fake://...``, and ``asksfirst://...`` for a driver that leaves creation to fsspec's own "exists, then write".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

__all__ = ["FakeFileSystem", "fresh_options"]

_numbers = itertools.count()


def fresh_options() -> dict[str, Any]:
    """Options that make fsspec take it for a storage that it has not met."""
    return {"number": next(_numbers)}


class FakeFileSystem(MemoryFileSystem):
    """State is on the class: reset it with ``monkeypatch`` and ``empty``."""

    protocol = "fake"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failures: ClassVar[dict[str, BaseException]] = {}
    """Call (``create`` for a conditional ``pipe_file``) -> what it raises, having done nothing."""
    ignores_condition: ClassVar[bool] = False
    intercept: ClassVar[Callable[[str, str, Callable[[], Any]], Any] | None] = None
    """``(call, path, proceed)`` -> result; may raise before or after ``proceed()``."""

    @classmethod
    def empty(cls) -> None:
        """Forgets all objects and directories."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]

    def _do(self, call: str, path: str, proceed: Callable[[], Any]) -> Any:
        if call in self.failures:
            raise self.failures[call]
        intercept = type(self).intercept
        return proceed() if intercept is None else intercept(call, path, proceed)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        call = "create" if mode == "create" else "pipe_file"
        effective = "overwrite" if self.ignores_condition else mode
        self._do(call, path, lambda: MemoryFileSystem.pipe_file(self, path, value, mode=effective, **options))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._do("put_file", rpath, lambda: MemoryFileSystem.put_file(self, lpath, rpath, **options))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return self._do("cat_file", path, lambda: MemoryFileSystem.cat_file(self, path, start, end, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._do("ls", path, lambda: MemoryFileSystem.ls(self, path, detail, **options))

    def info(self, path: str, **options: Any) -> Any:
        return self._do("info", path, lambda: MemoryFileSystem.info(self, path, **options))

    def rm_file(self, path: str) -> Any:
        return self._do("rm_file", path, lambda: MemoryFileSystem.rm_file(self, path))


class AsksFirstFileSystem(FakeFileSystem):
    """Has the same objects as ``fake://``."""

    protocol = "asksfirst"
    pipe_file = fsspec.AbstractFileSystem.pipe_file


fsspec.register_implementation("fake", FakeFileSystem, clobber=True)
fsspec.register_implementation("asksfirst", AsksFirstFileSystem, clobber=True)
