"""What a back end must be able to do: the protocols between the pipelines and any storage.

A back end knows files, not the format: it creates a file once, appends to it, makes it durable, and reads ranges of it. Whoever uses it
holds these protocols only, so that a new storage is one class per protocol and passes the contract suite in ``tests/contract``.

Every failure is one of :mod:`dcp_engine.errors`: ``StorageError`` (with ``StorageFullError``, ``StoragePermissionError``) for what the
storage refused, ``MissingFileError`` and ``TruncatedFileError`` for what it no longer holds. All name the directory and the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

__all__ = ["Buffer", "Directory", "ReadFile", "WriteFile"]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes that a file takes. A memoryview may have any item type: its memory is what counts."""


@runtime_checkable
class WriteFile(Protocol):
    """A new file, filled and then committed or aborted.

    After an error of a write or of ``commit`` the file is dead: all refuse from then on, and only ``abort`` is left. A failed
    flush to the device may have dropped the data, so that a second try would lie.

    Thread-safety: any number of threads may be in ``write_at`` and ``write_pieces``; nothing else may run beside them or beside itself, but
    for ``settle``.
    """

    @property
    def position(self) -> int:
        """Length so far: where the furthest byte that was written ends."""
        ...

    def write_at(self, position: int, parts: Sequence[Buffer]) -> None:
        """Writes all bytes of all parts, in order, from ``position`` (in bytes from the start) on. The parts may be reused when it returns.

        No byte is written twice, and whoever leaves a gap fills it before ``commit``.
        """
        ...

    def write_pieces(self, position: int, part: Buffer, seen: Callable[[memoryview], object]) -> None:
        """Writes all bytes of one part from ``position`` on, as ``write_at`` does, in pieces of whatever length suits the storage.

        Args:
            position: in bytes from the start.
            part: may be reused when it returns.
            seen: called with each piece in order, right after it was written: what is then done with it finds it in the cache.
        """
        ...

    def write(self, parts: Sequence[Buffer]) -> None:
        """Appends all bytes of all parts, in order. The parts may be reused when it returns."""
        ...

    def settle(self, start: int, num_bytes: int) -> bool:
        """Waits until bytes that were written have reached the storage, and says whether that could be seen.

        A measurement: it promises nothing, and reports no error. May run beside anything, and after the end of the file.
        """
        ...

    def commit(self) -> None:
        """Makes the file durable and closes it. When it returns, the file survives the death of this process (the name of a local file
        survives a power cut once its directory is flushed, too: see ``Publisher.seal``).
        """
        ...

    def abort(self) -> None:
        """Closes the file and removes it as far as possible. Never raises; harmless after ``commit``, which it does not undo."""
        ...


@runtime_checkable
class ReadFile(Protocol):
    """An existing file. Thread-safe: any number of threads may read at once; ``close`` comes after the last of them."""

    @property
    def size_bytes(self) -> int:
        """Size when the file was opened."""
        ...

    @property
    def piece_bytes(self) -> int:
        """Length from which on a longer read is no cheaper by the byte: read in such pieces, bytes are in the cache when they are used."""
        ...

    def read_into(self, position: int, parts: Sequence[memoryview]) -> None:
        """Fills all parts, in order, with the bytes from ``position`` (in bytes from the start) on.

        Args:
            position: first byte to read.
            parts: writable, C-contiguous memory; together exactly the length of the range.

        Raises:
            TruncatedFileError: the file ends before the range does.
        """
        ...

    def close(self) -> None:
        """Frees the file. Harmless when repeated."""
        ...


@runtime_checkable
class Directory(Protocol):
    """The files of one checkpoint, or of one attempt at it. Flat: a name never holds a separator. Thread-safe."""

    @property
    def path(self) -> str:
        """Where it is, for messages: a local path or a URL."""
        ...

    def create(self, name: str) -> WriteFile:
        """A new file. ``StorageError`` if the name exists already: nothing is ever overwritten."""
        ...

    def open(self, name: str) -> ReadFile:
        """An existing file. ``MissingFileError`` if it is absent or no regular file; symbolic links are not followed."""
        ...

    def read_small(self, name: str, limit_bytes: int) -> bytes:
        """The whole of a file. ``LimitExceededError`` if it is longer than ``limit_bytes``, of which nothing is read then."""
        ...

    def file_size(self, name: str) -> int:
        """Size in bytes of a file that is there now, not as of some cached listing. Errors as :meth:`open`."""
        ...

    def names(self) -> list[str]:
        """Everything in it, sorted: files, and whatever else somebody put there."""
        ...
