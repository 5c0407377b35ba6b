"""The checksum of a block: xxh3-64, which runs at the speed of memory and finds any damage that is not an attack.

Deliberate changes are the business of the manifest's SHA-256 chain; see ``docs/format.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["block_digest"]


def block_digest(*parts: Buffer) -> int:
    """xxh3-64 (seed 0) of the parts' bytes, one after the other, as an unsigned integer.

    Thread-safe; releases the GIL on large parts.
    """
    if len(parts) == 1:
        value: int = xxhash.xxh3_64_intdigest(parts[0])
        return value
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    total: int = state.intdigest()
    return total
