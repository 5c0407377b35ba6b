"""The extension types of the object encoding for values of numpy and torch.

The wire form and the table of codes are specified in :mod:`dcp_engine.objects`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from dcp_engine.object_types import MAX_BLOB_BYTES, Blob, Extension, Refusal, check_parts, require

__all__ = ["ARRAYS", "BY_BASE"]

_SIMPLE_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,10}(\[[0-9]*[a-zA-Z]+\])?")
"""numpy's short names of dtypes that could be portable. Long doubles are sorted out by ``_NOT_PORTABLE``."""
_NOT_PORTABLE = "gG"

_TORCH_CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format) or type(value).__name__ == "qscheme"
}
"""``"torch.float32"`` -> the object, for every dtype, layout, memory format and quantisation scheme of the installed torch."""

_TENSOR_DTYPES = {
    name: cast(torch.dtype, _TORCH_CONSTANTS[f"torch.{name}"])
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if f"torch.{name}" in _TORCH_CONSTANTS
}
"""Dtypes of tensors inside objects. Quantised, packed and sub-byte ones mean nothing as plain bytes."""


# --- numpy


def _dtype_spec(dtype: np.dtype[Any]) -> object:
    """The dtype as plain values; :class:`Refusal` for one that numpy could not rebuild from them exactly."""
    if dtype.metadata is not None:
        raise Refusal(f"its numpy dtype {dtype} carries metadata")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_dtype_spec(base), list(shape)]
    if dtype.names is not None:
        fields = []
        for name in dtype.names:
            field = cast(Any, dtype.fields)[name]
            if len(field) > 2:
                raise Refusal(f"its numpy dtype {dtype} has titles")
            fields.append([name, field[1], _dtype_spec(field[0])])
        return [dtype.itemsize, dtype.isalignedstruct, fields]
    if _SIMPLE_DTYPE.fullmatch(dtype.str) is None or dtype.char in _NOT_PORTABLE or np.dtype(dtype.str) != dtype:
        raise Refusal(
            f"numpy dtype {dtype} has no portable bytes",
            "convert it to a numeric, bool, datetime64, timedelta64 or fixed-width string dtype",
        )
    return dtype.str


def _dtype_of(spec: object) -> np.dtype[Any]:
    if type(spec) is str:
        require(_SIMPLE_DTYPE.fullmatch(spec) is not None, "an unknown numpy dtype")
        dtype = np.dtype(spec)
        require(dtype.str == spec and dtype.char not in _NOT_PORTABLE, "an unknown numpy dtype")
        return dtype
    require(type(spec) is list, "a numpy dtype that is neither a name nor a structure")
    parts = cast(list[Any], spec)
    if len(parts) == 2:
        base, shape = check_parts(parts, (str, list), list)
        return np.dtype((_dtype_of(base), _shape(shape)))
    itemsize, aligned, fields = check_parts(parts, int, bool, list)
    rows = [check_parts(field, str, int, (str, list)) for field in fields]
    dtype = np.dtype(
        {
            "names": [row[0] for row in rows],
            "offsets": [row[1] for row in rows],
            "formats": [_dtype_of(row[2]) for row in rows],
            "itemsize": itemsize,
        },
        align=aligned,
    )
    require(dtype.itemsize == itemsize, "a structured numpy dtype of another size")
    return dtype


def _shape(parts: list[Any]) -> tuple[int, ...]:
    require(all(type(n) is int and 0 <= n < 2**63 for n in parts) and len(parts) <= 64, "a shape that is none")
    return tuple(parts)


def _raw(array: np.ndarray[Any, Any], order: str) -> memoryview:
    """The elements' bytes in C or Fortran order; a view where the array is contiguous."""
    if not array.nbytes:
        return memoryview(b"")
    flat = np.asarray(array, order=cast(Any, order)).reshape(-1, order=cast(Any, order))
    return flat.view(np.uint8).data


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BLOB_BYTES:
        raise Refusal(f"it has {num_bytes} bytes, more than the {MAX_BLOB_BYTES} that one value may have", "make it a tensor of the state")


def _explode_array(value: np.ndarray[Any, Any]) -> Sequence[object]:
    _check_size(value.nbytes)
    spec = _dtype_spec(value.dtype)
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return (spec, list(value.shape), order, Blob(_raw(value, order)))


def _build_array(parts: list[Any]) -> np.ndarray[Any, Any]:
    spec, dims, order, blob = check_parts(parts, (str, list), list, str, bytes)
    require(order in ("C", "F"), "an order of elements that is neither C nor F")
    dtype, shape = _dtype_of(spec), _shape(dims)
    # The size is proven by the bytes at hand before anything is allocated for it.
    require(math.prod(shape) * dtype.itemsize == len(blob), "an array whose shape and bytes disagree")
    # Not np.empty: it makes strings of one character of those of none, whose number no byte has proven.
    out: np.ndarray[Any, Any] = np.ndarray(shape, dtype, order=cast(Any, order))
    if blob:
        out.reshape(-1, order=order).view(np.uint8)[:] = np.frombuffer(blob, np.uint8)
    return out


def _explode_scalar(value: np.generic) -> Sequence[object]:
    # numpy strips trailing zeros from strings inside arrays and in its own __str__, so that these two go as themselves.
    if type(value) is np.bytes_:
        return ("S", bytes(value))
    if type(value) is np.str_:
        return ("U", str.__str__(value))
    array = np.array(value)
    return (_dtype_spec(array.dtype), array.tobytes())


def _build_scalar(parts: list[Any]) -> object:
    spec, payload = check_parts(parts, (str, list), (bytes, str))
    if spec == "S" and type(payload) is bytes:
        return np.bytes_(payload)
    if spec == "U" and type(payload) is str:
        return np.str_(payload)
    array = _build_array([spec, [], "C", payload])
    require(array.dtype.kind not in "SU" and array.dtype.subdtype is None, "a numpy string scalar in the form for numbers")
    return array[()]


def _build_numpy_dtype(parts: list[Any]) -> np.dtype[Any]:
    (spec,) = check_parts(parts, (str, list))
    return _dtype_of(spec)


# --- torch


def _explode_tensor(value: torch.Tensor) -> Sequence[object]:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta" or name not in _TENSOR_DTYPES:
        raise Refusal(f"it is a tensor of dtype {name}, layout {value.layout}, on {value.device}, which has no plain bytes")
    _check_size(value.numel() * value.element_size())
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    blob = plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
    return (name, list(value.shape), type(value) is torch.nn.Parameter, value.requires_grad, Blob(blob))


def _build_tensor(parts: list[Any]) -> torch.Tensor:
    name, dims, is_parameter, requires_grad, blob = check_parts(parts, str, list, bool, bool, bytes)
    require(name in _TENSOR_DTYPES, "an unknown tensor dtype")
    dtype, shape = _TENSOR_DTYPES[name], _shape(dims)
    require(math.prod(shape) * dtype.itemsize == len(blob), "a tensor whose shape and bytes disagree")
    if blob:
        # A bytearray is writable: torch would warn about a view of bytes, and an in-place operation on it would change them.
        tensor = torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _build_torch_constant(parts: list[Any]) -> object:
    (name,) = check_parts(parts, str)
    require(name in _TORCH_CONSTANTS, f"{name!r} is no dtype, layout, memory format or quantisation scheme of this torch")
    return _TORCH_CONSTANTS[name]


def _build_device(parts: list[Any]) -> torch.device:
    (name,) = check_parts(parts, str)
    device = torch.device(name)
    require(str(device) == name, "a device that is not in its shortest form")
    return device


def _explode_size(value: torch.Size) -> Sequence[object]:
    if any(type(n) is not int for n in value):
        raise Refusal("it is a symbolic torch.Size")
    return tuple(value)


def _build_size(parts: list[Any]) -> torch.Size:
    require(all(type(n) is int and -(2**63) <= n < 2**63 for n in parts), "a torch.Size of something else than integers")
    return torch.Size(parts)


_ARRAY = Extension(30, _explode_array, _build_array)
_SCALAR = Extension(31, _explode_scalar, _build_scalar)
_NUMPY_DTYPE = Extension(32, lambda v: (_dtype_spec(v),), _build_numpy_dtype)
_CONSTANT = Extension(33, lambda v: (str(v),), _build_torch_constant)
_DEVICE = Extension(34, lambda v: (str(v),), _build_device)
_SIZE = Extension(35, _explode_size, _build_size)
_TENSOR = Extension(36, _explode_tensor, _build_tensor)

ARRAYS: dict[type, Extension] = {
    np.ndarray: _ARRAY,
    **{np.dtype(char).type: _SCALAR for char in "?bhilqpBHILQPefdFDgGSUVMm"},
    **{type(value): _CONSTANT for value in _TORCH_CONSTANTS.values()},
    torch.device: _DEVICE,
    torch.Size: _SIZE,
    torch.Tensor: _TENSOR,
    torch.nn.Parameter: _TENSOR,
}
"""Exact type -> row, for values of numpy and torch."""

BY_BASE: dict[type, Extension] = {np.dtype: _NUMPY_DTYPE}
"""Base class -> row, where numpy gives every value a class of its own."""
