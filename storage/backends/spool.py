"""Holds an object until it can be sent whole: in memory while it is small, then in a local file that has no name."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from dcp_engine.storage.backends.base import Buffer
from dcp_engine.storage.backends.failures import storage_failure

__all__ = ["Spool"]

IN_MEMORY_BYTES = 8 * 2**20


class Spool:
    """Bytes on their way to a remote storage. Threads may write at once; nothing else may run beside that.

    The file is unlinked before its first byte, so that a killed process leaves nothing behind, and unbuffered, so that a full disk shows
    where the bytes are written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._closed = False
        self.size_bytes = 0

    def write_at(self, position: int, part: Buffer) -> int:
        """Writes a part from ``position`` on, and says how long it is. ``StorageError`` names the local directory."""
        view = memoryview(part).cast("B")
        stop = position + view.nbytes
        try:
            with self._lock:
                self.size_bytes = max(self.size_bytes, stop)
                if self._file is None and self.size_bytes <= IN_MEMORY_BYTES:
                    self._memory.extend(bytes(max(0, stop - len(self._memory))))
                    self._memory[position:stop] = view
                    return view.nbytes
                file = self._file = self._file or self._moved_to_disk()
            self._write_all(file, position, view)
        except OSError as error:
            failure = storage_failure(error, "spool the object on local disk", path=tempfile.gettempdir(), file=self._name)
            failure.remedy = "free some space there, or set TMPDIR to a larger file system"
            raise failure from error
        return view.nbytes

    @contextlib.contextmanager
    def lent(self) -> Iterator[bytes | str]:
        """The bytes themselves, or the path of a file that holds them, valid within the block even if the spool is closed meanwhile.

        A request that nobody waits for any more still reads them: the number of a closed descriptor would soon mean another file.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the spool is closed")
            content = bytes(self._memory) if self._file is None else os.dup(self._file.fileno())
        if isinstance(content, bytes):
            yield content
            return
        try:
            # Opening this path starts at the file's first byte, with an offset of its own.
            yield f"/proc/self/fd/{content}"
        finally:
            os.close(content)

    def close(self) -> None:
        """Drops the bytes. Harmless when repeated."""
        with self._lock:
            self._closed = True
            self._memory = bytearray()
            if self._file is not None:
                self._file.close()

    def _moved_to_disk(self) -> IO[bytes]:
        file = tempfile.TemporaryFile(buffering=0, prefix="dcp-engine-")  # noqa: SIM115 - closed by close()
        try:
            self._write_all(file, 0, memoryview(self._memory))
        except BaseException:
            file.close()
            raise
        self._memory = bytearray()
        return file

    @staticmethod
    def _write_all(file: IO[bytes], position: int, view: memoryview) -> None:
        while view.nbytes:
            num_bytes = os.pwrite(file.fileno(), view, position)
            position += num_bytes
            view = view[num_bytes:]
