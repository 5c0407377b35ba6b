"""Where each tensor of a state goes in one flat buffer: pure, from addresses and shapes.

Tensors that share memory (ties, views) share a slot, so that one storage is copied once and what was tied stays tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = [
    "ALIGNMENT_BYTES",
    "PAGE_BYTES",
    "SMALL_BYTES",
    "Extent",
    "Slot",
    "StagePlan",
    "View",
    "extent_of",
    "is_packed",
    "place_of",
    "plan_slots",
]

ALIGNMENT_BYTES = 64
"""A cache line, and a multiple of every element's size. A slot starts in a line of its own, where in it its source does."""
PAGE_BYTES = 4096
"""Large slots begin a page, if their sources are aligned to the widest element: a device takes whole pages from where they lie."""
_WIDEST_BYTES = 16
SMALL_BYTES = 256 * 1024
"""Slots up to this size are gathered on a device before they cross: a transfer of its own would cost more than its bytes."""


class Extent(NamedTuple):
    """What the plan depends on of one tensor. Equal extents, in order, give equal plans.

    Attributes:
        device: where it lies.
        storage: address of the storage.
        start: address of the first element.
        shape: in elements.
        stride: in elements.
        dtype: element type.
        is_bits: whether the values are the bits in memory: not so for lazy conjugates and negatives.
    """

    device: torch.device
    storage: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_bits: bool

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def span_bytes(self) -> int:
        """From the first to the last element, both included; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


def extent_of(tensor: torch.Tensor) -> Extent:
    """The extent of a plain strided tensor."""
    is_bits = not tensor.is_neg() and not (tensor.dtype.is_complex and tensor.is_conj())
    storage = tensor.untyped_storage().data_ptr()
    return Extent(tensor.device, storage, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, is_bits)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a plain strided tensor lies and how it is read. Lists of equal places may use one plan: which storage an address belongs to,
    which takes as long to ask as all of this, changes nothing of what is to be copied from it.
    """
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_neg(),
        tensor.dtype.is_complex and tensor.is_conj(),
    )


class Slot(NamedTuple):
    """One run of the buffer.

    Attributes:
        offset: first byte in the buffer.
        num_bytes: length.
        device: of the source.
        start: address of the source.
        member: index of a tensor that it holds. Where ``is_copied_whole``, the source is that tensor's run of memory; else its values
            are copied one by one, because they do not lie densely.
        is_copied_whole: see ``member``.
    """

    offset: int
    num_bytes: int
    device: torch.device
    start: int
    member: int
    is_copied_whole: bool


class View(NamedTuple):
    """How a staged tensor looks into the buffer: byte offset, strides in elements, offset in elements. Shape and dtype are the source's."""

    offset: int
    stride: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Slots and views of a state.

    Attributes:
        slots: in the order of the buffer: by device, the small ones of each first.
        views: one a tensor, in the order given; offset 0 for a tensor without elements.
        num_bytes: of the buffer.
        places: offset and length of each slot.
        host_runs: offset, address of the source and length of each slot that is copied whole from memory of the host.
        host_values: the slots whose values are copied one by one from there.
        elsewhere: the slots whose sources lie on devices.
    """

    slots: tuple[Slot, ...] = ()
    views: tuple[View, ...] = ()
    num_bytes: int = 0
    places: tuple[tuple[int, int], ...] = ()
    host_runs: tuple[tuple[int, int, int], ...] = ()
    host_values: tuple[Slot, ...] = ()
    elsewhere: tuple[Slot, ...] = ()


class _Region(NamedTuple):
    device: torch.device
    storage: int
    start: int
    num_bytes: int
    members: list[int]
    is_copied_whole: bool


def plan_slots(extents: Sequence[Extent]) -> StagePlan:
    """Lay tensors out.

    Args:
        extents: of the tensors, in the state's order.

    Returns:
        The plan; near linear in the number of tensors.
    """
    regions = [*_dense_regions(extents), *_sparse_regions(extents)]
    regions.sort(key=lambda region: (str(region.device), region.num_bytes > SMALL_BYTES, region.members[0]))
    slots = []
    views = [View(0, extent.stride, 0) for extent in extents]
    position = 0
    for region in regions:
        is_large = region.num_bytes > SMALL_BYTES
        if is_large:
            position = -(-position // PAGE_BYTES) * PAGE_BYTES
        if region.is_copied_whole:
            # As far into a cache line as the source is, or, of a large one, into the widest element: every element of every view that
            # begins anywhere in there stays aligned.
            position += region.start % (_WIDEST_BYTES if is_large else ALIGNMENT_BYTES)
        slots.append(Slot(position, region.num_bytes, region.device, region.start, region.members[0], region.is_copied_whole))
        for member in region.members:
            extent = extents[member]
            if region.is_copied_whole:
                offset, stride = position + extent.start - region.start, extent.stride
            else:
                offset, stride = position, _packed_stride(extent.shape)
            views[member] = View(offset, stride, offset // extent.dtype.itemsize)
        position = -(-(position + region.num_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    on_host = [slot for slot in slots if slot.device.type == "cpu"]
    return StagePlan(
        tuple(slots),
        tuple(views),
        position,
        places=tuple((slot.offset, slot.num_bytes) for slot in slots),
        host_runs=tuple((slot.offset, slot.start, slot.num_bytes) for slot in on_host if slot.is_copied_whole),
        host_values=tuple(slot for slot in on_host if not slot.is_copied_whole),
        elsewhere=tuple(slot for slot in slots if slot.device.type != "cpu"),
    )


def _is_dense(extent: Extent) -> bool:
    """Whether copying the run of memory moves no more than the values (less, where a broadcast tensor repeats them)."""
    itemsize = extent.dtype.itemsize
    return extent.is_bits and extent.start % itemsize == 0 and extent.span_bytes <= extent.num_elements * itemsize


def _dense_regions(extents: Sequence[Extent]) -> list[_Region]:
    """Runs of memory, those that overlap within one storage as one."""
    order = sorted(
        (index for index, extent in enumerate(extents) if 0 not in extent.shape and _is_dense(extent)),
        key=lambda index: (str(extents[index].device), extents[index].storage, extents[index].start, -extents[index].span_bytes),
    )
    regions: list[_Region] = []
    for index in order:
        extent = extents[index]
        last = regions[-1] if regions else None
        overlaps = last is not None and extent.start < last.start + last.num_bytes
        if last is not None and overlaps and (last.device, last.storage) == (extent.device, extent.storage):
            num_bytes = max(last.num_bytes, extent.start + extent.span_bytes - last.start)
            regions[-1] = last._replace(num_bytes=num_bytes)
            last.members.append(index)
        else:
            regions.append(_Region(extent.device, extent.storage, extent.start, extent.span_bytes, [index], True))
    return regions


def _sparse_regions(extents: Sequence[Extent]) -> list[_Region]:
    """Tensors with holes between their values, equal ones as one."""
    alike: dict[Extent, list[int]] = {}
    for index, extent in enumerate(extents):
        if 0 not in extent.shape and not _is_dense(extent):
            alike.setdefault(extent, []).append(index)
    return [
        _Region(extent.device, extent.storage, extent.start, extent.num_elements * extent.dtype.itemsize, members, False)
        for extent, members in alike.items()
    ]


def is_packed(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie one after the other, row by row."""
    return all(size == 1 or step == packed for size, step, packed in zip(shape, stride, _packed_stride(tuple(shape)), strict=True))


def _packed_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))
