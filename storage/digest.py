"""The checksums of blocks: xxh3-64, which runs at the speed of memory and finds any damage that is not an attack; or SHA-256.

With SHA-256 the chain from ``COMPLETE`` over ``MANIFEST`` reaches every byte, so that who vouches for ``COMPLETE`` vouches for all of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

__all__ = ["DIGESTS", "SHA256", "XXH3", "BlockDigest", "DigestKind", "DigestValue", "digest_of_column"]

DigestValue: TypeAlias = int | bytes
"""xxh3-64 as an unsigned integer; SHA-256 as its 32 bytes."""

# The one-shot functions of xxhash hold the GIL: over a block of megabytes they would stop every other worker. ``update`` gives it up.
_ONE_SHOT_BYTES = 64 << 10


class BlockDigest(Protocol):
    """The digest of a block whose bytes come piece by piece, each best given while it is still in the cache. Not thread-safe."""

    @property
    def update(self) -> Callable[[Buffer], None]:
        """Takes the next bytes; releases the GIL on large pieces."""
        ...

    def value(self) -> DigestValue:
        """Of all bytes so far."""
        ...


class _Xxh3Digest:
    __slots__ = ("_state", "update")

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.update: Callable[[Buffer], None] = self._state.update

    def value(self) -> int:
        found: int = self._state.intdigest()
        return found


class _Sha256Digest:
    __slots__ = ("_state", "update")

    def __init__(self) -> None:
        self._state = hashlib.sha256()
        self.update: Callable[[Buffer], None] = self._state.update

    def value(self) -> bytes:
        return self._state.digest()


def _xxh3(*parts: Buffer) -> int:
    if len(parts) == 1 and memoryview(parts[0]).nbytes <= _ONE_SHOT_BYTES:
        value: int = xxhash.xxh3_64_intdigest(parts[0])
        return value
    digest = _Xxh3Digest()
    for part in parts:
        digest.update(part)
    return digest.value()


def _sha256(*parts: Buffer) -> bytes:
    digest = _Sha256Digest()
    for part in parts:
        digest.update(part)
    return digest.value()


@dataclass(frozen=True, slots=True)
class DigestKind:
    """One way to digest blocks.

    Attributes:
        name: what a writer is asked for.
        dtype: of a column of such digests: u64, or 32 raw bytes.
        of: digest of the parts' bytes, one after the other. Thread-safe; releases the GIL on large parts.
        begin: a digest whose bytes come piece by piece.
    """

    name: str
    dtype: np.dtype[Any]
    of: Callable[..., DigestValue]
    begin: Callable[[], BlockDigest]

    def column(self, values: Sequence[DigestValue]) -> npt.NDArray[Any]:
        """Digests as a column."""
        return np.array(values, dtype=self.dtype)

    @staticmethod
    def text(value: DigestValue) -> str:
        """A digest for a message."""
        return value.hex() if isinstance(value, bytes) else f"{value:016x}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_named, (self.name,))


XXH3: Final = DigestKind("xxh3", np.dtype(np.uint64), _xxh3, _Xxh3Digest)
SHA256: Final = DigestKind("sha256", np.dtype("V32"), _sha256, _Sha256Digest)
DIGESTS: Final = {kind.name: kind for kind in (XXH3, SHA256)}


def digest_of_column(column: npt.NDArray[Any]) -> DigestKind:
    """Which kind of digests a column holds."""
    return XXH3 if column.dtype == XXH3.dtype else SHA256


def _named(name: str) -> DigestKind:
    return DIGESTS[name]
