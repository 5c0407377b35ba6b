"""Codecs: each turns one block of bytes into stored bytes and back."""

from dcp_engine.storage.codecs.registry import CHOICES, NAMES, PLANES, RAW, ZSTD, EncodedBlock, decode_block, encode_block
from dcp_engine.storage.codecs.scratch import Scratch

__all__ = ["CHOICES", "NAMES", "PLANES", "RAW", "ZSTD", "EncodedBlock", "Scratch", "decode_block", "encode_block"]
