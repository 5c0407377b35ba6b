"""Whether ranks stand at one step: who is told of what, by tables."""

from __future__ import annotations

import pytest

from dcp_engine.background.cut import Cut, require_one_step
from dcp_engine.errors import MixedStepsError


@pytest.mark.parametrize(
    "cuts",
    [
        [Cut()],
        [Cut({"step": 3})],
        [Cut({"step": 3, "optimizer": 2}), Cut({"step": 3, "scheduler": 9})],
        [Cut({"scaler": 65536.0, "data.hash": "ab"})] * 3,
    ],
)
def test_ranks_that_say_the_same_or_nothing_of_a_fact_are_at_one_step(cuts: list[Cut]) -> None:
    require_one_step(cuts)


def test_the_smaller_group_is_named_with_its_values() -> None:
    with pytest.raises(MixedStepsError) as caught:
        require_one_step([Cut({"step": 7}), Cut({"step": 8}), Cut({"step": 8}), Cut({"scheduler": 1})])
    assert caught.value.disagreements == ("step is 8 on ranks 1, 2, 7 on rank 0",)
    assert caught.value.rank == 0


def test_of_two_ranks_the_first_is_taken_for_right() -> None:
    with pytest.raises(MixedStepsError) as caught:
        require_one_step([Cut({"step": 7}), Cut({"step": 8})])
    assert (caught.value.disagreements, caught.value.rank) == (("step is 7 on rank 0, 8 on rank 1",), 1)


def test_what_disagrees_within_a_rank_comes_first_and_names_it() -> None:
    with pytest.raises(MixedStepsError) as caught:
        require_one_step([Cut({"step": 7, "optimizer": 7}), Cut({"step": 7, "optimizer": 6}, ("the optimizer has taken 6 steps",))])
    assert caught.value.disagreements == ("rank 1: the optimizer has taken 6 steps", "optimizer is 7 on rank 0, 6 on rank 1")
    assert caught.value.rank == 1
    with pytest.raises(MixedStepsError) as caught:
        require_one_step([Cut({}, ("a",))])
    assert caught.value.disagreements == ("a",)


def test_a_long_list_is_cut_in_the_message_alone() -> None:
    with pytest.raises(MixedStepsError) as caught:
        require_one_step([Cut({f"fact {number}": 0 for number in range(30)}), Cut({f"fact {number}": 1 for number in range(30)})])
    assert len(caught.value.disagreements) == 30
    assert str(caught.value.found).endswith("; and 10 more")


def test_many_ranks_are_not_all_listed() -> None:
    with pytest.raises(MixedStepsError) as caught:
        require_one_step([Cut({"step": 1})] + [Cut({"step": 2})] * 10)
    assert caught.value.disagreements == ("step is 2 on ranks 1, 2, 3, 4, 5, 6, 7, 8, ..., 1 on rank 0",)
