"""Single objects of a remote storage: a new one, put whole or not at all, and an existing one, read by ranges.

A file opened for writing through fsspec would commit what it holds when an error ends its ``with`` block, so nothing here opens one: new
objects are spooled locally and sent by one ``pipe_file`` or ``put_file``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from dcp_engine.errors import StorageError, TruncatedFileError
from dcp_engine.storage.backends.base import Buffer
from dcp_engine.storage.backends.spool import Spool

if TYPE_CHECKING:
    from dcp_engine.storage.backends.remote import RemoteDirectory

__all__ = ["RemoteReadFile", "RemoteWriteFile"]

_PIECE_BYTES = 64 * 2**20


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
