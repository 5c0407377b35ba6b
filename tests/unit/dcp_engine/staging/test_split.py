"""Floats taken apart by torch's operators: bit for bit what the codec expects, which then stores what it would store of the floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.staging.split import PIECE_BYTES, pieces, split_blocks
from dcp_engine.storage.codecs import PLANES, RAW, ZSTD, Scratch, encode_block, kernels, split_floats, whole
from dcp_engine.storage.codecs.pairing import NumpyLoops
from dcp_engine.storage.dtypes import DtypeInfo, of_tensor_dtype
from dcp_engine.storage.limits import BLOCK_BYTES

SPLIT = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128]
KINDS = ["weights", "moments", "sparse", "far", "scattered", "flat", "zeros", "few"]
SCRATCH = Scratch()


def taken_apart(raw: bytes, info: DtypeInfo) -> bytes:
    source = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    out = torch.full_like(source, 0xA5)
    split_blocks(source, info, out)
    return out.numpy().tobytes()


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()


def weights(num_bytes: int, dtype: torch.dtype, *, kind: str) -> bytes:
    """Values as training has them, in a dtype's parts."""
    part = dtype.to_real() if dtype.is_complex else dtype
    values = torch.randn(num_bytes // part.itemsize, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 0.02
    if kind == "moments":
        values = values.square()
    elif kind == "sparse":
        values[torch.rand(len(values), generator=torch.Generator().manual_seed(8)) < 0.7] = 0
    elif kind == "far":  # so far from each other that the gaps between them need more than 16 bits
        values[::150_000] *= 1e-30
    elif kind == "scattered":
        values[::331] *= 1e12
    elif kind == "flat":
        values = values.sign() * (0.5 + values.abs())
    elif kind == "zeros":
        values.zero_()
    elif kind == "few":
        values = torch.randint(0, 3, (len(values),), generator=torch.Generator().manual_seed(9)).double()
    return values.to(part).view(torch.uint8).numpy().tobytes()


def test_a_pair_of_float32_is_taken_apart() -> None:
    # Sixteen floats are eight pairs: floats 0 and 8, 1 and 9, and so on.
    raw = np.full(16, 0x3F800000, np.uint32)
    raw[0], raw[8] = 0xBFC01234, 0x42FFABCD  # sign 1, exponent 0x7F, 0x40; sign 0, exponent 0x85, 0x7F
    found = taken_apart(raw.tobytes(), of_tensor_dtype(torch.float32))
    low, rest, exponents = np.frombuffer(found[:32], np.uint16), np.frombuffer(found[32:48], np.uint16), list(found[48:])
    assert low.tolist() == [0x1234, *[0] * 7, 0xABCD, *[0] * 7]
    assert rest.tolist() == [0x8040 | 0x7F00, *[0] * 7]
    assert exponents == [0x7F, *[0x7F] * 7, 0x85, *[0x7F] * 7]


def test_the_sign_of_a_second_bfloat16_goes_to_the_lower_byte_and_floats_without_a_pair_stay() -> None:
    raw = np.full(18, 0x3F80, np.uint16)
    raw[8], raw[16], raw[17] = 0xC0C1, 0x1234, 0x5678  # sign 1, exponent 0x81, 0x41
    found = taken_apart(raw.tobytes(), of_tensor_dtype(torch.bfloat16))
    assert np.frombuffer(found[:16], np.uint16).tolist() == [0x4100 | 0x80, *[0] * 7]
    assert list(found[16:32]) == [0x7F] * 8 + [0x81] + [0x7F] * 7
    assert found[32:] == bytes.fromhex("34127856")


def test_a_float64_becomes_byte_planes_with_its_sign_below_the_exponent() -> None:
    found = taken_apart(np.array([0xBFF0060504030201, 0x4008000000000000], np.uint64).tobytes(), of_tensor_dtype(torch.float64))
    # Upper halves 0xBFF0 and 0x4008, rotated left by one: 0x7FE1 and 0x8010.
    assert found.hex() == "0100" + "0200" + "0300" + "0400" + "0500" + "0600" + "e110" + "7f80"


@pytest.mark.parametrize("num_bytes", [0, 16, 32, 496, 65_520, BLOCK_BYTES, BLOCK_BYTES + 16, 2 * BLOCK_BYTES + 65_520])
@pytest.mark.parametrize("dtype", SPLIT, ids=str)
def test_every_block_can_be_joined_again(dtype: torch.dtype, num_bytes: int) -> None:
    info, raw = of_tensor_dtype(dtype), noise(num_bytes)
    found = taken_apart(raw, info)
    joined = b""
    for begin in range(0, num_bytes, BLOCK_BYTES):
        joined += whole(split_floats(memoryview(found)[begin : begin + BLOCK_BYTES], info))
    assert joined == raw


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SPLIT), st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_any_number_of_floats_can_be_joined_again(dtype: torch.dtype, num: int, seed: int) -> None:
    info = of_tensor_dtype(dtype)
    raw = noise(num * info.itemsize, seed)
    assert whole(split_floats(memoryview(taken_apart(raw, info)), info)).tobytes() == raw


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SPLIT, ids=str)
def test_what_is_stored_is_the_same(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = of_tensor_dtype(dtype)
    raw = weights((BLOCK_BYTES if kind == "far" else BLOCK_BYTES // 8) - 48, dtype, kind=kind)
    expected = encode_block(memoryview(raw), info, "planes", 1, SCRATCH)
    stored = b"".join(expected.parts)
    split = taken_apart(raw, info)
    for loops in (kernels.pair_loops, NumpyLoops()):
        monkeypatch.setattr("dcp_engine.storage.codecs.floats.pair_loops", loops)
        monkeypatch.setattr("dcp_engine.storage.codecs.paired.pair_loops", loops)
        found = encode_block(split_floats(memoryview(split), info), info, "planes", 1, SCRATCH)
        assert (found.codec, found.stored_bytes, b"".join(found.parts)) == (expected.codec, len(stored), stored)


def test_the_kinds_of_blocks_above_are_stored_in_every_way() -> None:
    """Or the test above would compare less than it says."""
    ways = set()
    for dtype in SPLIT:
        for kind in KINDS:
            raw = memoryview(weights((BLOCK_BYTES if kind == "far" else BLOCK_BYTES // 8) - 48, dtype, kind=kind))
            block = encode_block(raw, of_tensor_dtype(dtype), "planes", 1, SCRATCH)
            data = b"".join(block.parts)
            paired = block.codec == PLANES and data[1] == 0
            ways.add((block.codec, paired and ("folded" if data[3] else "signed"), paired and int.from_bytes(data[8:12], "little") > 0))
    assert {(PLANES, False, False), (PLANES, "signed", False), (PLANES, "signed", True), (PLANES, "folded", True)} <= ways
    assert ZSTD not in {codec for codec, _, _ in ways}


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_other_codecs_get_the_floats_as_they_were(codec: str) -> None:
    info = of_tensor_dtype(torch.float32)
    raw = weights(BLOCK_BYTES // 8, torch.float32, kind="few")
    expected = encode_block(memoryview(raw), info, codec, 1, SCRATCH)
    found = encode_block(split_floats(memoryview(taken_apart(raw, info)), info), info, codec, 1, SCRATCH)
    assert found.codec == expected.codec == {"raw": RAW, "zstd": ZSTD}[codec]
    assert b"".join(found.parts) == b"".join(expected.parts)


def test_noise_is_stored_raw_and_as_it_was() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        info, raw = of_tensor_dtype(dtype), noise(BLOCK_BYTES)
        found = encode_block(split_floats(memoryview(taken_apart(raw, info)), info), info, "planes", 1, SCRATCH)
        assert found.codec == RAW
        assert b"".join(found.parts) == raw


def test_what_the_device_has_made_is_not_changed_by_encoding_it() -> None:
    for kind in ("weights", "moments", "zeros"):
        for dtype in SPLIT:
            info = of_tensor_dtype(dtype)
            split = taken_apart(weights(BLOCK_BYTES // 8, dtype, kind=kind), info)
            encode_block(split_floats(memoryview(split), info), info, "planes", 1, SCRATCH)  # bytes: a write to them would raise
            assert split == taken_apart(weights(BLOCK_BYTES // 8, dtype, kind=kind), info)


def test_pieces_are_whole_blocks_and_cover_a_slot() -> None:
    assert list(pieces(2 * PIECE_BYTES + 5)) == [(0, PIECE_BYTES), (PIECE_BYTES, 2 * PIECE_BYTES), (2 * PIECE_BYTES, 2 * PIECE_BYTES + 5)]
    assert PIECE_BYTES % BLOCK_BYTES == 0
