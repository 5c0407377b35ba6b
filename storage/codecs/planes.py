"""The planes codec: floats taken apart, so that only what compresses is compressed. It has two layouts, told apart by the second byte.

Of a trained weight the exponent is predictable and the mantissa is noise, but in memory their bits share bytes. Where that is all there is
to a block, the paired layout takes it apart fastest; byte planes serve every other: wide and narrow floats, exponents that spread or are
often zero, mantissas that compress.
"""

from __future__ import annotations

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage.codecs import byte_planes, paired
from dcp_engine.storage.codecs.floats import Floats
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.dtypes import DtypeInfo

__all__ = ["decode", "encode"]


def encode(floats: Floats, level: int, scratch: Scratch) -> tuple[memoryview, ...] | None:
    """The payload of a block in parts, or ``None`` where nothing in it is worth compressing.

    Args:
        floats: the block. The payload is the same, whoever has taken them apart.
        level: 1 for the parameters tuned for exponents, else the zstd level.
        scratch: the parts point into it, or into the block, until either is used again.
    """
    if floats.itemsize in paired.ITEMSIZES and (base := paired.find_base(floats, level, scratch)) is not None:
        parts = paired.encode(floats.for_pairs(scratch), base, level, scratch)
        if parts is not None:
            return parts
    return byte_planes.encode(floats.for_planes(scratch), level, scratch)


def decode(stored: memoryview, out: memoryview, dtype: DtypeInfo, scratch: Scratch) -> None:
    """Decode a payload into exactly ``out``.

    Raises:
        MalformedCheckpointError: the payload breaks a rule of its layout.
    """
    itemsize = dtype.plane_itemsize
    if not itemsize or len(out) % itemsize or len(stored) < 2:
        raise MalformedCheckpointError("planes block of the wrong size or dtype", found=f"{len(stored)} bytes of {dtype.name}")
    if stored[1] == 0 and itemsize in paired.ITEMSIZES:
        paired.decode(stored, out, itemsize, scratch)
    else:
        byte_planes.decode(stored, out, itemsize, scratch)
