"""Whether boxes tile a tensor exactly: no hole, no overlap, nothing outside. Pure, and linear in the number of boxes.

A box is the product over its dimensions of intervals [a, b). Give every coordinate x of dimension d a random number F_d(x); the boxes
tile the whole exactly if and only if

    sum over boxes of  prod over d of (F_d(b_d) - F_d(a_d))   =   prod over d of (F_d(extent_d) - F_d(0))

holds as an identity of polynomials in the F_d(x): the corners of the boxes, signed, cancel but for those of the whole. The identity is
tested at one random point modulo the prime 2**31 - 1. A true tiling always passes; anything else passes with a probability of at most
num_dims / 2**31 (Schwartz-Zippel) each round, with numbers that are drawn afresh and cannot be known to whoever wrote the boxes.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["tiled"]

_PRIME: Final = np.uint64((1 << 31) - 1)
_ROUNDS: Final = 2

_I64 = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]


def tiled(shapes: _I64, owners: npt.NDArray[Any], offsets: _I64, sizes: _I64) -> npt.NDArray[np.bool_]:
    """For each shape, whether the boxes that it owns tile it exactly.

    Args:
        shapes: ``[num_shapes, num_dims]`` extents, in elements, each from 0 to 2**62.
        owners: ``[num_boxes]`` index of the shape that a box belongs to.
        offsets: ``[num_boxes, num_dims]``, in elements; any value.
        sizes: ``[num_boxes, num_dims]``, in elements; any value. A box with a size below 1 makes its shape not tiled.

    Returns:
        ``[num_shapes]``. A shape with an extent of zero is tiled by no box at all.
    """
    num_shapes, num_dims = shapes.shape
    result: npt.NDArray[np.bool_] = np.ones(num_shapes, dtype=np.bool_)
    extents = shapes[owners]
    # Not offsets + sizes > extents: hostile values would overflow.
    inside = ((offsets >= 0) & (sizes >= 1) & (sizes <= extents) & (offsets <= extents - sizes)).all(axis=1)
    result[owners[~inside]] = False

    counts = np.bincount(owners, minlength=num_shapes)
    hollow = (shapes == 0).any(axis=1)
    result &= (counts > 0) != hollow
    # One box that fills its shape is by far the most frequent case, and needs no arithmetic. (An uneven single box has a hole.)
    whole = (sizes == extents).all(axis=1)
    single = counts == 1
    result[owners[single[owners] & ~whole]] = False
    shared = result & ~single & ~hollow
    keep = shared[owners]
    if keep.any():
        boxes = owners[keep]
        for _ in range(_ROUNDS):
            result[shared] &= _identity_holds(shapes, boxes, offsets[keep], sizes[keep], num_dims)[shared]
    return result


def _identity_holds(shapes: _I64, owners: npt.NDArray[Any], offsets: _I64, sizes: _I64, num_dims: int) -> npt.NDArray[np.bool_]:
    products = np.ones(len(owners), dtype=np.uint64)
    whole = np.ones(len(shapes), dtype=np.uint64)
    for dim in range(num_dims):
        seed = (secrets.randbits(64), secrets.randbits(64))
        begin = offsets[:, dim]
        products = products * _difference(_number(begin, seed), _number(begin + sizes[:, dim], seed)) % _PRIME
        zero = np.zeros(len(shapes), dtype=np.int64)
        whole = whole * _difference(_number(zero, seed), _number(shapes[:, dim], seed)) % _PRIME
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    # Sums of fewer than 2**32 numbers below 2**31 fit.
    sums = np.zeros(len(shapes), dtype=np.uint64)
    sums[ordered[starts]] = np.add.reduceat(products[order], starts) % _PRIME
    equal: npt.NDArray[np.bool_] = sums == whole
    return equal


def _difference(start: _U64, stop: _U64) -> _U64:
    return (stop + _PRIME - start) % _PRIME


def _number(coordinates: _I64, seed: tuple[int, int]) -> _U64:
    """F_d: the finaliser of splitmix64 over the keyed coordinate, twice, modulo the prime."""
    mixed = coordinates.view(np.uint64) if coordinates.flags.c_contiguous else np.ascontiguousarray(coordinates).view(np.uint64)
    for key in seed:
        mixed = mixed + np.uint64(key)
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed % _PRIME
