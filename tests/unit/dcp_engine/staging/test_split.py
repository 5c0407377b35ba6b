"""Planes made by torch are the codec's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcp_engine.staging.split import split_blocks
from dcp_engine.storage.codecs import byte_planes
from dcp_engine.storage.codecs.scratch import Scratch
from dcp_engine.storage.dtypes import of_tensor_dtype
from dcp_engine.storage.limits import BLOCK_BYTES

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))]


def split_by_codec(raw: np.ndarray[tuple[int], np.dtype[np.uint8]], itemsize: int) -> bytes:
    scratch = Scratch()
    blocks = [raw[begin : begin + BLOCK_BYTES].reshape(-1, itemsize) for begin in range(0, len(raw), BLOCK_BYTES)]
    return b"".join(byte_planes._split(block, scratch, "planes").tobytes() for block in blocks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_bytes", [0, 16, 65_520, BLOCK_BYTES, BLOCK_BYTES + 16, 2 * BLOCK_BYTES + 48])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_blocks_are_split_as_the_codec_splits_them(dtype: torch.dtype, num_bytes: int, device: str) -> None:
    itemsize = of_tensor_dtype(dtype).plane_itemsize
    raw = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    found = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    split_blocks(torch.from_numpy(raw.copy()).to(device), itemsize, BLOCK_BYTES, found)
    assert found.cpu().numpy().tobytes() == split_by_codec(raw, itemsize)


def test_a_float_is_rotated_and_taken_apart() -> None:
    raw = torch.tensor([-1.5, 3.0]).view(torch.uint8)  # 0xBFC00000, 0x40400000
    found = torch.zeros_like(raw)
    split_blocks(raw, 4, 8, found)
    # Top halves 0xBFC0 and 0x4040, rotated left by one: 0x7F81 and 0x8080.
    assert found.tolist() == [0x00, 0x00, 0x00, 0x00, 0x81, 0x80, 0x7F, 0x80]
