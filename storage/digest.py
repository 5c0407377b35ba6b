"""The checksum of a block: xxh3-64, which runs at the speed of memory and finds any damage that is not an attack.

Deliberate changes are the business of the manifest's SHA-256 chain; see ``docs/format.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

__all__ = ["BlockDigest", "block_digest"]

# The one-shot functions of xxhash hold the GIL: over a block of megabytes they would stop every other worker. ``update`` gives it up.
_ONE_SHOT_BYTES = 64 << 10


class BlockDigest:
    """The digest of a block whose bytes come piece by piece, each best given while it is still in the cache. Not thread-safe.

    Attributes:
        update: takes the next bytes; releases the GIL on large pieces.
    """

    __slots__ = ("_state", "update")

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.update: Callable[[Buffer], None] = self._state.update

    def value(self) -> int:
        """xxh3-64 (seed 0) of all bytes so far, as an unsigned integer."""
        found: int = self._state.intdigest()
        return found


def block_digest(*parts: Buffer) -> int:
    """xxh3-64 (seed 0) of the parts' bytes, one after the other, as an unsigned integer.

    Thread-safe; releases the GIL on large parts.
    """
    if len(parts) == 1 and memoryview(parts[0]).nbytes <= _ONE_SHOT_BYTES:
        value: int = xxhash.xxh3_64_intdigest(parts[0])
        return value
    digest = BlockDigest()
    for part in parts:
        digest.update(part)
    return digest.value()
