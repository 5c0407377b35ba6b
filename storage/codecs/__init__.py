"""Codecs: each turns one block of bytes into stored bytes and back."""

from dcp_engine.storage.codecs.floats import SplitFloats, split_floats, split_layout
from dcp_engine.storage.codecs.registry import CHOICES, NAMES, PLANES, RAW, ZSTD, EncodedBlock, decode_block, encode_block, whole
from dcp_engine.storage.codecs.scratch import Scratch

__all__ = [
    "CHOICES",
    "NAMES",
    "PLANES",
    "RAW",
    "ZSTD",
    "EncodedBlock",
    "Scratch",
    "SplitFloats",
    "decode_block",
    "encode_block",
    "split_floats",
    "split_layout",
    "whole",
]
