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
    if (owners[1:] < owners[:-1]).any():
        order = np.argsort(owners, kind="stable")
        owners, offsets, sizes = owners[order], offsets[order], sizes[order]
    extents = np.take(shapes, owners, axis=0)
    inside = np.ones(len(owners), dtype=np.bool_)
    for dim in range(num_dims):
        offset, size, extent = offsets[:, dim], sizes[:, dim], extents[:, dim]
        # Not offset + size > extent: hostile values would overflow.
        inside &= (offset >= 0) & (size >= 1) & (size <= extent) & (offset <= extent - size)
    result: npt.NDArray[np.bool_] = np.ones(num_shapes, dtype=np.bool_)
    result[owners[~inside]] = False
    hollow = (shapes == 0).any(axis=1)
    result &= (np.bincount(owners, minlength=num_shapes) > 0) != hollow
    unsure = result & ~hollow
    if not unsure.all():
        keep = unsure[owners]
        owners, offsets, sizes, extents = owners[keep], offsets[keep], sizes[keep], extents[keep]
    unsure &= ~_in_rows(num_shapes, owners, offsets, sizes, extents)
    keep = unsure[owners]
    if keep.any():
        boxes = owners[keep]
        for _ in range(_ROUNDS):
            result[unsure] &= _identity_holds(shapes, boxes, offsets[keep], sizes[keep], num_dims)[unsure]
    return result


def _in_rows(num_shapes: int, owners: npt.NDArray[Any], offsets: _I64, sizes: _I64, extents: _I64) -> npt.NDArray[np.bool_]:
    """For each shape, whether its boxes follow each other from end to end in one dimension and fill it in all others. These tile it; it is
    how nearly all tensors are cut, one that is not cut at all among them, and needs a few comparisons.

    Args:
        num_shapes: number of shapes.
        owners: shape of each box, ascending.
        offsets, sizes: ``[num_boxes, num_dims]``; each box lies within its shape and has an element.
        extents: ``[num_boxes, num_dims]`` of the shape.
    """
    num_boxes, num_dims = offsets.shape
    num_cut, which, length, limit = (np.zeros(num_boxes, dtype=np.int64) for _ in range(4))
    begin = offsets.sum(axis=1)  # where it is cut: 0 elsewhere
    for dim in range(num_dims):
        cut = sizes[:, dim] != extents[:, dim]
        num_cut += cut
        which += dim * cut
        length += sizes[:, dim] * cut
        limit += extents[:, dim] * cut
    again = owners[1:] == owners[:-1]
    if (begin[1:] < begin[:-1])[again].any():
        order = np.lexsort((begin, owners))  # keeps owners where they are
        begin, num_cut, which, length, limit = begin[order], num_cut[order], which[order], length[order], limit[order]
    end = begin + length
    good = num_cut <= 1
    # A box that is not cut has no neighbour. One that is begins at 0 or where the one before it ends.
    good[1:] &= ~again | ((num_cut[1:] == 1) & (num_cut[:-1] == 1) & (which[1:] == which[:-1]) & (begin[1:] == end[:-1]))
    good &= np.append(False, again) | (begin == 0)
    good &= np.append(again, False) | (end == limit)
    result: npt.NDArray[np.bool_] = np.bincount(owners[good], minlength=num_shapes) == np.bincount(owners, minlength=num_shapes)
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
