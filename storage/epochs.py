"""Epochs of a root: who writes there now. A run claims the next one when it starts, and whoever had an older one may not publish any more.

An epoch is a file of its own, ``.epochs/<number>``, which is created once, by one of those who try, and never changed or removed. The
highest number writes.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from dcp_engine.errors import DcpEngineError, FencedError, MalformedCheckpointError, MissingFileError, StorageError
from dcp_engine.storage.backends import Directory, Location, locate, resolve
from dcp_engine.storage.envelope import is_nonce
from dcp_engine.storage.texts import MAX_TEXT_FILE_BYTES, decode_name, encode_name, encode_text, parse_text

__all__ = ["EPOCHS_NAME", "MAX_EPOCH", "EpochClaim", "EpochRecord", "epoch_name", "new_record", "newest_epoch", "parse_epoch_name"]

EPOCHS_NAME: Final = ".epochs"
MAX_EPOCH: Final = 10**18 - 1

_NAME = re.compile(r"[0-9]{8}|[1-9][0-9]{8,17}", re.ASCII)
_KEYS = ["epoch", "claim", "run", "host", "pid", "time"]


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """The content of an epoch's file: who claimed it. Only ``claim`` is ever compared; the rest is for people.

    Attributes:
        epoch: its number, from 1 on.
        claim: 128 random bits in hex, which tell this claim from any other.
        run: name of the run, as the caller gave it.
        host, pid: of the process that claimed it.
        time: when, in UTC, by the clock of that host.
    """

    epoch: int
    claim: str
    run: str
    host: str
    pid: int
    time: str

    def encode(self) -> bytes:
        """The bytes of the file."""
        values = [str(self.epoch), self.claim, encode_name(self.run), encode_name(self.host), str(self.pid), self.time]
        return encode_text("epoch", list(zip(_KEYS, values, strict=True)))

    @classmethod
    def decode(cls, data: bytes, *, file: str, path: str) -> EpochRecord:
        """Parses the file. Raises ``CorruptCheckpointError`` kinds, ``UnsupportedVersionError``."""
        fields = parse_text(data, "epoch", file=file, path=path)
        values = [value for _, value in fields]
        if [name for name, _ in fields] == _KEYS and values[0].isdigit() and is_nonce(values[1]) and values[4].isdigit():
            run, host = decode_name(values[2]), decode_name(values[3])
            if run is not None and host is not None:
                return cls(int(values[0]), values[1], run, host, int(values[4]), values[5])
        raise MalformedCheckpointError("not the file of an epoch", file=file, path=path, expected=_KEYS, found=fields)

    def __str__(self) -> str:
        run = f" of run {self.run!r}" if self.run else ""
        return f"epoch {self.epoch}{run}, claimed by host {self.host!r}, process {self.pid}, at {self.time}"


@dataclass(frozen=True, slots=True)
class EpochClaim:
    """The right to write to a root, until somebody claims the next epoch. A fence of ``ShardWriter``. Crosses processes by pickle.

    Attributes:
        root: absolute path or URL of the root.
        record: what the epoch's file says.
        storage_options: keyword arguments of the fsspec file system of a URL.
    """

    root: str
    record: EpochRecord
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.record.epoch

    def check(self) -> None:
        """Returns if this is still the newest epoch of the root.

        Raises:
            FencedError: it is not; ``found`` says whose is. Or its file is gone, and with it what others could see of it.
            StorageError: it cannot be told, so that nothing may be published.
        """
        directory = resolve(epochs_of(locate(self.root)), self.storage_options)
        newest = newest_epoch(directory)
        # A listing may be late. The next epoch has a name that is known, since none is left out.
        if newest <= self.epoch and _exists(directory, epoch_name(self.epoch + 1)):
            newest = self.epoch + 1
        if newest > self.epoch:
            raise self._fenced(_who(directory, newest))
        try:
            there = _read(directory, self.epoch).claim
        except MissingFileError:
            there = "nothing"
        except DcpEngineError as error:
            if isinstance(error, StorageError):
                raise
            there = str(error)
        if there != self.record.claim:
            raise self._fenced(f"in its own file: {there}")

    def _fenced(self, found: str) -> FencedError:
        return FencedError(
            "this run has lost the root to a newer one",
            path=self.root,
            expected=str(self.record),
            found=found,
            remedy="stop this run, or find out why two of them run; a restart claims the root again",
        )


def epoch_name(epoch: int) -> str:
    """Name of an epoch's file."""
    return f"{epoch:08d}"


def parse_epoch_name(name: str) -> int | None:
    """The epoch of a file's name; None for any other name."""
    return int(name) if _NAME.fullmatch(name) and int(name) > 0 else None


def newest_epoch(directory: Directory) -> int:
    """The highest epoch that is listed; 0 if there is none. ``StorageError`` if that cannot be told."""
    try:
        names = directory.names()
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return 0
        raise
    return max((epoch for name in names if (epoch := parse_epoch_name(name)) is not None), default=0)


def epochs_of(root: Location) -> Location:
    """The directory of a root's epochs."""
    return root.child(EPOCHS_NAME)


def new_record(epoch: int, run: str) -> EpochRecord:
    """A claim of this process, as of now."""
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return EpochRecord(epoch, secrets.token_hex(16), run, platform.node(), os.getpid(), time)


def _read(directory: Directory, epoch: int) -> EpochRecord:
    name = epoch_name(epoch)
    return EpochRecord.decode(directory.read_small(name, MAX_TEXT_FILE_BYTES), file=name, path=directory.path)


def _exists(directory: Directory, name: str) -> bool:
    try:
        directory.file_size(name)
    except MissingFileError:
        return False
    return True


def _who(directory: Directory, epoch: int) -> str:
    """Who claimed an epoch, in words."""
    try:
        return str(_read(directory, epoch))
    except DcpEngineError:
        return f"epoch {epoch}, whose file cannot be read yet"
