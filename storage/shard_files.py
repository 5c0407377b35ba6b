"""Opens shard files for reading: each at most once, checked against the manifest, closed when its last block was read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dcp_engine.errors import DigestMismatchError, TruncatedFileError
from dcp_engine.storage.envelope import FOOTER_MAGIC, check_body, check_header, parse_record
from dcp_engine.storage.limits import HEADER_BYTES, RECORD_BYTES

if TYPE_CHECKING:
    from dcp_engine.storage.backends.base import ReadFile
    from dcp_engine.storage.manifest import Manifest

__all__ = ["ShardFiles", "check_shard_file"]


def check_shard_file(file: ReadFile, manifest: Manifest, index: int, *, path: str | None) -> None:
    """Check everything of a shard file but its blocks: size, header, footer.

    The footer is the one that the manifest knows, byte for byte, so that what it says need not be looked at.

    Args:
        file: the opened file.
        manifest: what the file must fit.
        index: which of the manifest's files it is.
        path: directory of the checkpoint, for messages.

    Raises:
        TruncatedFileError, MalformedCheckpointError, DigestMismatchError, UnsupportedVersionError: naming the file.
    """
    record = manifest.files[index]
    if file.size_bytes != record.size_bytes:
        raise TruncatedFileError(
            "a shard file has another size than recorded",
            path=path,
            file=record.name,
            expected=f"{record.size_bytes} bytes",
            found=f"{file.size_bytes} bytes",
        )
    header = bytearray(HEADER_BYTES)
    trailer = bytearray(RECORD_BYTES)
    file.read_into(0, [memoryview(header)])
    check_header(bytes(header), name=record.name, rank=record.rank, nonce=manifest.nonce, path=path)
    file.read_into(record.size_bytes - RECORD_BYTES, [memoryview(trailer)])
    footer = parse_record(bytes(trailer), FOOTER_MAGIC, file=record.name, path=path)
    if footer.sha256 != record.footer_sha256:
        raise DigestMismatchError(
            "a shard file has another footer than recorded",
            path=path,
            file=record.name,
            expected=record.footer_sha256.hex(),
            found=footer.sha256.hex(),
        )
    footer_position = manifest.footer_position(index)
    if footer_position + footer.stored_bytes + RECORD_BYTES != record.size_bytes:
        raise TruncatedFileError(
            "a shard file's footer does not begin where its blocks end",
            path=path,
            file=record.name,
            expected=f"{record.size_bytes - RECORD_BYTES - footer_position} bytes of footer",
            found=f"{footer.stored_bytes} bytes",
        )
    stored = bytearray(footer.stored_bytes)
    file.read_into(footer_position, [memoryview(stored)])
    check_body(footer, memoryview(stored), file=record.name, path=path)


class ShardFiles:
    """The files of one read.

    Args:
        manifest: of the checkpoint.
        open_file: opens a file by name.
        num_uses: index of a file -> number of ``use`` and ``done`` pairs to come.
        path: directory of the checkpoint, for messages.

    Thread-safety: ``use`` and ``done`` may be called from any thread; ``close`` after all of them.
    """

    def __init__(self, manifest: Manifest, open_file: Callable[[str], ReadFile], num_uses: Mapping[int, int], *, path: str | None) -> None:
        self._manifest = manifest
        self._open_file = open_file
        self._path = path
        self._num_left = dict(num_uses)
        self._lock = threading.Lock()
        self._open_locks = {index: threading.Lock() for index in num_uses}
        self._open: dict[int, ReadFile] = {}

    def use(self, index: int) -> ReadFile:
        """Return the file, opened and checked. Other threads that want the same file wait for the check, those of other files do not."""
        with self._open_locks[index]:
            file = self._open.get(index)
            if file is None:
                file = self._open_file(self._manifest.files[index].name)
                try:
                    check_shard_file(file, self._manifest, index, path=self._path)
                except BaseException:
                    file.close()
                    raise
                self._open[index] = file
            return file

    def done(self, index: int) -> None:
        """End one use. The last one closes the file, so that a checkpoint of many files does not need as many descriptors."""
        with self._lock:
            self._num_left[index] -= 1
            is_last = not self._num_left[index]
        if is_last:
            self._open.pop(index).close()

    def close(self) -> None:
        """Close what an error left open."""
        while self._open:
            self._open.popitem()[1].close()
