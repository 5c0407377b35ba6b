"""Where tensors go in a flat buffer."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.staging.layout import ALIGNMENT_BYTES, PAGE_BYTES, SMALL_BYTES, Extent, extent_of, place_of, plan_slots

CPU = torch.device("cpu")


def extent(start: int, *shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32, storage: int = 0) -> Extent:
    packed = []
    step = 1
    for size in reversed(shape):
        packed.insert(0, step)
        step *= size
    return Extent(CPU, storage, start, shape, tuple(packed) if stride is None else stride, dtype, True)


def test_each_tensor_has_a_slot_that_starts_where_its_source_does_in_a_cache_line() -> None:
    plan = plan_slots([extent(4096, 10), extent(8192 + 16, 3, 4)])
    assert [(slot.offset, slot.num_bytes, slot.start, slot.member) for slot in plan.slots] == [(0, 40, 4096, 0), (64 + 16, 48, 8208, 1)]
    assert [(view.offset, view.stride) for view in plan.views] == [(0, (1,)), (80, (4, 1))]
    assert plan.num_bytes == 128


def test_the_same_memory_under_two_keys_is_copied_once() -> None:
    plan = plan_slots([extent(4096, 10), extent(4096, 10)])
    assert len(plan.slots) == 1
    assert plan.views[0] == plan.views[1]


def test_views_that_overlap_share_a_slot_and_keep_their_distance() -> None:
    plan = plan_slots([extent(4096, 10), extent(4096 + 20, 10)])
    assert [(slot.offset, slot.num_bytes) for slot in plan.slots] == [(0, 60)]
    assert [view.offset for view in plan.views] == [0, 20]


def test_parts_of_one_storage_that_do_not_overlap_do_not_bring_what_is_between() -> None:
    plan = plan_slots([extent(4096, 10), extent(4096 + 1_000_000, 10)])
    assert [slot.num_bytes for slot in plan.slots] == [40, 40]


def test_addresses_of_different_storages_are_never_taken_for_one_run() -> None:
    plan = plan_slots([extent(4096, 10, storage=1), extent(4100, 10, storage=2)])
    assert [slot.num_bytes for slot in plan.slots] == [40, 40]


def test_a_column_of_a_matrix_is_packed_and_a_transposed_matrix_is_not() -> None:
    column, transposed = extent(4096, 10, stride=(8,)), extent(65536, 4, 6, stride=(1, 4))
    plan = plan_slots([column, transposed])
    assert [(slot.num_bytes, slot.is_copied_whole) for slot in plan.slots] == [(40, False), (96, True)]
    assert [view.stride for view in plan.views] == [(1,), (1, 4)]


def test_a_broadcast_tensor_takes_only_the_memory_that_it_has() -> None:
    plan = plan_slots([extent(4096, 1000, 1000, stride=(0, 0))])
    assert [slot.num_bytes for slot in plan.slots] == [4]
    assert plan.views[0].stride == (0, 0)


def test_lazy_conjugates_and_elements_off_their_alignment_are_copied_by_value() -> None:
    conjugate = extent(4096, 4, dtype=torch.complex64)._replace(is_bits=False)
    odd = extent(65537, 4)
    assert [slot.is_copied_whole for slot in plan_slots([conjugate, odd]).slots] == [False, False]


def test_tensors_without_elements_take_nothing() -> None:
    plan = plan_slots([extent(0, 0, 5), extent(4096, 2)])
    assert [slot.member for slot in plan.slots] == [1]
    assert plan.views[0].offset == 0
    assert plan_slots([]).num_bytes == 0


def test_small_slots_of_a_device_lie_together() -> None:
    large, small = SMALL_BYTES, 10
    plan = plan_slots([extent(2**20, large), extent(2**24, small), extent(2**25, large), extent(2**26, small)])
    assert [slot.member for slot in plan.slots] == [1, 3, 0, 2]


def test_a_large_slot_begins_a_page_and_keeps_the_alignment_of_the_widest_element() -> None:
    aligned, odd = extent(2**20 + 48, SMALL_BYTES), extent(2**24 + 8, SMALL_BYTES)
    assert [slot.offset for slot in plan_slots([aligned, odd]).slots] == [0, SMALL_BYTES * 4 + 8]
    assert [slot.offset % PAGE_BYTES for slot in plan_slots([extent(4096, 3), aligned, odd]).slots] == [0, 0, 8]


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of a few storages, of any strides."""
    storages = [torch.arange(400, dtype=torch.int16) + 1000 * number for number in range(3)]
    found = []
    for _ in range(draw(st.integers(0, 12))):
        storage = draw(st.sampled_from(storages))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        stride = [draw(st.integers(0, 12)) for _ in shape]
        offset = draw(st.integers(0, 200))
        found.append(torch.as_strided(storage, shape, stride, offset))
    return found


@given(tensors())
def test_slots_never_overlap_and_every_view_lies_in_one(found: list[torch.Tensor]) -> None:
    plan = plan_slots([extent_of(tensor) for tensor in found])
    ends = [slot.offset + slot.num_bytes for slot in plan.slots]
    assert all(end <= after.offset for end, after in zip(ends, plan.slots[1:], strict=False))
    assert all(one.offset // ALIGNMENT_BYTES < other.offset // ALIGNMENT_BYTES for one, other in pairwise(plan.slots))
    assert plan.num_bytes == (0 if not ends else -(-ends[-1] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    for tensor, view in zip(found, plan.views, strict=True):
        if tensor.numel():
            last = view.offset + 2 * sum((size - 1) * step for size, step in zip(tensor.shape, view.stride, strict=True))
            assert any(slot.offset <= view.offset and last + 2 <= slot.offset + slot.num_bytes for slot in plan.slots)
            assert view.offset % 2 == 0


@given(tensors())
def test_equal_extents_give_equal_plans(found: list[torch.Tensor]) -> None:
    assert plan_slots([extent_of(tensor) for tensor in found]) == plan_slots([extent_of(tensor) for tensor in found])


@given(tensors(), tensors())
def test_tensors_at_equal_places_have_equal_plans(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for found in (one, other):
        again = [tensor[...] for tensor in found]
        assert [place_of(tensor) for tensor in again] == [place_of(tensor) for tensor in found]
        assert plan_slots([extent_of(tensor) for tensor in again]) == plan_slots([extent_of(tensor) for tensor in found])
    if any(tensor.numel() for tensor in one):
        assert [place_of(tensor) for tensor in one] != [place_of(tensor.clone()) for tensor in one]
