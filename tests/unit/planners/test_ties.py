"""Which keys share memory, and whether all ranks agree."""

from __future__ import annotations

from typing import Any

import torch

from dcp_engine.planners.local_shards import LocalTensor, describe
from dcp_engine.planners.ties import agreed_ties, find_ties


def ties(**state: Any) -> dict[str, str]:
    described = [describe(key, value) for key, value in state.items()]
    return find_ties([tensor for tensor in described if isinstance(tensor, LocalTensor)])


def test_same_memory_is_a_tie_with_the_first_key_in_order() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    assert ties(head=weight, embed=weight, other=torch.ones(3, 2), view=weight.data.view(3, 2)) == {"head": "embed", "view": "embed"}


def test_views_that_differ_are_no_ties() -> None:
    base = torch.arange(16.0).reshape(4, 4)
    assert ties(a=base, b=base.t(), c=base[:2], d=base.view(2, 8), e=base.view(torch.int32)) == {}


def test_conjugate_and_negative_views_are_no_ties() -> None:
    base = torch.ones(3, dtype=torch.complex64)
    assert ties(a=base, b=base.conj()) == {}
    assert ties(a=base.imag, b=base.conj().imag) == {}
    assert ties(a=base.conj(), b=base.conj()) == {"b": "a"}


def test_two_groups_on_one_address_are_told_apart() -> None:
    base = torch.ones(4, 4)
    assert ties(a=base, b=base.t(), c=base.t(), d=base) == {"c": "b", "d": "a"}


def test_tensors_without_elements_are_never_tied() -> None:
    empty = torch.zeros(0, 3)
    assert ties(a=empty, b=empty) == {}


def test_ties_hold_where_every_holder_agrees() -> None:
    assert agreed_ties([{"b": "a"}, {"b": "a"}, {}], {"a": [0, 1], "b": [0, 1]}) == {"b": "a"}


def test_a_rank_that_holds_the_keys_apart_undoes_the_tie() -> None:
    assert agreed_ties([{"b": "a"}, {}], {"a": [0, 1], "b": [0, 1]}) == {}
    assert agreed_ties([{"b": "a"}, {}], {"a": [0], "b": [0, 1]}) == {}
    assert agreed_ties([{"b": "a"}, {}], {"a": [0, 1], "b": [0]}) == {}


def test_groups_that_differ_between_ranks_keep_what_is_common() -> None:
    proposals = [{"b": "a", "c": "a"}, {"b": "a"}]
    assert agreed_ties(proposals, {"a": [0, 1], "b": [0, 1], "c": [0, 1]}) == {"b": "a"}
    assert agreed_ties([{"b": "a", "c": "a"}, {"c": "b"}], {"a": [0, 1], "b": [0, 1], "c": [0, 1]}) == {}
