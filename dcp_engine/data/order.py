"""The order of samples: a permutation of ``range(num_samples)`` that (seed, epoch) alone decides, looked up by position.

**Algorithm** (``ORDER_NAME``; it never changes under that name, since checkpoints hold positions in it). Let ``bits`` be the number of
bits of ``num_samples - 1``. A number of ``bits`` bits is split into ``low``, its low ``ceil(bits / 2)`` bits, and ``high``, the others.
There are 24 rounds; even ones (0, 2, ...) replace ``low`` by ``low ^ f(high)``, odd ones ``high`` by ``high ^ f(low)``, where ``f(x)`` is
splitmix64's finaliser of ``x ^ key[round]``, cut to as many low bits as are replaced. The keys are consecutive little-endian 64-bit words
of ``SHAKE-256("dcp-engine order 1" + seed + epoch)``, seed and epoch as 8 bytes, little-endian. A result that is not below
``num_samples`` is put through again until it is (cycle walking; fewer than two passes on average).

Only integer arithmetic modulo 2**64 is used, so that it is the same on every machine and with every version of numpy, and one lookup takes
a constant amount of memory whatever the number of samples. Sources: Luby and Rackoff (1988) for the rounds, Black and Rogaway (2002) for
the walk, Steele, Lea and Flood (2014) for the finaliser.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_SAMPLES", "MAX_SEED", "ORDER_NAME", "Ids", "Order", "hash_ids", "hash_texts"]

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ORDER_NAME = "feistel-1"
MAX_SAMPLES = 2**62
MAX_SEED = 2**64 - 1

_NUM_ROUNDS = 24
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Order:
    """The order of one epoch. Immutable; safe to use from several threads.

    Args:
        num_samples: samples of the data set, from 1 to ``MAX_SAMPLES``.
        seed: of the run, from 0 to ``MAX_SEED``.
        epoch: number of the epoch, from 0 to ``MAX_SEED``.
        shuffle: ``False``: the order is 0, 1, 2, ...
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.num_samples = num_samples
        bits = (num_samples - 1).bit_length()
        self._num_low_bits = np.uint64((bits + 1) // 2)
        self._low_mask = np.uint64((1 << (bits + 1) // 2) - 1)
        self._high_mask = np.uint64((1 << bits // 2) - 1)
        data = b"dcp-engine order 1" + struct.pack("<QQ", seed, epoch)
        self._keys: _Words = np.frombuffer(hashlib.shake_256(data).digest(8 * _NUM_ROUNDS), dtype="<u8").astype(np.uint64)
        self._shuffle = shuffle and num_samples > 1

    def ids(self, positions: npt.ArrayLike) -> Ids:
        """The samples at these positions.

        Args:
            positions: int64 [n], each from 0 and below ``num_samples``.

        Returns:
            int64 [n].
        """
        return self._walk(positions, inverse=False)

    def positions(self, ids: npt.ArrayLike) -> Ids:
        """The inverse: the positions of these samples, int64 [n] each."""
        return self._walk(ids, inverse=True)

    def between(self, start: int, stop: int) -> Ids:
        """The samples from position ``start`` to ``stop``, exclusive."""
        return self.ids(np.arange(start, stop, dtype=np.int64))

    def _walk(self, numbers: npt.ArrayLike, *, inverse: bool) -> Ids:
        start = np.asarray(numbers, dtype=np.int64)
        assert start.size == 0 or (start.min() >= 0 and start.max() < self.num_samples), "callers check positions"
        if not self._shuffle:
            return start.copy()
        rounds = range(_NUM_ROUNDS - 1, -1, -1) if inverse else range(_NUM_ROUNDS)
        limit = np.uint64(self.num_samples)
        found = self._pass(start.astype(np.uint64), rounds)
        outside = np.flatnonzero(found >= limit)
        while outside.size:
            moved = self._pass(found[outside], rounds)
            found[outside] = moved
            outside = outside[moved >= limit]
        return found.astype(np.int64)

    def _pass(self, numbers: _Words, rounds: range) -> _Words:
        low, high = numbers & self._low_mask, numbers >> self._num_low_bits
        for number in rounds:
            if number % 2 == 0:
                low ^= _mix(high ^ self._keys[number]) & self._low_mask
            else:
                high ^= _mix(low ^ self._keys[number]) & self._high_mask
        return (high << self._num_low_bits) | low


def _mix(words: _Words) -> _Words:
    """splitmix64's finaliser, in place. Arrays wrap modulo 2**64 silently, as is meant; scalars of numpy would warn."""
    words ^= words >> _SHIFT_1
    words *= _FACTOR_1
    words ^= words >> _SHIFT_2
    words *= _FACTOR_2
    words ^= words >> _SHIFT_3
    return words


def hash_ids(ids: Iterable[int] | npt.NDArray[Any]) -> str:
    """A stable hash of sample ids in their order: 32 hex digits of the SHA-256 of the ids as little-endian int64."""
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype="<i8")
    return hashlib.sha256(array.tobytes()).hexdigest()[:32]


def hash_texts(texts: Iterable[str]) -> str:
    """A stable hash of texts in their order: 32 hex digits."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")  # names of files may hold lone surrogates
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.hexdigest()[:32]
