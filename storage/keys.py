"""Secret keys: given as bytes, as a file or as a callable, read when they are needed, shown and stored nowhere."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from dcp_engine.errors import InvalidOptionError, UnsupportedModeError
from dcp_engine.storage.limits import KEY_ID_BYTES

__all__ = ["KeySource", "SecretKey", "key_id", "secret_key"]

KeySource: TypeAlias = bytes | str | os.PathLike[str] | Callable[[], bytes]
"""The key itself, the path of a file whose whole content it is, or what returns it."""

MIN_KEY_BYTES: Final = 16
MAX_KEY_BYTES: Final = 4096


class SecretKey:
    """A key, or where to get it. It is read anew for every save and load, so that a file or a callable may change it between them.

    No repr shows it, and nothing pickles it but ``multiprocessing``: a rank and the process that saves for it may share it through a pipe;
    what pickles to a file may not.

    Args:
        source: see :data:`KeySource`.
        option: name of the option that it was given as, for messages.

    Thread-safety: immutable.
    """

    __slots__ = ("_option", "_source")

    def __init__(self, source: KeySource, option: str) -> None:
        self._source = source
        self._option = option

    def material(self) -> bytes:
        """The key's bytes. Hold them no longer than needed, and put them into no message.

        Raises:
            InvalidOptionError: it cannot be had, or is too short; says neither the key nor any part of it.
        """
        if isinstance(self._source, bytes):
            return _checked(self._source, self._option)
        try:
            if callable(self._source):
                found = self._source()
            else:
                with open(self._source, "rb") as file:
                    found = file.read(MAX_KEY_BYTES + 1)
        except Exception as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
            raise InvalidOptionError(f"{self._option} cannot be read", found=reason, remedy="make the key available") from error
        return _checked(found, self._option)

    def __repr__(self) -> str:
        return f"<{self._option}>"

    def __copy__(self) -> SecretKey:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SecretKey:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedModeError(
            f"{self._option} is not pickled, since a pickle may come to lie in a file",
            remedy="make the ShardWriter or ShardReader anew where it is needed",
        )


def _between_processes(key: SecretKey) -> tuple[type[SecretKey], tuple[KeySource, str]]:
    return SecretKey, (key._source, key._option)


ForkingPickler.register(SecretKey, _between_processes)


def secret_key(source: KeySource | SecretKey | None, option: str) -> SecretKey | None:
    """A key of what a user has passed.

    Raises:
        InvalidOptionError: it is neither bytes of at least 16, nor a path, nor callable. Files and callables are not asked yet.
    """
    if source is None or isinstance(source, SecretKey):
        return source
    if isinstance(source, bytes | bytearray):
        return SecretKey(_checked(bytes(source), option), option)
    if isinstance(source, str | os.PathLike):
        try:
            return SecretKey(Path(source).absolute(), option)
        except OSError as error:
            raise InvalidOptionError(
                f"{option} is a relative path, and the working directory is gone", found=error.strerror, remedy="pass an absolute path"
            ) from error
    if callable(source):
        return SecretKey(source, option)
    raise InvalidOptionError(
        f"{option} is no key",
        expected="bytes, the path of a file that holds them, or a callable that returns them",
        found=type(source).__name__,
    )


def key_id(material: bytes, purpose: str) -> bytes:
    """What tells a key from others, and says nothing about it: the first 8 bytes of an HMAC-SHA-256 with it.

    Args:
        material: the key.
        purpose: ``"signing"`` or ``"encryption"``.
    """
    return hmac.new(material, f"dcp-engine {purpose} key id".encode("ascii"), hashlib.sha256).digest()[:KEY_ID_BYTES]


def _checked(found: object, option: str) -> bytes:
    expected = f"{MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes"
    if not isinstance(found, bytes | bytearray):
        raise InvalidOptionError(f"{option} is no key", expected=expected, found=type(found).__name__)
    if not MIN_KEY_BYTES <= len(found) <= MAX_KEY_BYTES:
        how_many = f"more than {MAX_KEY_BYTES}" if len(found) > MAX_KEY_BYTES else str(len(found))
        raise InvalidOptionError(f"{option} has an unusable length", expected=expected, found=f"{how_many} bytes")
    return bytes(found)
