"""Decides for ``codec="auto"`` whether the next blocks are compressed, from what a save has measured so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Figures", "compression_pays", "is_over_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known of a save.

    Attributes:
        num_threads: workers that write.
        encode_bytes_per_sec: raw bytes that one worker encodes in a second of work; 0: not known yet.
        stored_share: stored bytes for each raw byte of what was encoded.
        copy_bytes_per_sec: bytes that one worker hands to the file in a second of work; 0: not known yet.
        storage_bytes_per_sec: bytes that the storage takes in, in a second; infinite for memory; 0: not known yet, or never.
    """

    num_threads: int
    encode_bytes_per_sec: float = 0.0
    stored_share: float = 1.0
    copy_bytes_per_sec: float = 0.0
    storage_bytes_per_sec: float = 0.0


def compression_pays(figures: Figures) -> bool:
    """Whether a save is faster with compression than without.

    Workers and storage work at the same time, so that the slower of the two decides: raw, each byte is copied and stored; compressed, each
    byte is encoded, and its share of bytes copied and stored. Where a figure is not known the answer is yes: a storage whose speed cannot
    be seen (an object store takes a file at its end) is far away, and nearly always slower than the codec.
    """
    if not (figures.encode_bytes_per_sec and figures.copy_bytes_per_sec and figures.storage_bytes_per_sec):
        return True
    copy_secs = 1 / figures.copy_bytes_per_sec / figures.num_threads
    encode_secs = 1 / figures.encode_bytes_per_sec / figures.num_threads
    storage_secs = 0.0 if math.isinf(figures.storage_bytes_per_sec) else 1 / figures.storage_bytes_per_sec
    raw_secs = max(copy_secs, storage_secs)
    compressed_secs = max(encode_secs + figures.stored_share * copy_secs, figures.stored_share * storage_secs)
    return compressed_secs < raw_secs


def is_over_target(size_target: float | None, raw_bytes: int, stored_bytes: int) -> bool:
    """Whether what is stored so far is more than the wanted share of what was saved."""
    return size_target is not None and stored_bytes > size_target * raw_bytes
