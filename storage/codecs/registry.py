"""Which codec a block gets, and which one decodes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dcp_engine.errors import InvalidOptionError, MalformedCheckpointError
from dcp_engine.storage.codecs import planes, raw, zstd
from dcp_engine.storage.codecs.floats import RawFloats, SplitFloats
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.dtypes import DtypeInfo

__all__ = ["CHOICES", "NAMES", "PLANES", "RAW", "ZSTD", "EncodedBlock", "decode_block", "encode_block", "whole"]

RAW: Final = 0
ZSTD: Final = 1
PLANES: Final = 2
NAMES: Final = {RAW: "raw", ZSTD: "zstd", PLANES: "planes"}
CHOICES: Final = ("auto", "raw", "zstd", "planes")
"""What a writer can be asked for."""


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block as it will be stored.

    Attributes:
        codec: ``RAW``, ``ZSTD`` or ``PLANES``.
        parts: the stored bytes, one part after the other. They may point into the raw bytes or into the scratch, and are valid until
            either changes.
        stored_bytes: their total length.
    """

    codec: int
    parts: tuple[memoryview, ...]
    stored_bytes: int


def encode_block(block: memoryview | SplitFloats, dtype: DtypeInfo, codec: str, level: int, scratch: Scratch) -> EncodedBlock:
    """Encode one block; one that does not shrink by 3 % is stored raw.

    Args:
        block: contiguous bytes, at least one; or floats that a device has taken apart, which end as the same stored bytes.
        dtype: element type of everything in the block.
        codec: ``"raw"``, ``"zstd"``, ``"planes"`` or ``"auto"``. ``"planes"`` and ``"auto"`` use planes for floats and zstd for the rest
            (whether a block is encoded at all, ``"auto"`` leaves to whoever calls).
        level: zstd level. Planes use the parameters tuned for exponents at level 1, and the level itself above.
        scratch: the calling thread's.

    Raises:
        InvalidOptionError: no such codec.
    """
    if codec not in CHOICES:
        raise InvalidOptionError("unknown codec", expected=f"one of {', '.join(CHOICES)}", found=codec)
    if codec in ("planes", "auto") and dtype.plane_itemsize:
        floats = RawFloats(block.cast("B"), dtype.plane_itemsize) if isinstance(block, memoryview) else block
        used, num_bytes = PLANES, floats.num_bytes
        parts = planes.encode(floats, level, scratch)
    else:
        block = whole(block).cast("B")
        used, num_bytes = ZSTD, len(block)
        is_promising = codec != "raw" and _looks_compressible(block, level, scratch)
        parts = (memoryview(scratch.compressor(level).compress(block)),) if is_promising else None
    stored_bytes = sum(map(len, parts)) if parts else num_bytes
    if parts is None or stored_bytes > zstd.WORTH_IT * num_bytes:
        return EncodedBlock(RAW, (whole(block).cast("B"),), num_bytes)
    return EncodedBlock(used, parts, stored_bytes)


def whole(block: memoryview | SplitFloats) -> memoryview:
    """The bytes of a block: itself, or joined in memory of their own where a device has taken its floats apart."""
    if isinstance(block, memoryview):
        return block
    out = np.empty(block.num_bytes, np.uint8).data
    block.join(out, Scratch())
    return out


_SAMPLE_BYTES = 64 << 10


def _looks_compressible(view: memoryview, level: int, scratch: Scratch) -> bool:
    """Whether a few samples of a large block shrink: a block of noise is then not coded in vain."""
    if len(view) < 16 * _SAMPLE_BYTES:
        return True
    middle = len(view) // 2
    samples = (view[:_SAMPLE_BYTES], view[middle : middle + _SAMPLE_BYTES], view[-_SAMPLE_BYTES:])
    return any(len(scratch.compressor(level).compress(sample)) <= zstd.WORTH_IT * _SAMPLE_BYTES for sample in samples)


def decode_block(codec: int, stored: memoryview, out: memoryview, dtype: DtypeInfo, scratch: Scratch) -> None:
    """Decode one block straight into its destination.

    Args:
        codec: the manifest's code.
        stored: exactly the stored bytes, without padding. Check their digest first: a codec finds what breaks its rules, not what differs.
        out: writable contiguous bytes of exactly the raw length. Undefined after an error.
        dtype: element type of everything in the block.
        scratch: the calling thread's.

    Raises:
        MalformedCheckpointError: ``stored`` is not exactly one block of that length. The caller adds file and tensor.
    """
    view = out.cast("B")
    source = stored.cast("B")
    if codec == RAW:
        raw.decode(source, view)
    elif codec == ZSTD:
        zstd.decompress_into(scratch.decompressor, source, view)
    elif codec == PLANES:
        planes.decode(source, view, dtype, scratch)
    else:
        raise MalformedCheckpointError("unknown codec", expected=f"one of {sorted(NAMES)}", found=codec)
