"""States to save: tensors of mixed sizes cut from trained values, empty copies to load into, and comparison bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import MismatchError
from benchmarks.options import Options
from benchmarks.training import FULL, KINDS, QUICK, trained_values

__all__ = ["State", "Values", "check_same", "large_tensor", "mixed_state", "scramble", "tiny_state", "weights_state"]

_SIZES_BYTES = (16 << 20, 64 << 10, 4 << 20, 256 << 10, 1 << 20, 64 << 10, 8 << 20, 512 << 10, 2 << 20, 128 << 10)
_ROW = 1024
_SCRAMBLED = 0xA5


@dataclass(frozen=True, slots=True)
class State:
    """One state in the two forms that engines want.

    Attributes:
        nested: as a training loop hands it to DCP.
        flat: key -> tensor, the same memory under the names that DCP's flattening gives.
    """

    nested: dict[str, Any]
    flat: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.flat.values())

    def empty_like(self) -> State:
        """Tensors of the same shapes and names, with memory of their own, every page touched."""
        return _state({name: torch.full_like(tensor, 0) for name, tensor in self.flat.items()})


class Values:
    """An endless supply of trained values of one kind: what training gave, over and over, consecutive in each piece.

    Repetition helps no engine: each compresses tensors, or blocks of them, on their own, and pieces begin at another place every time.
    """

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values = values
        self._next = 0

    def take(self, num: int) -> torch.Tensor:
        """The next ``num`` values, as a tensor with memory of its own."""
        out = np.empty(num, dtype=np.float32)
        done = 0
        while done < num:
            piece = self._values[self._next : self._next + num - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            self._next = (self._next + len(piece)) % len(self._values)
        return torch.from_numpy(out)


def mixed_state(options: Options) -> State:
    """fp32 parameters of 64 KB to 16 MB and both moments of Adam for each: ``options.state_bytes`` in all, up to one parameter."""
    supply = _supply(options)
    flat: dict[str, torch.Tensor] = {}
    for number, rows in enumerate(_rows_of_parameters(options, options.state_bytes // 3, itemsize=4)):
        for kind in KINDS:
            flat[_name(number, kind)] = supply[kind].take(rows * _ROW).view(rows, _ROW)
    return _state(flat)


def weights_state(options: Options) -> State:
    """bf16 weights of the same sizes: the trained fp32 ones, rounded as a training job rounds them."""
    supply = _supply(options)["params"]
    rows = _rows_of_parameters(options, options.state_bytes // 3, itemsize=2)
    return _state({_name(n, "params"): supply.take(r * _ROW).to(torch.bfloat16).view(r, _ROW) for n, r in enumerate(rows)})


def large_tensor(options: Options, nbytes: int) -> torch.Tensor:
    """One fp32 tensor of trained weights, ``[nbytes / 4096, 1024]``."""
    rows = nbytes // 4 // _ROW
    return _supply(options)["params"].take(rows * _ROW).view(rows, _ROW)


def tiny_state(options: Options, num_tensors: int) -> State:
    """Scalars and vectors of 1 to 64 trained values: one in four is a scalar. Each has memory of its own."""
    supply = _supply(options)["params"]
    lengths = itertools.cycle((0, 1, 16, 64, 0, 8, 32, 3))
    flat = {}
    for number, length in zip(range(num_tensors), lengths, strict=False):
        values = supply.take(max(1, length)).clone()
        flat[_name(number, "params")] = values if length else values.reshape(())
    return _state(flat)


def scramble(state: State) -> None:
    """Fills every tensor with a pattern, so that a load that wrote nothing is seen; it also warms the memory."""
    for tensor in state.flat.values():
        _bits(tensor).fill_(_SCRAMBLED)


def check_same(found: State, expected: State) -> None:
    """Compare bit by bit.

    Raises:
        MismatchError: naming the first tensor that differs.
    """
    for name, tensor in expected.flat.items():
        other = found.flat[name]
        if other.dtype != tensor.dtype or other.shape != tensor.shape or not torch.equal(_bits(other), _bits(tensor)):
            raise MismatchError(f"{name} is not what was saved")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _supply(options: Options) -> dict[str, Values]:
    return {kind: Values(values) for kind, values in trained_values(QUICK if options.quick else FULL).items()}


def _rows_of_parameters(options: Options, nbytes: int, *, itemsize: int) -> Iterator[int]:
    """Rows of one parameter after the other; sizes are as bytes of the item size, capped where the whole is small."""
    taken = 0
    for size in itertools.cycle(_SIZES_BYTES):
        rows = max(1, min(size, max(_SIZES_BYTES[1], nbytes // 4)) // (itemsize * _ROW))
        if taken and taken + rows * itemsize * _ROW > nbytes:
            return
        taken += rows * itemsize * _ROW
        yield rows


def _name(number: int, kind: str) -> str:
    return f"model.layers.{number}.weight" if kind == "params" else f"optimizer.state.layers.{number}.weight.{kind}"


def _state(flat: dict[str, torch.Tensor]) -> State:
    """Nests by hand what :func:`_name` joined, so that parameter names keep their dots as in a real state dict."""
    model: dict[str, Any] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in flat.items():
        if name.startswith("model."):
            model[name.removeprefix("model.")] = tensor
        else:
            parameter, _, kind = name.removeprefix("optimizer.state.").rpartition(".")
            moments.setdefault(parameter, {})[kind] = tensor
    return State({"model": model, **({"optimizer": {"state": moments}} if moments else {})}, flat)
