"""What the golden checkpoints hold, as formulas: known before any byte was written, and independent of the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

NONCE = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
WORLD_SIZE = 3
STEP = 41_000
SAVED_AT = "2031-05-01T12:00:00.250000Z"
RUN_ID = "golden-run"

ITEMSIZES = {
    **{1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 4, 8: 8, 9: 8, 16: 2, 17: 2, 18: 4, 19: 8},
    **{24: 1, 25: 1, 26: 1, 27: 1, 28: 1, 32: 4, 33: 8, 34: 16},
}
FLOAT_BYTES = {16: 2, 17: 2, 18: 4, 19: 8, 24: 1, 25: 1, 26: 1, 27: 1, 28: 1, 32: 2, 33: 4, 34: 8}
OBJECT, OPAQUE = 254, 255


def pattern(code: int, num_elements: int) -> Bytes:
    """Bytes of a few elements of any dtype: no two alike, and valid where not every byte is (bool)."""
    data = (np.arange(num_elements * ITEMSIZES[code]) * 37 + code).astype(np.uint8)
    return data & 1 if code == 1 else data


def noise(num_bytes: int) -> Bytes:
    """Bytes that no codec shrinks: a 32-bit linear congruential generator, its top byte."""
    state = np.empty(num_bytes, dtype=np.uint64)
    value = 12345
    for index in range(num_bytes):
        value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
        state[index] = value >> 24
    return state.astype(np.uint8)


def weights(code: int, num_elements: int) -> Bytes:
    """Bytes as weights have them: noise below, and a top byte of few values, sign included."""
    width = FLOAT_BYTES[code]
    data = noise(num_elements * ITEMSIZES[code]).reshape(-1, width).copy()
    index = np.arange(len(data))
    data[:, -1] = np.where(index % 3 == 0, 0xBC, 0x3C) + index % 5 // 4
    return data.reshape(-1)


def moments(num_elements: int) -> Bytes:
    """float32 as second moments have them: never negative, exponents of few values, some rows of zeros."""
    index = np.arange(num_elements)
    values = noise(4 * num_elements).view("<u4") & 0x7FFFFF | (100 + index % 7) << 23
    return np.where(index % 1000 < 20, 0, values).astype("<u4").view(np.uint8)


def float_steps(num_elements: int) -> Bytes:
    """float32: 1.0, but for every 100,000th element, which is minus its own index."""
    values = np.ones(num_elements, dtype="<f4")
    values[::100_000] = -np.arange(0, num_elements, 100_000)
    return values.view(np.uint8)


def int_steps(num_elements: int) -> Bytes:
    """int32: the index, divided by 2,000."""
    return (np.arange(num_elements, dtype="<i4") // 2000).view(np.uint8)


OBJECTS: dict[str, Any] = {
    "state.step": 41_000,
    "state.name": "gold",
    "state.none": None,
    "state.ratio": 0.1,
    "state.bytes": bytes(range(256)),
    "state.nested": {"a": [1, -2, 2**63, True], "b": {"c": "ü"}, "empty": {}},
}
TUPLE_AND_BIG_INT = (1, (2**70, "x"))
"""Stored as ``state.typed``: extensions of the object encoding."""
OPAQUE_BYTES = b"\x80\x02not for the engine to read."


def entries() -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Name -> dtype code, shape and row-major bytes of every tensor and every opaque object of the checkpoint ``v1``."""
    found: dict[str, tuple[int, tuple[int, ...], bytes]] = {}

    def add(name: str, code: int, shape: tuple[int, ...], data: Bytes) -> None:
        assert data.nbytes == int(np.prod(shape, dtype=np.int64)) * ITEMSIZES.get(code, 1)
        found[name] = (code, shape, data.tobytes())

    for code in ITEMSIZES:
        add(f"dtype.{code}", code, (2, 3), pattern(code, 6))
        add(f"scalar.{code}", code, (), pattern(code, 1))
        add(f"empty.{code}", code, (0, 5), pattern(code, 0))
    for code in FLOAT_BYTES:
        add(f"weights.{code}", code, (350,), weights(code, 350))
    add("rows", 18, (7, 5), pattern(18, 35))
    add("columns", 9, (4, 7), pattern(9, 28))
    add("blocks", 5, (4, 4, 6), pattern(5, 96))
    add("large.float", 18, (1_200_000,), float_steps(1_200_000))
    add("large.int", 7, (3, 400_000), int_steps(1_200_000))
    add("noise", 2, (66_000,), noise(66_000))
    add("nothing", 17, (0,), pattern(17, 0))
    add("no columns", 17, (3, 0), pattern(17, 0))
    add("größe.重み.\ud800", 18, (2,), pattern(18, 2))
    add("", 2, (3,), pattern(2, 3))
    add("opaque", OPAQUE, (len(OPAQUE_BYTES),), np.frombuffer(OPAQUE_BYTES, dtype=np.uint8))
    add("opaque.nothing", OPAQUE, (0,), np.zeros(0, dtype=np.uint8))
    add("moments", 18, (32_797,), moments(32_797))
    return found


ALIASES = {"tied": "large.float", "größe.tied": "dtype.17"}

BOXES: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {
    "rows": [(0, (0, 0), (3, 5)), (1, (3, 0), (3, 5)), (2, (6, 0), (1, 5))],
    "columns": [(0, (0, 0), (4, 3)), (2, (0, 3), (4, 4))],
    "blocks": [
        (1, (0, 0, 0), (2, 4, 2)),
        (0, (0, 0, 2), (2, 4, 4)),
        (2, (2, 0, 0), (2, 1, 6)),
        (2, (2, 1, 0), (2, 3, 6)),
    ],
    "large.int": [(0, (0, 0), (2, 400_000)), (1, (2, 0), (1, 400_000))],
}
"""Rank, offsets and sizes of the chunks of entries that are sharded; every other entry is one chunk, of rank 0 or 1."""

SIGNING_KEY = bytes(range(100, 132))
ENCRYPTION_KEY = bytes(range(200, 232))
"""Published, so good for this test alone."""

SECRET = ("large.float", "weights.17", "dtype.2", "dtype.18")
"""Entries of the checkpoint ``v1-secret``, of ranks 0 and 1 in turn."""

STRIPES = {"large.float": 1, "large.int": 1}
"""Entries that lie in a second file of their rank and component."""
