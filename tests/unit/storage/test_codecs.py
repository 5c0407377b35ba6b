from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.errors import InvalidOptionError, MalformedCheckpointError
from dcp_engine.storage import dtypes
from dcp_engine.storage.codecs import PLANES, RAW, ZSTD, EncodedBlock, Scratch, decode_block, encode_block
from dcp_engine.storage.dtypes import DtypeInfo

FLOATS = [16, 17, 18, 19, 24, 25, 26, 27, 28, 32, 33, 34]
SCRATCH = Scratch()


def weights(info: DtypeInfo, num_bytes: int, seed: int = 0) -> bytes:
    """Values as weights have them, in any float dtype."""
    generator = torch.Generator().manual_seed(seed)
    assert info.torch_dtype is not None
    if info.torch_dtype.is_complex:
        real = {4: torch.float16, 8: torch.float32, 16: torch.float64}[info.itemsize]
        values = (torch.randn(num_bytes // real.itemsize, generator=generator) * 0.02).to(real)
    elif info.torch_dtype is torch.float8_e8m0fnu:
        values = torch.exp2(torch.randint(-3, 3, (num_bytes,), generator=generator).float()).to(info.torch_dtype)
    else:
        values = (torch.randn(num_bytes // info.itemsize, generator=generator) * 0.02).to(info.torch_dtype)
    return bytes(values.view(torch.uint8).numpy())


def stored(block: EncodedBlock) -> bytes:
    data = b"".join(block.parts)
    assert len(data) == block.stored_bytes
    return data


def decoded(codec: int, data: bytes, num_bytes: int, info: DtypeInfo) -> bytes:
    out = bytearray(b"\xa5" * num_bytes)
    decode_block(codec, memoryview(data), memoryview(out), info, SCRATCH)
    return bytes(out)


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes", "auto"])
@pytest.mark.parametrize("code", [1, 2, 9, *FLOATS, 254, 255])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_bytes_come_back(codec: str, code: int, data: st.DataObject) -> None:
    info = dtypes.of_code(code)
    num_elements = data.draw(st.integers(1, 300))
    pattern = data.draw(st.binary(min_size=1, max_size=num_elements * info.itemsize))
    raw = (pattern * (num_elements * info.itemsize))[: num_elements * info.itemsize]
    block = encode_block(memoryview(raw), info, codec, 1, SCRATCH)
    assert decoded(block.codec, stored(block), len(raw), info) == raw
    assert block.stored_bytes <= len(raw)
    assert (block.codec == RAW) == (block.stored_bytes == len(raw))


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("code", FLOATS)
def test_weights_shrink_and_come_back(code: int, level: int) -> None:
    info = dtypes.of_code(code)
    raw = weights(info, 1 << 20)
    block = encode_block(memoryview(raw), info, "auto", level, SCRATCH)
    assert block.codec == PLANES
    assert block.stored_bytes < 0.97 * len(raw)
    assert decoded(PLANES, stored(block), len(raw), info) == raw


def test_planes_reach_the_figures_of_the_design() -> None:
    sizes = {}
    for code in (17, 18):
        info = dtypes.of_code(code)
        raw = weights(info, 4 << 20)
        sizes[code] = encode_block(memoryview(raw), info, "auto", 1, SCRATCH).stored_bytes / len(raw)
    assert sizes[17] <= 0.67
    assert sizes[18] <= 0.84


def test_mantissas_that_compress_are_compressed() -> None:
    # float32 that holds bfloat16 values: the two low bytes are zero.
    raw = bytes(torch.randn(1 << 18).bfloat16().float().view(torch.uint8).numpy())
    block = encode_block(memoryview(raw), dtypes.of_code(18), "auto", 1, SCRATCH)
    assert block.stored_bytes < 0.4 * len(raw)
    assert decoded(block.codec, stored(block), len(raw), dtypes.of_code(18)) == raw


def test_integers_take_zstd() -> None:
    raw = bytes(np.arange(100_000, dtype=np.int64))
    block = encode_block(memoryview(raw), dtypes.of_code(9), "auto", 1, SCRATCH)
    assert block.codec == ZSTD
    assert zstandard.ZstdDecompressor().decompress(stored(block)) == raw


@pytest.mark.parametrize("code", [2, 17, 18])
@pytest.mark.parametrize("codec", ["zstd", "planes", "auto"])
def test_noise_is_stored_raw_without_a_copy(codec: str, code: int) -> None:
    raw = np.random.default_rng(0).bytes(4 << 20)
    block = encode_block(memoryview(raw), dtypes.of_code(code), codec, 1, SCRATCH)
    assert block.codec == RAW
    assert block.parts == (memoryview(raw),)
    assert block.parts[0].obj is raw


def test_a_block_that_shrinks_by_less_than_three_percent_is_stored_raw() -> None:
    noise = np.random.default_rng(0).bytes(100_000)
    for zeros, codec in ((2_000, RAW), (5_000, ZSTD)):
        raw = noise[: 100_000 - zeros] + bytes(zeros)
        assert encode_block(memoryview(raw), dtypes.OBJECT, "auto", 1, SCRATCH).codec == codec


def test_unknown_codecs_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="auto, raw, zstd, planes"):
        encode_block(memoryview(b"x"), dtypes.OBJECT, "lzma", 1, SCRATCH)
    with pytest.raises(MalformedCheckpointError):
        decode_block(3, memoryview(b"x"), memoryview(bytearray(1)), dtypes.OBJECT, SCRATCH)


def test_planes_payload_is_the_documented_one() -> None:
    # 0xBF80 is -1 in bfloat16: sign 1, exponent 0x7F, mantissa 0. The rotated pair is 0x7F01.
    raw = bytes.fromhex("80bf") * 1000
    block = encode_block(memoryview(raw), dtypes.of_code(17), "planes", 1, SCRATCH)
    data = stored(block)
    assert data[:4] == bytes([2, 0b11, 0, 0])
    low, high = int.from_bytes(data[4:8], "little"), int.from_bytes(data[8:12], "little")
    assert len(data) == 12 + low + high
    decompress = zstandard.ZstdDecompressor().decompress
    assert decompress(data[12 : 12 + low]) == b"\x01" * 1000
    assert decompress(data[12 + low :]) == b"\x7f" * 1000


def test_a_hand_made_planes_payload_is_decoded() -> None:
    # float32 1.0 and -2.0: 0x3F800000 -> rotated top half 0x7F00; 0xC0000000 -> 0x8001.
    plane = zstandard.ZstdCompressor().compress(b"\x7f\x80")
    payload = bytes([4, 0b1000, 0, 0])
    payload += b"".join(n.to_bytes(4, "little") for n in (2, 2, 2, len(plane))) + b"\0\0" + b"\0\0" + b"\x00\x01" + plane
    assert np.frombuffer(decoded(PLANES, payload, 8, dtypes.of_code(18)), dtype=np.float32).tolist() == [1.0, -2.0]


def frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


CONTENT = b"weights " * 64
# FHD 0xA0: single segment, 4-byte size.
HUGE = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + (1 << 40).to_bytes(8, "little") + b"\x01\0\0"
BAD_FRAMES = {
    "empty": b"",
    "no frame": CONTENT,
    "cut off": frame(CONTENT)[:-1],
    "trailing byte": frame(CONTENT) + b"\0",
    "trailing frame": frame(CONTENT) + frame(b"x"),
    "trailing empty frame": frame(CONTENT) + frame(b""),
    "trailing skippable frame": frame(CONTENT) + b"\x50\x2a\x4d\x18\0\0\0\0",
    "leading skippable frame": b"\x50\x2a\x4d\x18\0\0\0\0" + frame(CONTENT),
    "no declared size": frame(CONTENT, write_content_size=False),
    "larger": frame(CONTENT + b"x"),
    "smaller": frame(CONTENT[:-1]),
    "bomb": HUGE,
    "invalid block type": b"\x28\xb5\x2f\xfd\x60" + (len(CONTENT) - 256).to_bytes(2, "little") + b"\x07\0\0",
    "endless empty blocks": b"\x28\xb5\x2f\xfd\x60" + (len(CONTENT) - 256).to_bytes(2, "little") + bytes(3000),
    "less content than declared": b"\x28\xb5\x2f\xfd\x60" + (len(CONTENT) - 256).to_bytes(2, "little") + b"\x09\0\0x",
    "more content than declared": b"\x28\xb5\x2f\xfd\x60" + (len(CONTENT) - 256).to_bytes(2, "little") + b"\x03\x80\0x",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_zstd_accepts_exactly_one_frame_of_exactly_the_size(name: str) -> None:
    with pytest.raises(MalformedCheckpointError):
        decoded(ZSTD, BAD_FRAMES[name], len(CONTENT), dtypes.OBJECT)


def test_zstd_accepts_what_other_writers_produce() -> None:
    for level in (-5, 1, 9, 19):
        for num_bytes in (1, 255, 256, 257, 65_791, 65_792, 300_000):
            content = (CONTENT * 1000)[:num_bytes]
            data = zstandard.ZstdCompressor(level=level, write_checksum=level == 9).compress(content)
            assert decoded(ZSTD, data, num_bytes, dtypes.OBJECT) == content


def test_raw_blocks_of_another_length_are_malformed() -> None:
    for num_bytes in (3, 5):
        with pytest.raises(MalformedCheckpointError):
            decoded(RAW, b"four", num_bytes, dtypes.OBJECT)


def planes_payload() -> bytes:
    raw = weights(dtypes.of_code(17), 4096)
    return stored(encode_block(memoryview(raw), dtypes.of_code(17), "planes", 1, SCRATCH))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_planes_never_decode_into_another_length_or_crash(data: st.DataObject) -> None:
    payload = bytearray(planes_payload())
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, min(len(payload) - 1, 40)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 20))
    damaged = bytes(payload[: len(payload) - cut])
    with contextlib.suppress(MalformedCheckpointError):
        assert len(decoded(PLANES, damaged, 4096, dtypes.of_code(17))) == 4096


@pytest.mark.parametrize(
    ("num_bytes", "code"), [(4095, 17), (4094, 17), (4098, 17), (4096, 18), (4096, 9)], ids=["odd", "less", "more", "wider", "no planes"]
)
def test_planes_of_another_size_or_dtype_are_malformed(num_bytes: int, code: int) -> None:
    with pytest.raises(MalformedCheckpointError):
        decoded(PLANES, planes_payload(), num_bytes, dtypes.of_code(code))


def test_a_planes_block_with_no_compressed_plane_is_malformed() -> None:
    payload = bytes([2, 0, 0, 0]) + (2).to_bytes(4, "little") * 2 + b"abcd"
    with pytest.raises(MalformedCheckpointError):
        decoded(PLANES, payload, 4, dtypes.of_code(17))


def test_parts_of_one_scratch_do_not_depend_on_alignment() -> None:
    raw = b"x" + weights(dtypes.of_code(18), 65_536)
    block = encode_block(memoryview(raw)[1:], dtypes.of_code(18), "planes", 1, SCRATCH)
    out = bytearray(len(raw))
    decode_block(block.codec, memoryview(b"y" + stored(block))[1:], memoryview(out)[1:], dtypes.of_code(18), SCRATCH)
    assert out[1:] == raw[1:]
