"""Rank and world size come from the arguments, else from the default process group, else there is one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dcp_engine.data.options import num_samples_of, place_of
from dcp_engine.errors import InvalidOptionError


def test_place_is_that_of_the_process_group_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of(None, None) == (0, 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert place_of(None, None) == (3, 8)
    assert place_of(1, 2) == (1, 2)


@pytest.mark.parametrize(("rank", "world_size"), [(1, None), (None, 4)])
def test_rank_and_world_size_go_together(rank: int | None, world_size: int | None) -> None:
    with pytest.raises(InvalidOptionError, match=f"expected both or neither; found rank={rank}, world_size={world_size}"):
        place_of(rank, world_size)


def test_number_of_samples_is_a_length_or_the_number_itself() -> None:
    assert [num_samples_of(one) for one in (7, np.int64(7), range(7), torch.zeros(7, 2), "seven42")] == [7] * 5  # type: ignore[arg-type]
    for wrong in (0, -1, True, 2**62 + 1, [], 7.0, None, object()):
        with pytest.raises(InvalidOptionError):
            num_samples_of(wrong)  # type: ignore[arg-type]
