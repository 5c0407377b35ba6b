from __future__ import annotations

import numpy as np
import pytest
import torch

from dcp_engine.errors import MalformedCheckpointError, UnsupportedTensorError
from dcp_engine.storage import dtypes

# The format's table, written down by hand: a code must never change its meaning.
CODES = {
    torch.bool: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.uint16: 4,
    torch.int16: 5,
    torch.uint32: 6,
    torch.int32: 7,
    torch.uint64: 8,
    torch.int64: 9,
    torch.float16: 16,
    torch.bfloat16: 17,
    torch.float32: 18,
    torch.float64: 19,
    torch.float8_e4m3fn: 24,
    torch.float8_e5m2: 25,
    torch.float8_e4m3fnuz: 26,
    torch.float8_e5m2fnuz: 27,
    torch.float8_e8m0fnu: 28,
    torch.complex32: 32,
    torch.complex64: 33,
    torch.complex128: 34,
}
ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize(("dtype", "code"), CODES.items(), ids=str)
def test_codes_keep_their_meaning(dtype: torch.dtype, code: int) -> None:
    info = dtypes.of_code(code)
    assert info.torch_dtype is dtype
    assert dtypes.of_tensor_dtype(dtype) is info
    assert info.itemsize == dtype.itemsize
    assert not info.is_object


def test_object_codes_keep_their_meaning() -> None:
    assert dtypes.of_code(254) is dtypes.OBJECT
    assert dtypes.of_code(255) is dtypes.OPAQUE
    assert dtypes.OBJECT.is_object
    assert dtypes.OPAQUE.itemsize == 1


@pytest.mark.parametrize("dtype", [dtype for dtype in ALL if dtype not in CODES], ids=str)
def test_every_other_dtype_of_torch_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedTensorError) as caught:
        dtypes.of_tensor_dtype(dtype, tensor="layer.weight")
    assert str(dtype) in str(caught.value)
    assert caught.value.tensor == "layer.weight"


@pytest.mark.parametrize("code", [0, 10, 23, 35, 128, 253])
def test_unknown_codes_are_malformed(code: int) -> None:
    with pytest.raises(MalformedCheckpointError):
        dtypes.of_code(code)


@pytest.mark.parametrize("dtype", list(CODES), ids=str)
def test_carrier_is_a_view_that_moves_bits(dtype: torch.dtype) -> None:
    pattern = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) * 37 + 129
    if dtype is torch.bool:
        pattern = pattern & 1
    tensor = pattern.view(dtype).view(2, 3)
    view = dtypes.carrier(tensor)
    assert view.shape == (2, 3)
    assert view.dtype == dtypes.carrier_dtype(dtypes.of_tensor_dtype(dtype))
    assert view.ctypes.data == tensor.data_ptr()
    copied = np.empty((3, 2), dtype=view.dtype).T
    copied[...] = view
    assert np.ascontiguousarray(copied).tobytes() == bytes(pattern.numpy())


@pytest.mark.parametrize("dtype", list(CODES), ids=str)
def test_carrier_keeps_shape_and_strides(dtype: torch.dtype) -> None:
    base = torch.zeros(4 * 6 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(4, 6)
    for tensor in (base.T, base[1:, ::2], base[:0], base[0, 0], base.expand(2, 4, 6)):
        view = dtypes.carrier(tensor)
        assert view.shape == tuple(tensor.shape)
        if tensor.numel() > 1:
            assert view.strides == tuple(stride * dtype.itemsize for stride in tensor.stride())


def test_carrier_takes_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    dtypes.carrier(parameter)[...] = 0
    assert parameter.detach().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.empty(2, device="meta"),
        torch.ones(2).to_sparse(),
    ],
    ids=["conjugate", "negative", "meta", "sparse"],
)
def test_memory_that_is_not_the_value_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedTensorError):
        dtypes.carrier(tensor)
