"""How epochs are cut: against a reference that hands out samples one by one, and at uneven ends by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_engine.data.batches import Layout

layouts = st.builds(Layout, batch_size=st.integers(1, 6), world_size=st.integers(1, 6), drop_last=st.booleans(), pad=st.booleans())


def cut(layout: Layout, num_left: int) -> list[list[list[int]]]:
    """For each global batch, for each rank, the samples that it gets."""
    batches, offset = [], 0
    while size := layout.take(num_left - offset):
        batches.append([(layout.part(rank, size) + offset).tolist() for rank in range(layout.world_size)])
        offset += size
    return batches


@given(layouts, st.integers(0, 120))
def test_every_sample_is_handed_out_once_in_order(layout: Layout, num_left: int) -> None:
    batches = cut(layout, num_left)
    seen = [sample for batch in batches for part in batch for sample in part]
    assert list(dict.fromkeys(seen)) == list(range(layout.reach(num_left)))
    assert layout.num_batches(num_left) == len(batches)
    repeated = len(seen) - len(set(seen))
    assert repeated == sum(layout.num_repeated(len({sample for part in batch for sample in part})) for batch in batches)
    if not layout.pad or layout.drop_last or (layout.batch_size > 1 and num_left >= layout.world_size):
        assert repeated == 0


@given(layouts, st.integers(0, 120))
def test_parts_differ_by_one_sample_at_most_and_only_at_the_end(layout: Layout, num_left: int) -> None:
    batches = cut(layout, num_left)
    for number, batch in enumerate(batches):
        sizes = [len(part) for part in batch]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= layout.batch_size
        if number < len(batches) - 2 or layout.drop_last:
            assert set(sizes) == {layout.batch_size}
        if layout.pad:
            assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("num_left", "drop_last", "pad", "expected"),
    [
        (9, False, True, [[[0, 1], [2], [3], [4]], [[5], [6], [7], [8]]]),
        (9, False, False, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [], [], []]]),
        (9, True, True, [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
        (14, False, True, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12], [13]]]),
        (3, False, True, [[[0], [1], [2], [0]]]),
        (1, False, True, [[[0], [0], [0], [0]]]),
        (0, False, True, []),
    ],
)
def test_uneven_ends_of_4_ranks_with_2_samples_each(num_left: int, drop_last: bool, pad: bool, expected: list[list[list[int]]]) -> None:
    assert cut(Layout(batch_size=2, world_size=4, drop_last=drop_last, pad=pad), num_left) == expected


def test_with_one_sample_a_rank_the_last_batch_repeats_what_is_short() -> None:
    layout = Layout(batch_size=1, world_size=4, drop_last=False, pad=True)
    assert cut(layout, 6) == [[[0], [1], [2], [3]], [[4], [5], [4], [5]]]
    assert layout.num_repeated(2) == 2
