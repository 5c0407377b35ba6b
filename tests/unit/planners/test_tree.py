"""Flattening has DCP's names and loses nothing; skeletons survive encoding and merging; values go back into the caller's containers."""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dcp_engine.errors import (
    DuplicateKeyError,
    KeyMismatchError,
    LimitExceededError,
    MalformedCheckpointError,
    PlanError,
    StateError,
    UnencodableObjectError,
)
from dcp_engine.objects import encode_object, register_type
from dcp_engine.planners.skeleton import Node, decode_skeleton, encode_skeleton, leaf_paths, merge_skeletons, unflatten
from dcp_engine.planners.tree import assign, flatten

T = torch.zeros(1)
Moments = namedtuple("Moments", ["mean", "var"])
register_type(Moments, name="tests.Moments")


class Sharded:
    """Speaks DCP's duck protocol and is no tensor."""

    def __create_chunk_list__(self) -> list[Any]:
        return []


def types_of(value: Any) -> Any:
    """The containers with their exact types and the types of their keys."""
    if isinstance(value, dict):
        return (type(value), getattr(value, "default_factory", None), [(type(k), k, types_of(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [types_of(v) for v in value])
    return value if value is None or isinstance(value, (int, str, float)) else id(value)


def through_bytes(state: Any) -> Any:
    flat = flatten(state)
    return unflatten(decode_skeleton(encode_skeleton(flat.skeleton)), flat.leaves)


# The alphabet has no dot and no digits, so that no two paths share a name.
LEAVES = st.none() | st.integers(0, 3) | st.just(T) | st.tuples(st.integers()) | st.sets(st.integers(), max_size=2)
DCP_STATES = st.dictionaries(
    st.text("abc", max_size=2),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.dictionaries(st.integers(0, 9), inner, max_size=3).map(OrderedDict)
        ),
        max_leaves=15,
    ),
    max_size=4,
)


@settings(deadline=None)
@given(DCP_STATES)
def test_names_paths_values_and_order_are_those_of_dcp(state: dict[str, Any]) -> None:
    leaves, paths = flatten_state_dict(state)
    flat = flatten(state)
    assert list(flat.leaves) == list(leaves)
    assert all(flat.leaves[name] is value for name, value in leaves.items())
    assert flat.paths == paths


STATES = st.dictionaries(
    st.text("abc", max_size=2) | st.integers(0, 9) | st.none() | st.tuples(st.integers(0, 9)),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.dictionaries(st.text("abc", max_size=2) | st.integers(0, 9) | st.booleans(), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3).map(OrderedDict)
            | st.dictionaries(st.integers(), inner, max_size=3).map(lambda d: defaultdict(list, d))
            | st.tuples(inner, st.just(T)).map(lambda pair: Moments(*pair))
        ),
        max_leaves=15,
    ),
    max_size=4,
)


@settings(deadline=None)
@given(STATES)
def test_skeleton_rebuilds_exact_containers(state: dict[Any, Any]) -> None:
    assert types_of(through_bytes(state)) == types_of(state)


@settings(deadline=None)
@given(STATES)
def test_assigning_every_leaf_by_its_path_builds_the_same_state_of_new_values(state: dict[Any, Any]) -> None:
    flat = flatten(state)
    wanted = unflatten(flat.skeleton, {name: f"new {name}" for name in flat.leaves})
    target = through_bytes(state)
    for name, path in flat.paths.items():
        # An empty list is a value of its own: replaced as a leaf, rebuilt as a container.
        assign(target, path, [] if isinstance(flat.leaves[name], list) and not flat.leaves[name] else f"new {name}")
    assert types_of(target) == types_of(wanted)


def test_tuples_with_tensors_are_traversed_and_others_are_leaves() -> None:
    state = {"a": (T, (1, [2, T])), "b": (1, 2), "c": [(1, T)], "d": ({"x": 1},), "e": ({"x": T}, 5)}
    flat = flatten(state)
    assert flat.paths == {
        "a.0": ("a", 0),
        "a.1.0": ("a", 1, 0),
        "a.1.1.0": ("a", 1, 1, 0),
        "a.1.1.1": ("a", 1, 1, 1),
        "b": ("b",),
        "c.0.0": ("c", 0, 0),
        "c.0.1": ("c", 0, 1),
        "d": ("d",),
        "e.0.x": ("e", 0, "x"),
        "e.1": ("e", 1),
    }
    assert types_of(through_bytes(state)) == types_of(state)


def test_duck_typed_tensors_are_leaves_and_open_their_list() -> None:
    assert list(flatten({"a": [1, Sharded()], "b": Sharded()}).leaves) == ["a.0", "a.1", "b"]


def test_typed_keys_and_empty_containers_are_remembered() -> None:
    state = {
        "state": {0: {"step": T}, 10: {}},
        "empty": {},
        "ordered": OrderedDict(),
        "list": [],
        "nested": [[], {}, [T]],
        "count": Counter(a=2),
        "default": defaultdict(dict, {True: T, None: 1, (1, 2): 2, 2.5: 3}),
        3: "three",
    }
    assert types_of(through_bytes(state)) == types_of(state)
    assert flatten(state).paths["default.(1, 2)"] == ("default", "(1, 2)")
    assert flatten(state).paths["state.0.step"] == ("state", "0", "step")


def test_mappings_of_other_classes_come_back_as_dicts() -> None:
    state = {"a": UserDict({"x": T}), "b": types.MappingProxyType({"y": 1}), "c": defaultdict(lambda: 1, {"z": 2})}
    assert through_bytes(state) == {"a": {"x": T}, "b": {"y": 1}, "c": {"z": 2}}


@pytest.mark.parametrize(
    ("state", "name", "paths"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "a.b", "state['a.b'], state['a']['b']"),
        ({"a": [T], "a.0": T}, "a.0", "state['a'][0], state['a.0']"),
        ({"o": {1: T, "1": T}}, "o.1", "state['o'][1], state['o']['1']"),
        ({"1": {"x": T}, 1: {"y": T}}, "1", "state['1'], state[1]"),
        ({"None": {}, None: {}}, "None", "state['None'], state[None]"),
        ({"a": {"b.c": T}, "a.b": {"c": T}}, "a.b.c", "state['a']['b.c'], state['a.b']['c']"),
    ],
)
def test_two_paths_with_one_name_are_refused_naming_both(state: Any, name: str, paths: str) -> None:
    with pytest.raises(DuplicateKeyError) as caught:
        flatten(state)
    assert caught.value.tensor == name
    assert caught.value.found == paths


def test_cycles_are_refused() -> None:
    in_dict: dict[str, Any] = {"a": {}}
    in_dict["a"]["b"] = in_dict
    in_list: list[Any] = [1]
    in_list.append([in_list])
    by_tuple: dict[str, Any] = {}
    by_tuple["a"] = (T, by_tuple)
    for state in (in_dict, {"a": in_list}, by_tuple):
        with pytest.raises(UnencodableObjectError, match="contains itself") as caught:
            flatten(state)
        assert caught.value.tensor is not None


def test_shared_containers_are_no_cycle() -> None:
    shared = [T]
    assert list(flatten({"a": shared, "b": {"c": shared}, "d": [shared, shared]}).leaves) == ["a.0", "b.c.0", "d.0.0", "d.1.0"]


def test_unregistered_namedtuple_with_tensors_is_refused() -> None:
    other = namedtuple("Other", ["a"])
    with pytest.raises(UnencodableObjectError, match="Other") as caught:
        flatten({"x": {"y": other(T)}})
    assert caught.value.tensor == "x.y"
    assert list(flatten({"x": other(1)}).leaves) == ["x"]


def test_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(StateError, match="mapping"):
        flatten([T])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [lambda v: {"a": v}, lambda v: [v], lambda v: (v,)], ids=["dict", "list", "tuple"])
def test_depth_costs_no_stack(wrap: Any) -> None:
    value: Any = [T]
    for _ in range(5000):
        value = wrap(value)
    flat = flatten({"x": value})
    (path,) = flat.paths.values()
    assert len(path) == 5002
    skeleton = decode_skeleton(encode_skeleton(merge_skeletons([flat.skeleton, flat.skeleton])))
    target = unflatten(skeleton, flat.leaves)
    assign(target, path, 8)
    for key in path:
        target = target[key]
    assert target == 8


def test_wire_form_of_the_skeleton_is_the_documented_one() -> None:
    state = {"a": {1: T, None: T}, "l": [T, ()], "e": [], "d": defaultdict(list), "m": Moments(T, T)}
    assert encode_skeleton(flatten(state).skeleton) == encode_object(
        [
            1,
            bytes([1, 1, 0, 0, 6, 0, 0, 7, 3, 9, 0, 0]),
            [5, 2, 2, 0, 0, 2],
            ["a", "l", "e", "d", "m", 1, (None, "None")],
            ["list", "tests.Moments"],
        ],
        key="k",
    )


MALFORMED_SKELETONS = {
    "not a list": {},
    "another version": [2, b"\x01", [0], [], []],
    "too few columns": [1, b"\x01", [0], []],
    "no node": [1, b"", [], [], []],
    "root is a leaf": [1, b"\x00", [], [], []],
    "root is a list": [1, b"\x06", [0], [], []],
    "unknown kind": [1, b"\x01\x63", [1], ["a"], []],
    "counts too large": [1, b"\x01", [10**9], [], []],
    "counts negative": [1, b"\x01\x01", [2, -1], ["a", "b"], []],
    "counts of bool": [1, b"\x01\x00", [True], ["a"], []],
    "keys too short": [1, b"\x01\x00", [1], [], []],
    "keys too long": [1, b"\x01\x00", [1], ["a", "b"], []],
    "key twice": [1, b"\x01\x00\x00", [2], ["a", "a"], []],
    "keys with one name": [1, b"\x01\x00\x00", [2], [1, "1"], []],
    "two leaves with one name": [1, b"\x01\x00\x01\x00", [2, 1], ["a.b", "a", "b"], []],
    "empty list with the name of a leaf": [1, b"\x01\x00\x01\x07", [2, 1, 0], ["a.b", "a", "b"], []],
    "key that needs no text": [1, b"\x01\x00", [1], [("a", "b")], []],
    "key of a wrong form": [1, b"\x01\x00", [1], [None], []],
    "unhashable key": [1, b"\x01\x00", [1], [([], "x")], []],
    "unknown factory": [1, b"\x03", [0], [], ["eval"]],
    "record without a name": [1, b"\x01\x09\x00", [1, 1], ["a"], [None]],
    "details too long": [1, b"\x01", [0], [], ["list"]],
}


@pytest.mark.parametrize("name", MALFORMED_SKELETONS)
def test_malformed_skeletons_are_refused(name: str) -> None:
    with pytest.raises(MalformedCheckpointError):
        decode_skeleton(encode_object(MALFORMED_SKELETONS[name], key="k"))


def test_hostile_depth_is_bounded_by_the_length_of_names() -> None:
    depth = 200_000
    data = encode_object([1, b"\x01" * depth + b"\x00", [1] * depth, ["a"] * depth, []], key="k")
    with pytest.raises(LimitExceededError):
        decode_skeleton(data)


@settings(deadline=None)
@given(st.binary(max_size=12), st.lists(st.integers(-1, 3), max_size=6), st.lists(st.sampled_from(["a", "b", 1, ("x", "y")]), max_size=6))
def test_random_columns_are_a_skeleton_or_a_typed_error(kinds: bytes, counts: list[int], keys: list[Any]) -> None:
    kinds = bytes(k % 10 for k in kinds)
    data = encode_object([1, kinds, counts, keys, ["list"]], key="k")
    try:
        skeleton = decode_skeleton(data)
    except MalformedCheckpointError:
        return
    assert encode_skeleton(skeleton) == data


def merged(*states: Any) -> Any:
    """What all ranks together rebuild, through bytes."""
    flats = [flatten(state) for state in states]
    skeleton = merge_skeletons([decode_skeleton(encode_skeleton(flat.skeleton)) for flat in flats])
    values = {name: value for flat in reversed(flats) for name, value in flat.leaves.items()}
    return unflatten(decode_skeleton(encode_skeleton(skeleton)), values)


def test_pipeline_stages_merge_in_order_of_ranks() -> None:
    first = {"model": OrderedDict([("embed", T), ("layers", {0: {"w": T}})]), "step": 3}
    second = {"model": OrderedDict([("layers", {1: {"w": T}, 2: {}}), ("head", T)]), "step": 3}
    assert types_of(merged(first, second)) == types_of(
        {"model": OrderedDict([("embed", T), ("layers", {0: {"w": T}, 1: {"w": T}, 2: {}}), ("head", T)]), "step": 3}
    )


def test_lists_of_different_lengths_merge_to_the_longest() -> None:
    assert types_of(merged({"e": [T]}, {"e": [T, {"w": T}]}, {"e": []})) == types_of({"e": [T, {"w": T}]})
    assert types_of(merged({"e": []}, {"e": []})) == types_of({"e": []})
    assert types_of(merged({"e": []}, {"e": [T]})) == types_of({"e": [T]})
    assert types_of(merged({"e": [{}]}, {"e": [{"a": (T, 1)}]})) == types_of({"e": [{"a": (T, 1)}]})


def test_merging_changes_no_input() -> None:
    first, second = flatten({"a": {"x": T}}).skeleton, flatten({"b": {"z": T}, "a": {"y": T}}).skeleton
    third = flatten({"b": {"q": T}}).skeleton
    before = [encode_skeleton(s) for s in (first, second, third)]
    merge_skeletons([first, second, third])
    assert [encode_skeleton(s) for s in (first, second, third)] == before


@settings(deadline=None)
@given(STATES)
def test_merging_equal_skeletons_changes_nothing(state: dict[Any, Any]) -> None:
    skeleton = flatten(state).skeleton
    assert encode_skeleton(merge_skeletons([skeleton] * 3)) == encode_skeleton(skeleton)


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        ({"a": {"b": T}}, {"a": OrderedDict(b=T)}, "a"),
        ({"a": {"b": [T]}}, {"a": {"b": (T,)}}, "a.b"),
        ({"a": {"b": T}}, {"a": [T]}, "a"),
        ({"a": T}, {"a": {"b": T}}, "a"),
        ({"a": {"b": T}}, {"a": T}, "a"),
        ({"a": (T,)}, {"a": (T, T)}, "a"),
        ({"a": defaultdict(list)}, {"a": defaultdict(dict)}, "a"),
        ({"a": {1: T}}, {"a": {"1": T}}, "a.1"),
        ({"a": {1: {}}}, {"a": {True: {}}}, "a.True"),
        ({"a": {"b": T}}, {"a.b": T}, "a.b"),
        ({"a": [1, 2]}, {"a": [T]}, "a"),
    ],
)
def test_ranks_that_disagree_are_refused_naming_the_key(one: Any, other: Any, name: str) -> None:
    with pytest.raises(PlanError) as caught:
        merged(one, other)
    assert caught.value.tensor == name


def test_merging_nothing_is_refused() -> None:
    with pytest.raises(PlanError):
        merge_skeletons([])


def test_unflatten_reports_missing_and_unexpected_values() -> None:
    skeleton = flatten({"a": {"x": T, "y": T}, "b": []}).skeleton
    with pytest.raises(KeyMismatchError) as caught:
        unflatten(skeleton, {"a.x": 1, "c": 2})
    assert caught.value.missing == ("a.y",)
    assert caught.value.unexpected == ("c",)


def test_partial_unflatten_leaves_out_what_has_no_value() -> None:
    skeleton = flatten({"model": {"w": T, "b": T}, "optimizer": {"state": {0: {"step": T}}, "e": {}}, "l": [T, T], "e": {}}).skeleton
    assert unflatten(skeleton, {"model.w": 1}, partial=True) == {"model": {"w": 1}, "optimizer": {"e": {}}, "e": {}}
    with pytest.raises(KeyMismatchError) as caught:
        unflatten(skeleton, {"l.1": 1}, partial=True)
    assert caught.value.missing == ("l.0",)
    assert unflatten(flatten({"a": {"b": T}}).skeleton, {}, partial=True) == {}


def test_assigning_keeps_the_callers_containers_and_puts_new_tuples_into_them() -> None:
    inner: dict[Any, Any] = {1: 0, "pair": (T, (1, 2, T))}
    items = [T, inner]
    ordered = OrderedDict(b=T, a=items)
    named = {"m": Moments(T, T)}
    state = {"s": ordered, "n": named}
    paths = flatten(state).paths
    for name in ("s.b", "s.a.1.1", "s.a.1.pair.1.2", "s.a.1.pair.0", "n.m.1"):
        assign(state, paths[name], name)
    assert state["s"] is ordered
    assert ordered["a"] is items
    assert items[1] is inner
    assert list(ordered) == ["b", "a"]
    assert ordered["b"] == "s.b"
    assert inner == {1: "s.a.1.1", "pair": ("s.a.1.pair.0", (1, 2, "s.a.1.pair.1.2"))}
    assert state["n"] is named
    assert named["m"] == Moments(T, "n.m.1")
    assert type(named["m"]) is Moments


def test_value_loaded_in_place_leaves_its_tuple_alone() -> None:
    pair = (T, torch.ones(1))
    state = {"p": pair, "frozen": types.MappingProxyType({"x": T})}
    assign(state, ("p", 0), pair[0])
    assign(state, ("p", 1), pair[1])
    assign(state, ("frozen", "x"), T)
    assert state["p"] is pair


def test_nothing_is_added_to_the_callers_state() -> None:
    state: dict[str, Any] = {"a": {"x": T}, "l": [T], "t": (T,), "d": defaultdict(dict)}
    for name, path in {"a.y": ("a", "y"), "l.1": ("l", 1), "t.1": ("t", 1), "d.k.z": ("d", "k", "z"), "a.x.0": ("a", "x", 0)}.items():
        with pytest.raises(KeyMismatchError) as caught:
            assign(state, path, 1)
        assert caught.value.unexpected == (name,)
    with pytest.raises(KeyMismatchError):
        assign(state, ("l", -1), 1)
    assert types_of(state) == types_of({"a": {"x": T}, "l": [T], "t": (T,), "d": defaultdict(dict)})


def test_containers_that_cannot_be_written_are_named() -> None:
    state = {"a": types.MappingProxyType({"x": 1})}
    with pytest.raises(StateError, match="mappingproxy") as caught:
        assign(state, ("a", "x"), 2)
    assert caught.value.tensor == "a.x"


def test_leaf_predicate_is_the_callers() -> None:
    assert list(flatten({"a": [Moments(1, 2)]}, is_leaf=lambda v: isinstance(v, Moments)).leaves) == ["a.0"]


def test_many_leaves_and_many_nodes() -> None:
    state = {"model": {f"w{i}": T for i in range(20_000)}, "state": {i: {"step": i, "list": []} for i in range(20_000)}}
    flat = flatten(state)
    assert len(flat.leaves) == 60_000
    assert flat.skeleton.entries["state"].entries[7].entries["step"] == "state.7.step"  # type: ignore[union-attr]
    assert isinstance(flat.skeleton.entries["state"].entries[7].entries["list"], Node)  # type: ignore[union-attr]
    assert len(encode_skeleton(flat.skeleton)) < 60_000 * 12
    assert types_of(through_bytes(state)) == types_of(state)


def test_paths_follow_from_the_skeleton() -> None:
    state = {"a": {1: torch.ones(1), "x": []}, "l": [torch.ones(1), (torch.ones(2), {"d": 3})], "o": OrderedDict(k=[1, 2]), ("t",): {}}
    flat = flatten(state)
    assert leaf_paths(decode_skeleton(encode_skeleton(flat.skeleton))) == flat.paths
    assert list(leaf_paths(flat.skeleton)) == list(flat.leaves)
