"""The zstd codec: one standard zstd frame a block, decoded straight into its destination.

zstd itself is no guard against hostile data (a 16-byte frame can ask for a terabyte, and trailing frames are skipped silently), so a frame
is walked first: its declared size must be the size of the destination and its end the end of the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zstandard

from dcp_engine.errors import MalformedCheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["WORTH_IT", "check_frame", "decompress_into", "fast_compressor", "level_compressor", "uncompressed_frame"]

WORTH_IT = 0.97
"""What does not become smaller than this share of itself is stored as it is: the read would cost more than the bytes are worth."""
_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_BLOCK_BYTES = 128 << 10


def level_compressor(level: int) -> zstandard.ZstdCompressor:
    """A compressor of whole frames with their content size and without checksum (the block digest covers the stored bytes)."""
    return zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True, write_dict_id=False)


def fast_compressor() -> zstandard.ZstdCompressor:
    """A compressor for exponents: little but their entropy is coded.

    With these parameters matches are hardly looked for, which on the exponents of weights is both faster (0.75 against 0.30 GB/s) and
    smaller (3.07 against 2.78) than level 1: short matches only get in the way of the entropy coder.
    """
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            window_log=17,
            write_checksum=False,
            write_content_size=True,
            write_dict_id=False,
        )
    )


def uncompressed_frame(content: bytes) -> bytes:
    """A frame whose blocks hold the content as it is, at least one byte."""
    parts = [_MAGIC + b"\xe0" + len(content).to_bytes(8, "little")]
    for start in range(0, len(content), _MAX_BLOCK_BYTES):
        block = content[start : start + _MAX_BLOCK_BYTES]
        is_last = start + len(block) == len(content)
        parts += [(len(block) << 3 | is_last).to_bytes(3, "little"), block]
    return b"".join(parts)


def check_frame(stored: memoryview, raw_bytes: int) -> None:
    """Check that ``stored`` is exactly one zstd frame that declares ``raw_bytes`` of content, without decoding it.

    Raises:
        MalformedCheckpointError: anything else, among it dictionaries, trailing bytes and skippable frames.
    """
    size = len(stored)
    if size < 6 or stored[:4] != _MAGIC:
        raise MalformedCheckpointError("not a zstd frame", found=f"{size} bytes beginning with {bytes(stored[:4]).hex()}")
    descriptor = stored[4]
    single_segment = descriptor >> 5 & 1
    size_flag = descriptor >> 6
    if descriptor & 0b1011:
        raise MalformedCheckpointError("zstd frame uses a dictionary or a reserved bit", found=f"descriptor {descriptor:#04x}")
    width = (single_segment, 2, 4, 8)[size_flag]
    position = 6 - single_segment
    declared = int.from_bytes(stored[position : position + width], "little") + (256 if width == 2 else 0)
    position += width
    if width == 0 or declared != raw_bytes:
        raise MalformedCheckpointError(
            "zstd frame declares another size", expected=f"{raw_bytes} bytes", found=f"{declared} bytes" if width else "no size"
        )
    last = 0
    while not last:
        if position + 3 > size:
            raise MalformedCheckpointError("zstd frame ends early", found=f"{size} bytes")
        header = stored[position] | stored[position + 1] << 8 | stored[position + 2] << 16
        last, kind, length = header & 1, header >> 1 & 3, header >> 3
        # An empty block that is not the last says nothing; a frame of nothing but those would take long to walk.
        if kind == 3 or length > _MAX_BLOCK_BYTES or (length == 0 and not last):
            raise MalformedCheckpointError("zstd frame holds an invalid block", found=f"block header {header:#08x} at byte {position}")
        position += 3 + (1 if kind == 1 else length)
    if descriptor & 4:
        position += 4
    if position != size:
        raise MalformedCheckpointError("zstd frame does not end where its block ends", expected=f"{size} bytes", found=f"{position} bytes")


def decompress_into(decompressor: zstandard.ZstdDecompressor, stored: memoryview, out: Buffer) -> None:
    """Decode one frame into exactly ``out``.

    The frame is checked first. zstd then decodes in one pass straight into ``out``, without a window of its own, since the whole input is
    there and the whole content fits.

    Args:
        decompressor: not shared between threads.
        stored: the whole frame, contiguous bytes.
        out: writable contiguous bytes.

    Raises:
        MalformedCheckpointError: not one valid frame of exactly that size.
    """
    view = memoryview(out)
    check_frame(stored, view.nbytes)
    if view.nbytes == 0:
        raise MalformedCheckpointError("zstd frame of an empty block")
    try:
        with decompressor.stream_reader(stored) as reader:
            num_bytes = reader.readinto(view)
    except zstandard.ZstdError as error:
        raise MalformedCheckpointError("zstd cannot decode a block", found=str(error)) from error
    if num_bytes != view.nbytes:
        raise MalformedCheckpointError("zstd frame holds less than it declares", expected=view.nbytes, found=num_bytes)
