"""Tensors whose values tell where they belong: each element is a function of its key and its global index, in every dtype.

A value that lands at another index, under another key or with a bit changed shows, and the right value of any box of a tensor is known
without the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DTYPES", "assert_same", "box", "full", "same"]

DTYPES: tuple[torch.dtype, ...] = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""Every dtype that a checkpoint holds."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def full(key: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole tensor of ``key``: a contiguous CPU tensor of ``shape``."""
    return box(key, shape, [0] * len(shape), shape, dtype)


def box(key: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``full(key, shape, dtype)[offsets : offsets + sizes]``, computed for these elements alone.

    Floats are finite and no NaN, so that ``torch.equal`` compares them; integers take every bit; bool both values.
    """
    if 0 in sizes:
        return torch.empty(tuple(sizes), dtype=dtype)
    index: npt.NDArray[np.uint64] = np.zeros((), np.uint64)
    for size, offset, length in zip(shape, offsets, sizes, strict=True):
        index = index[..., np.newaxis] * np.uint64(size) + np.arange(offset, offset + length, dtype=np.uint64)
    seed = np.frombuffer(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), np.uint64)[0]
    index = index.reshape(-1)  # numpy's scalars, unlike its arrays, warn when they wrap around
    if dtype.is_complex:
        index = (index[:, np.newaxis] * np.uint64(2) + np.arange(2, dtype=np.uint64)).reshape(-1)
        return _from_bits(_mixed(index ^ seed), dtype.to_real()).view(dtype).reshape(tuple(sizes))
    return _from_bits(_mixed(index ^ seed), dtype).reshape(tuple(sizes))


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (of the elements, whatever the strides)."""
    return actual.dtype == expected.dtype and actual.shape == expected.shape and bool(torch.equal(_bytes(actual), _bytes(expected)))


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Fails with the first index that differs."""
    assert actual.dtype == expected.dtype, f"{name}: dtype is {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape is {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    differs = (_bytes(actual) != _bytes(expected)).any(dim=-1)
    if differs.any():
        flat = int(differs.nonzero()[0])
        index = tuple(int(i) for i in np.unravel_index(flat, expected.shape)) if expected.dim() else ()
        found, wanted = actual.flatten()[flat].item(), expected.flatten()[flat].item()
        raise AssertionError(
            f"{name}: {int(differs.sum())} of {differs.numel()} elements differ, first at {index}: {found}, expected {wanted}"
        )


def _mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit integers whose every output bit depends on every input bit (the finaliser of SplitMix64)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _from_bits(mixed: npt.NDArray[np.uint64], dtype: torch.dtype) -> torch.Tensor:
    width = 8 * dtype.itemsize
    bits = (mixed >> np.uint64(64 - width)).astype(_UNSIGNED[dtype.itemsize])
    one = bits.dtype.type(1)
    if dtype == torch.bool:
        bits &= one
    elif dtype.is_floating_point:
        # Without the top exponent bit (the top bit of all where there is no sign) no value is an infinity, nor a NaN of IEEE's kind.
        bits &= ~(one << bits.dtype.type(width - 1 if dtype == torch.float8_e8m0fnu else width - 2))
        if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            bits[bits == 0x80] = 0x81  # their only NaN
    return torch.from_numpy(bits).view(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """One row of bytes an element."""
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    plain = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)  # contiguous() keeps odd strides of a single element
    return plain.view(torch.uint8).reshape(flat.numel(), tensor.dtype.itemsize)
