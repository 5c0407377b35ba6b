"""Engines that are wrong on purpose, each in a way that only a death at the right moment shows: the campaign has to find every one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch

from dcp_engine.storage import attempts, publish_posix
from dcp_engine.storage.backends.calls import system
from dcp_engine.storage.publish_posix import PosixPublisher
from dcp_engine.storage.root_posix import PosixRoot
from dcp_engine.storage.root_store import Retirement

__all__ = ["MUTANTS", "Mutant", "unchanged"]

Told = Callable[[], None]
"""Says that the save is through, as far as this rank's caller can tell."""
Mutant = Callable[[Told], AbstractContextManager[None]]

_write_whole, _publish, _begin, _commit, _retire = (
    attempts.write_whole,
    PosixPublisher._publish,
    PosixPublisher.begin,
    PosixPublisher.commit,
    PosixRoot.retire,
)


@contextmanager
def unchanged(told: Told) -> Iterator[None]:
    """The engine as it is."""
    yield


@contextmanager
def _published_before_its_manifest(told: Told) -> Iterator[None]:
    """The attempt gets its name first, and MANIFEST and COMPLETE afterwards."""

    def commit(self: Any, ref: Any, manifest: bytes, files: Any) -> None:
        _publish(self, ref)
        directory = publish_posix.LocalDirectory(self._target)
        _write_whole(directory, "MANIFEST", manifest)
        _write_whole(directory, "COMPLETE", attempts.marker_of(ref.nonce, ".", manifest))

    with patch.object(PosixPublisher, "commit", commit):
        yield


@contextmanager
def _moved_file_by_file(told: Told) -> Iterator[None]:
    """The files are moved one by one, COMPLETE before others."""

    def publish(self: Any, ref: Any) -> None:
        system().mkdir(self._target)
        for name in sorted(system().listdir(ref.attempt)):
            system().rename(os.path.join(ref.attempt, name), os.path.join(self._target, name))
        system().rmdir(ref.attempt)

    with patch.object(PosixPublisher, "_publish", publish):
        yield


@contextmanager
def _old_one_removed_first(told: Told) -> Iterator[None]:
    """Makes room by removing what is to be replaced."""

    def publish(self: Any, ref: Any) -> None:
        for name in system().listdir(self._target):
            system().unlink(os.path.join(self._target, name))
        system().rmdir(self._target)
        system().rename(ref.attempt, self._target)

    with patch.object(PosixPublisher, "_publish", publish):
        yield


@contextmanager
def _written_in_place(told: Told) -> Iterator[None]:
    """Writes where the old one lies, as DCP's own writer does."""

    def begin(self: Any) -> Any:
        ref = _begin(self)
        system().rmdir(ref.attempt)
        with contextlib.suppress(FileExistsError):
            system().mkdir(self._target)
        for name in system().listdir(self._target):
            system().unlink(os.path.join(self._target, name))
        return attempts.AttemptRef(nonce=ref.nonce, target=ref.target, attempt=self._target, remote=False)

    def publish(self: Any, ref: Any) -> None:
        return None

    with patch.object(PosixPublisher, "begin", begin), patch.object(PosixPublisher, "_publish", publish):
        yield


@contextmanager
def _said_too_early(told: Told) -> Iterator[None]:
    """Says that it is through, and publishes afterwards."""

    def commit(self: Any, ref: Any, manifest: bytes, files: Any) -> None:
        told()
        _commit(self, ref, manifest, files)

    with patch.object(PosixPublisher, "commit", commit):
        yield


@contextmanager
def _attempt_of_fixed_name(told: Told) -> Iterator[None]:
    """An attempt that is left behind is in the way of the next save."""
    with patch.object(publish_posix, "attempt_name", lambda name, nonce: f".tmp-{name}-{'0' * 32}"):
        yield


@contextmanager
def _abort_that_sweeps(told: Told) -> Iterator[None]:
    """Cleaning up takes the neighbours with it."""

    def abort(self: Any, ref: Any) -> None:
        for name in os.listdir(self._parent):
            shutil.rmtree(os.path.join(self._parent, name))

    with patch.object(PosixPublisher, "abort", abort):
        yield


@contextmanager
def _retired_in_place(told: Told) -> Iterator[None]:
    """A step that has had its time is removed file by file under its own name."""

    def retire(self: Any, step: int, nonce: str) -> Any:
        place = self._place(step)
        for name in sorted(system().listdir(place), reverse=True):
            system().unlink(os.path.join(place, name))
        system().rmdir(place)
        return Retirement.DONE

    with patch.object(PosixRoot, "retire", retire):
        yield


@contextmanager
def _hint_written_in_place(told: Told) -> Iterator[None]:
    """LATEST is overwritten where it lies."""

    def put_latest(self: Any, content: bytes) -> None:
        path = os.path.join(self._path, "LATEST")
        fd = system().open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        system().pwritev(fd, [memoryview(content)], 0)
        system().close(fd)

    with patch.object(PosixRoot, "put_latest", put_latest):
        yield


MUTANTS: Final[dict[str, tuple[str, Mutant]]] = {
    "published before its manifest": ("first", _published_before_its_manifest),
    "moved file by file": ("next", _moved_file_by_file),
    "old one removed first": ("overwrite", _old_one_removed_first),
    "written in place": ("overwrite", _written_in_place),
    "said too early": ("next", _said_too_early),
    "attempt of a fixed name": ("first", _attempt_of_fixed_name),
    "abort that sweeps": ("again", _abort_that_sweeps),
    "retired in place": ("retention", _retired_in_place),
    "hint written in place": ("retention", _hint_written_in_place),
}
"""For each, the scenario in which it shows."""
