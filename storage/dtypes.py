"""The table of element types that the format knows, and how numpy carries their bits.

The codes are append-only: a code once given keeps its meaning in every later version of the format (``docs/format.md`` lists them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dcp_engine.errors import MalformedCheckpointError, UnsupportedTensorError

__all__ = ["OBJECT", "OPAQUE", "DtypeInfo", "carrier", "carrier_dtype", "of_code", "of_tensor_dtype"]


@dataclass(frozen=True, slots=True)
class DtypeInfo:
    """One row of the table.

    Attributes:
        code: number in the format, 1 to 255.
        name: name in messages and listings.
        torch_dtype: ``None`` for the two kinds of objects.
        itemsize: bytes of one element.
        plane_itemsize: bytes of one float that the planes codec splits (for complex: of one part); 0 where planes do not apply.
    """

    code: int
    name: str
    torch_dtype: torch.dtype | None
    itemsize: int
    plane_itemsize: int = 0

    @property
    def is_object(self) -> bool:
        """Whether the entry is bytes of an object rather than a tensor."""
        return self.torch_dtype is None


OBJECT = DtypeInfo(254, "object", None, 1)
"""Bytes in the encoding of :mod:`dcp_engine.objects`."""
OPAQUE = DtypeInfo(255, "opaque", None, 1)
"""Bytes of a kind that the engine does not know and never interprets."""

# float8 is a single plane, whose sign stays where it is: a permutation of byte values changes nothing for the entropy coder.
_TABLE = (
    DtypeInfo(1, "bool", torch.bool, 1),
    DtypeInfo(2, "uint8", torch.uint8, 1),
    DtypeInfo(3, "int8", torch.int8, 1),
    DtypeInfo(4, "uint16", torch.uint16, 2),
    DtypeInfo(5, "int16", torch.int16, 2),
    DtypeInfo(6, "uint32", torch.uint32, 4),
    DtypeInfo(7, "int32", torch.int32, 4),
    DtypeInfo(8, "uint64", torch.uint64, 8),
    DtypeInfo(9, "int64", torch.int64, 8),
    DtypeInfo(16, "float16", torch.float16, 2, 2),
    DtypeInfo(17, "bfloat16", torch.bfloat16, 2, 2),
    DtypeInfo(18, "float32", torch.float32, 4, 4),
    DtypeInfo(19, "float64", torch.float64, 8, 8),
    DtypeInfo(24, "float8_e4m3fn", torch.float8_e4m3fn, 1, 1),
    DtypeInfo(25, "float8_e5m2", torch.float8_e5m2, 1, 1),
    DtypeInfo(26, "float8_e4m3fnuz", torch.float8_e4m3fnuz, 1, 1),
    DtypeInfo(27, "float8_e5m2fnuz", torch.float8_e5m2fnuz, 1, 1),
    DtypeInfo(28, "float8_e8m0fnu", torch.float8_e8m0fnu, 1, 1),
    DtypeInfo(32, "complex32", torch.complex32, 4, 2),
    DtypeInfo(33, "complex64", torch.complex64, 8, 4),
    DtypeInfo(34, "complex128", torch.complex128, 16, 8),
    OBJECT,
    OPAQUE,
)
_BY_CODE = {info.code: info for info in _TABLE}
_BY_DTYPE = {info.torch_dtype: info for info in _TABLE if info.torch_dtype is not None}

# Copies between arrays of one integer type move bits. 16 bytes have no integer type: a complex number's halves are moved as they are.
_CARRIERS: dict[int, tuple[torch.dtype, np.dtype[np.generic]]] = {
    1: (torch.uint8, np.dtype(np.uint8)),
    2: (torch.int16, np.dtype(np.int16)),
    4: (torch.int32, np.dtype(np.int32)),
    8: (torch.int64, np.dtype(np.int64)),
    16: (torch.complex128, np.dtype(np.complex128)),
}

# 0 where the code is unknown. Lets whole columns be checked at once.
ITEMSIZE_OF_CODE = np.zeros(256, dtype=np.int64)
for _info in _TABLE:
    ITEMSIZE_OF_CODE[_info.code] = _info.itemsize
ITEMSIZE_OF_CODE.flags.writeable = False


def of_tensor_dtype(dtype: torch.dtype, *, tensor: str | None = None) -> DtypeInfo:
    """The row of a tensor's dtype.

    Args:
        dtype: any dtype of torch.
        tensor: key, for the message.

    Raises:
        UnsupportedTensorError: the format has no code for it (quantised, sub-byte, packed and future dtypes).
    """
    info = _BY_DTYPE.get(dtype)
    if info is None:
        raise UnsupportedTensorError(
            f"dtype {dtype} cannot be stored",
            tensor=tensor,
            expected="one of " + ", ".join(row.name for row in _TABLE if not row.is_object),
            found=str(dtype),
            remedy="save its integer representation (for example tensor.view(torch.uint8)) together with what is needed to rebuild it",
        )
    return info


def of_code(code: int) -> DtypeInfo:
    """The row of a code read from a checkpoint.

    Raises:
        MalformedCheckpointError: no such code in this version of the format.
    """
    info = _BY_CODE.get(code)
    if info is None:
        raise MalformedCheckpointError("unknown dtype code", expected="a code of format version 1", found=code)
    return info


def carrier_dtype(info: DtypeInfo) -> np.dtype[np.generic]:
    """The numpy dtype that carries the bits of an element: an integer type of the same size, complex128 for 16 bytes."""
    return _CARRIERS[info.itemsize][1]


def carrier(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """A numpy view of a CPU tensor's memory: same shape, same strides, in a dtype whose assignment copies bits exactly.

    Args:
        tensor: strided CPU tensor of a dtype of the table, any strides. Its conjugate and negative bits must be resolved
            (``resolve_conj().resolve_neg()``): a view cannot do that, and the memory alone would be another value.

    Raises:
        UnsupportedTensorError: not a strided CPU tensor, conjugate or negative bit set, or no code for its dtype.
    """
    info = of_tensor_dtype(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedTensorError(
            "only a plain strided CPU tensor has memory that can be viewed",
            expected="strided layout on cpu, no conjugate or negative bit",
            found=f"{tensor.layout} on {tensor.device}, conjugate {tensor.is_conj()}, negative {tensor.is_neg()}",
        )
    view: npt.NDArray[np.generic] = tensor.detach().view(_CARRIERS[info.itemsize][0]).numpy()
    return view
