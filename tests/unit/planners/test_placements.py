"""Which rows placements leave to a rank, held against torch's own splitting."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from dcp_engine.planners.placements import Split, local_runs


def indices(size: int, *splits: Split) -> list[int]:
    return [index for start, length in local_runs(size, splits) for index in range(start, start + length)]


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5), st.data())
def test_splits_are_those_of_torch(size: int, first: int, second: int, data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, first - 1)), data.draw(st.integers(0, second - 1))
    every = torch.arange(size)
    strided = _StridedShard(0, split_factor=second)
    then_plain = Shard._custom_chunk(strided._split_tensor(every, first, with_padding=False)[0][a], second, 0)[b]
    assert indices(size, Split(0, first, a, second), Split(0, second, b)) == then_plain.tolist()
    plain = Shard._custom_chunk(every, first, 0)[a]
    then_strided = strided._split_tensor(plain, second, with_padding=False)[0][b]
    assert indices(size, Split(0, first, a), Split(0, second, b, second)) == then_strided.tolist()


def test_rows_that_are_not_contiguous_are_several_runs() -> None:
    assert local_runs(8, [Split(0, 2, 1), Split(0, 2, 0, 2)]) == ((4, 1), (6, 1))
    assert local_runs(8, [Split(0, 2, 0, 2), Split(0, 2, 1)]) == ((4, 2),)
    assert local_runs(3, [Split(0, 4, 3)]) == ()
