"""Checks of what a caller passes: whole numbers within bounds, and which rank of how many this is."""

from __future__ import annotations

import operator
from collections.abc import Sized

import torch.distributed as dist

from dcp_engine.data.order import MAX_SAMPLES
from dcp_engine.errors import InvalidOptionError

__all__ = ["flag", "num_samples_of", "place_of", "whole"]


def whole(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """``value`` as an int (numpy's integers are taken, bool and floats are not).

    Raises:
        InvalidOptionError: it is no whole number, or out of bounds; names what is valid.
    """
    valid = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidOptionError(f"{name} is no whole number", expected=valid, found=repr(value)) from None
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        raise InvalidOptionError(f"{name} is out of range", expected=valid, found=repr(value))
    return number


def flag(name: str, value: object) -> bool:
    """``value``, which must be a bool: a number or a text here is an argument in the wrong place."""
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} is no bool", expected="True or False", found=repr(value))
    return value


def num_samples_of(dataset: Sized | int) -> int:
    """Number of samples of a map-style data set, or the number itself.

    Raises:
        InvalidOptionError: it has no length, or none that is valid.
    """
    if isinstance(dataset, int) or not isinstance(dataset, Sized):
        if not hasattr(dataset, "__index__"):
            raise InvalidOptionError(
                "the data set has no length",
                expected="a data set with len(), or its number of samples",
                found=type(dataset).__qualname__,
                remedy="a stream without a length is read with ResumableStream",
            )
        return whole("the number of samples", dataset, least=1, most=MAX_SAMPLES)
    return whole("the length of the data set", len(dataset), least=1, most=MAX_SAMPLES)


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: those given, else those of the default process group, else a single rank.

    Raises:
        InvalidOptionError: one is given without the other, or the rank is not below the world size.
    """
    if (rank is None) != (world_size is None):
        raise InvalidOptionError("rank and world_size go together", expected="both or neither", found=f"{rank=}, {world_size=}")
    if rank is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1
    world_size = whole("world_size", world_size, least=1)
    return whole("rank", rank, least=0, most=world_size - 1), world_size
