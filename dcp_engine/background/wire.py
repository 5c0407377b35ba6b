"""How a save crosses to the process that runs it: staged tensors as places in buffers that it has mapped, each buffer once."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcp_engine.background.cut import Cut
from dcp_engine.staging import SharedBuffer, StagingProof

__all__ = ["Head", "Request", "mapped_buffers", "packed", "unpacked"]

_MAPPED: dict[int, torch.Tensor] = {}
"""In the process that saves: number of a buffer -> the buffer. While it stays here it stays mapped, and no save faults its pages anew."""


@dataclass(frozen=True, slots=True)
class Head:
    """Comes before a request, which refers to these buffers.

    Attributes:
        live: numbers of the buffers that there are; others are given up.
        new: those of them that the process does not have yet.
    """

    live: frozenset[int]
    new: dict[int, torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class Request:
    """Save this. ``planner`` None: the one of the request before. ``proof`` None: nothing to be proved."""

    state: dict[str, Any]
    writer: StorageWriter
    planner: SavePlanner | None
    proof: StagingProof | None
    cut: Cut


class _Pickler(ForkingPickler):
    """torch would move the memory of each tensor that it sends into shared memory, while others use it (a device mesh's ranks, say, which
    ended in a crash), send each by a descriptor of its own, and lose the attributes that make it a shard.
    """

    def __init__(self, file: io.BytesIO, buffers: Sequence[SharedBuffer]) -> None:
        super().__init__(file)
        self._runs = [(buffer.memory.data_ptr(), buffer.memory.numel(), buffer.number) for buffer in buffers]

    def reducer_override(self, value: object) -> Any:
        if type(value) is torch.nn.Parameter and value.is_cpu:
            return torch.nn.Parameter, (value.detach(), value.requires_grad)
        if type(value) is not torch.Tensor or not value.is_cpu or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        if not value.numel():
            return _of_bytes, (b"", tuple(value.shape), value.dtype, vars(value))
        address = value.data_ptr()
        for start, num_bytes, number in self._runs:
            if start <= address < start + num_bytes:
                return _view, (number, address - start, tuple(value.shape), value.stride(), value.dtype, vars(value))
        # Not in a buffer, for it is no tensor of the state's own: one inside of an object, which is likely small.
        plain = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return _of_bytes, (plain.numpy().tobytes(), tuple(value.shape), value.dtype, vars(value))


def _of_bytes(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, attributes: dict[str, Any]) -> torch.Tensor:
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    return _with(tensor, attributes)


def _view(
    number: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, attributes: dict[str, Any]
) -> torch.Tensor:
    memory = _MAPPED[number]
    whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return _with(whole.as_strided(shape, stride, offset // dtype.itemsize), attributes)


def _with(tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def packed(value: object, buffers: Sequence[SharedBuffer] = ()) -> bytes:
    """As it travels.

    Args:
        value: anything that can be pickled.
        buffers: tensors in them travel as places.

    Raises:
        Exception: whatever a class in it raises.
    """
    file = io.BytesIO()
    _Pickler(file, buffers).dump(value)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """The value again, in the process that saves. A :class:`Head` maps its buffers and gives up those that are gone.

    Raises:
        Exception: whatever a class in it, or its absence, raises.
    """
    value = ForkingPickler.loads(data)
    if isinstance(value, Head):
        for number in [*_MAPPED]:
            if number not in value.live:
                del _MAPPED[number]
        for number, storage in value.new.items():
            _MAPPED[number] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return value


def mapped_buffers() -> dict[int, torch.Tensor]:
    """Number of a buffer -> the buffer, in the process that saves."""
    return _MAPPED
