"""The paired layout of planes: against the parser that knows the format's page alone, bit by bit, and against hostile payloads."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from golden import spec_parser
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.errors import MalformedCheckpointError
from dcp_engine.storage import dtypes
from dcp_engine.storage.codecs import PLANES, Scratch, decode_block, encode_block, paired
from dcp_engine.storage.codecs.floats import RawFloats

BF16, FP32, FP16, COMPLEX64 = 17, 18, 16, 33
SCRATCH = Scratch()


def floats(itemsize: int, exponents: np.ndarray, *, signs: bool = True, seed: int = 0) -> bytes:
    """Floats with these exponents, and noise in all other bits."""
    generator = np.random.default_rng(seed)
    top = generator.integers(0, 0x10000, len(exponents)).astype(np.uint16) & (0x807F if signs else 0x007F)
    top |= exponents.astype(np.uint16) << 7
    if itemsize == 2:
        return top.tobytes()
    low = generator.integers(0, 0x10000, len(exponents)).astype(np.uint16)
    return np.stack((low, top), axis=1).tobytes()


def encoded(raw: bytes, itemsize: int, base: int) -> bytes | None:
    parts = paired.encode(RawFloats(memoryview(raw), itemsize), base, 1, SCRATCH)
    return None if parts is None else b"".join(parts)


def decoded(data: bytes, num_bytes: int, code: int) -> bytes:
    out = bytearray(b"\xa5" * num_bytes)
    decode_block(PLANES, memoryview(data), memoryview(out), dtypes.of_code(code), SCRATCH)
    return bytes(out)


def layout(raw: bytes, code: int) -> str:
    block = encode_block(memoryview(raw), dtypes.of_code(code), "planes", 1, SCRATCH)
    assert block.codec == PLANES
    data = b"".join(block.parts)
    assert decoded(data, len(raw), code) == raw
    return "byte planes" if data[1] else "paired"


def around(num: int, base: int, seed: int = 0) -> np.ndarray:
    """Exponents within the codes of a base."""
    return base + np.random.default_rng(seed).integers(0, 16, num)


@pytest.mark.parametrize("code", [BF16, FP32])
@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(16, 700),
    base=st.integers(0, 240),
    outside=st.dictionaries(st.integers(0, 699), st.integers(0, 255), max_size=40),
    signs=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_floats_come_back_as_the_page_says(code: int, num: int, base: int, outside: dict[int, int], signs: bool, seed: int) -> None:
    itemsize = dtypes.of_code(code).itemsize
    exponents = around(num, base, seed)
    for position, exponent in outside.items():
        if position < num:
            exponents[position] = exponent
    raw = floats(itemsize, exponents, signs=signs, seed=seed)
    data = encoded(raw, itemsize, base)
    num_paired = num // 16 * 16
    num_outside = int(((exponents[:num_paired] < base) | (exponents[:num_paired] > base + 15)).sum())
    if data is None:
        assert num_outside > num_paired / 16  # each counts for its pair, before the two are told apart
        return
    assert struct.unpack_from("<I", data, 8)[0] == num_outside
    assert decoded(data, len(raw), code) == raw
    assert spec_parser.decode(PLANES, data, len(raw), code) == raw


def test_every_bit_pattern_of_bfloat16_comes_back_among_weights() -> None:
    exponents = around(1 << 20, 110)
    words = np.frombuffer(floats(2, exponents), np.uint16).copy()
    words[7::16][:65536] = np.arange(65536)
    raw = words.tobytes()
    data = encoded(raw, 2, 110)
    assert data is not None
    assert decoded(data, len(raw), BF16) == raw
    assert layout(raw, BF16) == "paired"


def test_all_special_values_of_float32_come_back() -> None:
    values = np.frombuffer(floats(4, around(4000, 115)), np.uint32).copy()
    specials = (0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFBFFFFF, 0x7F7FFFFF, 0x00800000)
    values[np.arange(len(specials)) * 397] = specials
    raw = values.tobytes()
    data = encoded(raw, 4, 115)
    assert data is not None
    assert decoded(data, len(raw), FP32) == raw
    assert spec_parser.decode(PLANES, data, len(raw), FP32) == raw


@pytest.mark.parametrize("num", [2 * 65536 + 16, 3 * 65536 + 77, 400_001])
def test_more_than_a_tile_and_listed_exponents_far_apart(num: int) -> None:
    exponents = around(num, 100)
    exponents[[0, num // 16 * 16 - 1]] = 3, 250
    raw = floats(4, exponents)
    data = encoded(raw, 4, 100)
    assert data is not None
    # The two, and one every 65,536 floats between them.
    assert struct.unpack_from("<I", data, 8)[0] == 2 + (num // 16 * 16 - 1) // 65536
    assert decoded(data, len(raw), FP32) == raw
    assert spec_parser.decode(PLANES, data, len(raw), FP32) == raw


@pytest.mark.parametrize(("code", "saved"), [(BF16, 1 / 16), (FP32, 1 / 32)])
def test_floats_without_signs_save_a_bit_each(code: int, saved: float) -> None:
    itemsize = dtypes.of_code(code).itemsize
    exponents = around(160_000, 100)
    sizes = [len(encoded(floats(itemsize, exponents, signs=signs), itemsize, 100) or b"") for signs in (True, False)]
    assert sizes[0] - sizes[1] == pytest.approx(saved * 160_000 * itemsize, rel=0.01)


def test_a_hand_made_payload_is_decoded() -> None:
    # bfloat16: eight times 1.0 (0x3F80, exponent 127), then eight times -2.0 (0xC000, exponent 128); float 3 is listed with exponent 255.
    codes = bytes([0x21]) * 8 + bytes([3, 0, 255])
    frame = zstandard.ZstdCompressor().compress(codes)
    rest = struct.pack("<H", 0x0080) * 8
    data = struct.pack("<BBBBIII", 2, 0, 126, 0, len(frame), 1, 0) + rest + b"\x12\x34" + frame
    expected = np.array([0x3F80] * 3 + [0x7F80] + [0x3F80] * 4 + [0xC000] * 8 + [0x3412], np.uint16).tobytes()
    assert decoded(data, 34, BF16) == expected
    assert spec_parser.decode(PLANES, data, 34, BF16) == expected


def test_blocks_take_the_layout_that_suits_them() -> None:
    weights = around(70_000, 110)
    rows_of_zeros = weights.copy()
    rows_of_zeros[10_000:12_000] = 0
    assert layout(floats(4, weights), FP32) == "paired"
    assert layout(floats(4, weights), COMPLEX64) == "paired"
    assert layout(floats(2, weights, signs=False), BF16) == "paired"
    assert layout(floats(4, rows_of_zeros), FP32) == "paired"
    assert layout(floats(4, np.where(np.arange(70_000) % 3, weights, 0)), FP32) == "byte planes"
    assert layout(floats(2, 16 * np.random.default_rng(0).integers(0, 8, 70_000)), FP16) == "byte planes"
    assert layout(floats(4, weights[:20_000]), FP32) == "byte planes"  # small
    bfloat16_values = (np.frombuffer(floats(4, weights), np.uint32) & 0xFFFF0000).tobytes()
    assert layout(bfloat16_values, FP32) == "byte planes"


def test_small_and_unaligned_blocks_come_back() -> None:
    for num in (1, 15, 16, 17, 31, 32, 33, 1000):
        raw = b"x" + floats(4, around(num, 110))
        block = encode_block(memoryview(raw)[1:], dtypes.of_code(FP32), "planes", 1, SCRATCH)
        out = bytearray(len(raw))
        decode_block(block.codec, memoryview(b"y" + b"".join(block.parts))[1:], memoryview(out)[1:], dtypes.of_code(FP32), SCRATCH)
        assert out[1:] == raw[1:]


NUM = 1000
PAIRS = 496


def payload(**changes: int) -> bytes:
    """A valid one of ``NUM`` bfloat16, but for fields of the header that are changed."""
    exponents = around(NUM, 100)
    exponents[[5, 700]] = 1, 2
    data = encoded(floats(2, exponents), 2, 100)
    assert data is not None
    names = ("itemsize", "layout", "base", "is_folded", "frame_bytes", "num_outside", "zero")
    fields = dict(zip(names, struct.unpack_from("<BBBBIII", data), strict=True))
    assert fields["num_outside"] == 2
    return struct.pack("<BBBBIII", *{**fields, **changes}.values()) + data[16:]


def test_the_payload_that_is_damaged_below_is_valid() -> None:
    assert len(decoded(payload(), 2 * NUM, BF16)) == 2 * NUM


@pytest.mark.parametrize(
    "changes",
    [
        {"itemsize": 4},
        {"layout": 4},
        {"base": 241},
        {"base": 255},
        {"is_folded": 1},
        {"is_folded": 2},
        {"frame_bytes": 0},
        {"frame_bytes": 2**32 - 1},
        {"num_outside": 1},
        {"num_outside": 3},
        {"num_outside": PAIRS // 4 + 1},
        {"num_outside": 2**32 - 1},
        {"zero": 1},
    ],
    ids=str,
)
def test_a_header_that_contradicts_the_block_is_malformed(changes: dict[str, int]) -> None:
    data = payload(**changes)
    with pytest.raises(MalformedCheckpointError):
        decoded(data, 2 * NUM, BF16)
    with pytest.raises((spec_parser.SpecError, zstandard.ZstdError)):
        spec_parser.decode(PLANES, data, 2 * NUM, BF16)


@pytest.mark.parametrize("num_bytes", [0, 2, 30, 2 * NUM - 2, 2 * NUM + 2, 2 * NUM + 1])
def test_a_block_of_another_length_is_malformed(num_bytes: int) -> None:
    with pytest.raises(MalformedCheckpointError):
        decoded(payload(), num_bytes, BF16)


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 500, -1])
def test_a_payload_cut_off_is_malformed(length: int) -> None:
    with pytest.raises(MalformedCheckpointError):
        decoded(payload()[:length], 2 * NUM, BF16)


@pytest.mark.parametrize("gaps", [(65535, 0), (2 * PAIRS, 0), (2 * PAIRS - 1, 0), (0, 65535)])
def test_exponents_listed_beyond_the_end_are_malformed(gaps: tuple[int, int]) -> None:
    content = bytes(PAIRS) + bytes(gap & 255 for gap in gaps) + bytes(gap >> 8 for gap in gaps) + b"\1\2"
    frame = zstandard.ZstdCompressor().compress(content)
    data = struct.pack("<BBBBIII", 2, 0, 100, 0, len(frame), 2, 0) + bytes(2 * PAIRS + 2 * (NUM - 2 * PAIRS)) + frame
    with pytest.raises(MalformedCheckpointError):
        decoded(data, 2 * NUM, BF16)


@settings(max_examples=100, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=5))
def test_damage_never_gives_another_length_or_another_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(payload())
    for position, value in changes:
        data[position % len(data)] = value
    with contextlib.suppress(MalformedCheckpointError):
        assert len(decoded(bytes(data), 2 * NUM, BF16)) == 2 * NUM
