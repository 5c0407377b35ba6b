"""Holds an object until it can be sent whole: in memory while it is small, then in a local file that has no name."""

from __future__ import annotations

import tempfile
from typing import IO

from dcp_engine.storage.backends.base import Buffer
from dcp_engine.storage.backends.failures import storage_failure

__all__ = ["Spool"]

IN_MEMORY_BYTES = 8 * 2**20


class Spool:
    """Bytes on their way to a remote storage. Not thread-safe.

    The file is unlinked before its first byte, so that a killed process leaves nothing behind, and unbuffered, so that a full disk shows
    where the bytes are written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self.size_bytes = 0

    def write(self, part: Buffer) -> None:
        """Appends. ``StorageError`` (``StorageFullError``) names the local directory that failed."""
        view = memoryview(part).cast("B")
        self.size_bytes += view.nbytes
        if self._file is None and self.size_bytes <= IN_MEMORY_BYTES:
            self._memory += view
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, prefix="dcp-engine-")  # noqa: SIM115 - closed by close()
                self._write_all(self._file, memoryview(self._memory))
                self._memory = bytearray()
            self._write_all(self._file, view)
        except OSError as error:
            failure = storage_failure(error, "spool the object on local disk", path=tempfile.gettempdir(), file=self._name)
            failure.remedy = "free some space there, or set TMPDIR to a larger file system"
            raise failure from error

    def content(self) -> bytes | str:
        """The bytes themselves, or the path of a file that holds them, valid until :meth:`close`."""
        if self._file is None:
            return bytes(self._memory)
        # Opening this path starts at the file's first byte, with an offset of its own.
        return f"/proc/self/fd/{self._file.fileno()}"

    def close(self) -> None:
        """Drops the bytes. Harmless when repeated."""
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()

    @staticmethod
    def _write_all(file: IO[bytes], view: memoryview) -> None:
        while view.nbytes:
            view = view[file.write(view) :]
