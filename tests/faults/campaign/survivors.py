"""What a power cut may leave of one file whose bytes were not flushed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

__all__ = ["SECTOR_BYTES", "Choice", "Dirty", "Survivor"]

SECTOR_BYTES: Final = 512
_FILLERS: Final = ("zeros", "noise", "stale")


@dataclass(frozen=True, slots=True)
class Survivor:
    """What is left of one file with unflushed bytes.

    Attributes:
        size_bytes: its size.
        sectors: bit i: the i-th sector of those that were written holds the new bytes.
        filler: what those beyond the old size hold otherwise.
        torn: the one of the sectors of which only the first ``torn_bytes`` are new; -1 for none.
    """

    size_bytes: int
    sectors: int
    filler: str = "zeros"
    torn: int = -1
    torn_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What survives of a prefix: bit i of ``changes`` for the i-th unflushed change of names, and one survivor for each dirty file."""

    changes: int
    files: tuple[Survivor, ...]


@dataclass(frozen=True, slots=True)
class Dirty:
    """A file with unflushed bytes: what is durable, what a crash-free reader sees, and the sectors in which they may differ."""

    inode: int
    durable: bytes
    full: bytes
    sectors: tuple[int, ...]
    stale: bytes

    def whole(self) -> Survivor:
        """All of it survives."""
        return Survivor(len(self.full), (1 << len(self.sectors)) - 1)

    def lost(self) -> Survivor:
        """Nothing does."""
        return Survivor(len(self.durable), 0)

    def telling(self) -> list[Survivor]:
        """The survivors that tell most: nothing, all, the size alone, cut at each sector, each sector alone missing or torn."""
        every, size = (1 << len(self.sectors)) - 1, len(self.full)
        found = [self.lost(), self.whole(), *(Survivor(size, 0, filler) for filler in _FILLERS)]
        for index, sector in enumerate(self.sectors):
            found.append(Survivor(size, every & ~(1 << index), _FILLERS[index % 3]))
            found.append(Survivor(size, every, _FILLERS[index % 3], index, 1 + index * 37 % (SECTOR_BYTES - 1)))
            if len(self.durable) <= sector * SECTOR_BYTES < size:
                found.append(Survivor(sector * SECTOR_BYTES, (1 << index) - 1))
        return list(dict.fromkeys(found))

    def drawn(self, rng: random.Random) -> Survivor:
        """Any survivor."""
        num = len(self.sectors)
        mask = rng.getrandbits(num) if num else 0
        match rng.randrange(4):
            case 0:
                mask |= rng.getrandbits(num) | rng.getrandbits(num)
            case 1:
                mask &= rng.getrandbits(num) & rng.getrandbits(num)
        low, size = len(self.durable), len(self.full)
        kept = size if rng.random() < 0.7 else rng.randrange(min(low, size), max(low, size) + 1)
        torn = rng.randrange(num) if num and rng.random() < 0.3 else -1
        return Survivor(kept, mask, rng.choice(_FILLERS), torn, rng.randrange(1, SECTOR_BYTES) if torn >= 0 else 0)

    def content(self, survivor: Survivor) -> bytes:
        """The bytes that a reader finds after the crash."""
        size = survivor.size_bytes
        if survivor == self.whole():
            return self.full
        out = bytearray(self._filler(survivor.filler, size))
        out[: min(size, len(self.durable))] = self.durable[:size]
        for index, sector in enumerate(self.sectors):
            if survivor.sectors >> index & 1:
                begin = sector * SECTOR_BYTES
                end = min(begin + (survivor.torn_bytes if index == survivor.torn else SECTOR_BYTES), size)
                out[begin:end] = self.full[begin:end]
        return bytes(out)

    def _filler(self, kind: str, size: int) -> bytes:
        if kind == "zeros":
            return bytes(size)
        noise = (b"\xa5\x5a\xff\x01power" * (size // 9 + 1))[:size]
        return (self.stale + noise[len(self.stale) :])[:size] if kind == "stale" else noise
