"""Faults that users reported with objects and containers: back exactly, with their types, or refused at save by key."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import enum
import math
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.engine import attempts_in, contents, load, refused, save
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint import async_save as dcp_async_save
from torch.distributed.checkpoint import save as dcp_save

from dcp_engine import BalancedSavePlanner, ReshardLoadPlanner, ShardWriter, verify_checkpoint
from dcp_engine.errors import DuplicateKeyError, KeyMismatchError, KindMismatchError, ShapeMismatchError, StateError, UnencodableObjectError
from dcp_engine.objects import register_type


class Phase(enum.Enum):
    WARMUP = 1
    DECAY = "d"


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Schedule:
    name: str
    rates: tuple[float, ...]
    phase: Phase


class Point(NamedTuple):
    x: int
    y: Any


for _cls in (Phase, Flags, Schedule, Point):
    register_type(_cls, name=f"reported_faults.{_cls.__name__}")

LARGE = bytes(range(256)) * (50_000_000 // 256)


def objects() -> dict[str, Any]:
    """Everything that users were seen to keep in a state beside tensors, and its relatives."""
    generator = np.random.Generator(np.random.PCG64(7))
    generator.random(3)
    return {
        "none": None,
        "true": True,
        "zero": 0,
        "minus zero": -0.0,
        "inf": math.inf,
        "minus inf": -math.inf,
        "subnormal": 5e-324,
        "big": 2**200 + 1,
        "very negative": -(2**64),
        "complex": complex(1.5, -0.0),
        "text": "straße ☃ \U0001f600 \0",
        "surrogate": "\udc80 and \ud800",
        "bytes": b"\0\xff",
        "no bytes": b"",
        "bytearray": bytearray(b"abc"),
        "enum": Phase.DECAY,
        "flag": Flags.A | Flags.B,
        "dataclass": Schedule("cosine", (0.1, 0.2), Phase.WARMUP),
        "named tuple": Point(1, [2]),
        "numpy scalar": np.float32(1.1),
        "numpy int": np.uint64(2**64 - 1),
        "numpy bool": np.bool_(True),
        "numpy time": np.datetime64("2031-05-01", "D"),
        "numpy array": np.arange(12, dtype=np.int16).reshape(3, 4),
        "numpy fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "numpy empty": np.empty((0, 3), np.float16),
        "numpy text": np.array(["a", "bcd"]),
        "numpy fields": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 3),
        "size": torch.Size([2, 3]),
        "layout": torch.strided,
        "set": {3, 1, 2},
        "frozenset": frozenset({"a", ("b", 1)}),
        "range": range(3, 30, 4),
        "slice": slice(None, 5, -1),
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], maxlen=5),
        "default": collections.defaultdict(list, {"a": [1]}),
        "time": datetime.datetime(2031, 5, 1, 12, tzinfo=datetime.UTC),
        "delta": datetime.timedelta(days=-1, microseconds=1),
        "uuid": uuid.UUID(int=7),
        "path": Path("a/b"),
        "generator": generator.bit_generator.state,
        "int keys": {1: "a", -2: {3: 4}, (5, "x"): None, None: 0, 2.5: 1},
        "nested": [[], {}, (), [[{"a": [(1,)]}]]],
        "tuple": (1, (2, [3])),
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """A template with nothing right in it but its keys and containers of them."""
    return {key: _emptied(value) for key, value in state.items()}


def _emptied(value: Any) -> Any:
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = _emptied(item)
        return made
    if isinstance(value, list):
        return [_emptied(item) for item in value]
    return None


def assert_exact(found: Any, expected: Any, place: str = "") -> None:
    """Equal in value and in every type within; NaN equals NaN of the same bits, zero differs from minus zero."""
    assert type(found) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, place
        assert torch.equal(found, expected), place
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.tobytes() == expected.tobytes(), place
        assert (found.flags.c_contiguous, found.flags.f_contiguous) == (expected.flags.c_contiguous, expected.flags.f_contiguous), place
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for (mine, one), (theirs, other) in zip(found.items(), expected.items(), strict=True):
            assert type(mine) is type(theirs), place
            assert_exact(one, other, f"{place}[{theirs!r}]")
        assert getattr(found, "default_factory", None) is getattr(expected, "default_factory", None), place
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(found) == len(expected), place
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_exact(one, other, f"{place}[{index}]")
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None), place
    elif isinstance(expected, float):
        assert math.copysign(1, found) == math.copysign(1, expected), place
        assert found == expected or (math.isnan(found) and math.isnan(expected)), place
    else:
        assert found == expected, place


# -- objects -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_planner", [BalancedSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("load_planner", [ReshardLoadPlanner, DefaultLoadPlanner])
@pytest.mark.filterwarnings("ignore:.*weights_only.*:FutureWarning")
def test_every_object_comes_back_exactly(tmp_path: Path, save_planner: Any, load_planner: Any) -> None:
    expected = objects()
    if load_planner is DefaultLoadPlanner:
        # It cannot load an empty dict in a list that it has saved itself, and takes all keys for strings when it puts values back.
        del expected["nested"], expected["int keys"]
    dcp_save({"kept": expected, "nan": math.nan}, storage_writer=ShardWriter(tmp_path / "a"), planner=save_planner())
    template: dict[str, Any] = {"kept": blank(expected), "nan": 0}
    found = load(template, tmp_path / "a", planner=load_planner())
    assert math.isnan(found["nan"])
    assert_exact(found["kept"], expected)


def test_objects_are_built_without_a_template(tmp_path: Path) -> None:
    save({"kept": objects()}, tmp_path / "a")
    planner = ReshardLoadPlanner(build_from_metadata=True)
    load({}, tmp_path / "a", planner=planner)
    assert_exact(planner.built, {"kept": objects()})


def test_what_was_loaded_may_be_changed(tmp_path: Path) -> None:
    save({"array": np.zeros(3), "list": [1], "inner": {"bytes": bytearray(2)}}, tmp_path / "a")
    found = load({"array": None, "list": None, "inner": {"bytes": None}}, tmp_path / "a")
    found["array"][0] = 1
    found["list"].append(2)
    found["inner"]["bytes"][0] = 1
    again = load({"array": None, "list": None, "inner": {"bytes": None}}, tmp_path / "a")
    assert (again["array"].tolist(), again["list"], again["inner"]["bytes"]) == ([0, 0, 0], [1], bytearray(2))


def test_fifty_megabytes_of_bytes_come_back(tmp_path: Path) -> None:
    save({"blob": LARGE, "array": np.frombuffer(LARGE, np.uint8)[: 9 << 20], "pair": {"blob": bytearray(LARGE[: 5 << 20])}}, tmp_path / "a")
    found = load({"blob": None, "array": None, "pair": {"blob": None}}, tmp_path / "a")
    assert found["blob"] == LARGE
    assert found["array"].tobytes() == LARGE[: 9 << 20]
    assert found["pair"]["blob"] == bytearray(LARGE[: 5 << 20])


def generator_of_numbers() -> Any:
    yield 1


class Unregistered:
    pass


class Text(str):
    __slots__ = ()


class Unknown(enum.Enum):
    A = 1


@dataclasses.dataclass
class Plain:
    a: int = 1


REFUSED: dict[str, Any] = {
    "lambda": lambda: 1,
    "function": generator_of_numbers,
    "generator": generator_of_numbers(),
    "class": Unregistered,
    "instance": Unregistered(),
    "subclass of str": Text("x"),
    "enum": Unknown.A,
    "dataclass": Plain(),
    "module": math,
    "object array": np.array([object()]),
    "memory": memoryview(b"abc"),
    "iterator": iter([1]),
    "exception": ValueError("x"),
    "torch generator": torch.Generator(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", ["alone", "in a list", "in a tuple", "in a dict with int keys"])
@pytest.mark.parametrize("planner", [BalancedSavePlanner, DefaultSavePlanner])
def test_what_cannot_be_kept_is_refused_at_save_naming_the_key(tmp_path: Path, name: str, place: str, planner: Any) -> None:
    value = REFUSED[name]
    held = {"alone": value, "in a list": [1, value], "in a tuple": (value, 2), "in a dict with int keys": {7: value}}[place]
    state = {"fine": torch.ones(2), "part": {"odd": held, "other": 1}}
    error = refused(dcp_save, state, storage_writer=ShardWriter(tmp_path / "a"), planner=planner())
    assert isinstance(error, UnencodableObjectError)
    assert error.tensor is not None
    assert error.tensor.startswith("part.odd")
    assert attempts_in(tmp_path) == []


def test_a_value_that_contains_itself_is_refused_at_save(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    knot: dict[str, Any] = {}
    knot["self"] = knot
    for value in (loop, (loop,), {3: loop}, knot):
        error = refused(save, {"odd": value}, tmp_path / "a")
        assert isinstance(error, StateError)
    assert attempts_in(tmp_path) == []


def test_a_refusal_reaches_the_future_of_an_async_save(tmp_path: Path) -> None:
    def asynchronous() -> None:
        writer = ShardWriter(tmp_path / "a")
        dcp_async_save({"odd": [Unregistered()]}, storage_writer=writer, planner=BalancedSavePlanner(), no_dist=True).result()  # type: ignore[union-attr]

    error = refused(asynchronous)
    assert isinstance(error, UnencodableObjectError)
    assert error.tensor == "odd"
    assert attempts_in(tmp_path) == []


# -- the second save -----------------------------------------------------------------------------------------------------


def mixed() -> dict[str, Any]:
    shared = torch.arange(300.0)
    return {
        "model": {"w": torch.randn(300, 200, generator=torch.Generator().manual_seed(1)), "tied": shared, "also": shared, "empty": {}},
        "kept": objects(),
        "extra": [torch.arange(3), {"a": (torch.zeros(()), 1)}],
    }


@pytest.mark.parametrize("codec", ["auto", "raw", "zstd"])
def test_a_second_save_after_a_load_is_identical(tmp_path: Path, codec: str) -> None:
    save(mixed(), tmp_path / "a", codec=codec)
    planner = ReshardLoadPlanner(build_from_metadata=True)
    load({}, tmp_path / "a", planner=planner)
    save(planner.built, tmp_path / "b", codec=codec)
    template = mixed()
    template["model"]["w"].zero_()
    save(load(template, tmp_path / "b"), tmp_path / "c", codec=codec)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert verify_checkpoint(tmp_path / "c").faults == ()


class Counter:
    """A ``Stateful`` that remembers how it was treated."""

    def __init__(self, start: int) -> None:
        self.weights = torch.full((3,), float(start))
        self.history = [start]
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "history": self.history, "tuple": (1, self.history[0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.weights.copy_(state["weights"])
        self.history = state["history"]
        assert state["tuple"] == (1, state["history"][0])


def test_stateful_objects_stay_the_same_objects(tmp_path: Path) -> None:
    saved = {"one": Counter(5), "two": Counter(6), "plain": {"x": torch.ones(2)}}
    kept = dict(saved)
    save(saved, tmp_path / "a")
    assert {key: saved[key] is kept[key] for key in saved} == dict.fromkeys(saved, True)
    target: dict[str, Any] = {"one": Counter(0), "two": Counter(0), "plain": {"x": torch.zeros(2)}}
    kept = dict(target)
    weights, inner = target["one"].weights, target["plain"]["x"]
    load(target, tmp_path / "a")
    assert {key: target[key] is kept[key] for key in target} == dict.fromkeys(target, True)
    assert target["one"].weights is weights
    assert target["plain"]["x"] is inner
    assert (weights.tolist(), target["one"].history, target["two"].history) == ([5.0] * 3, [5], [6])
    assert (target["one"].loads, target["two"].loads) == (1, 1)
    assert inner.tolist() == [1.0, 1.0]


# -- containers ----------------------------------------------------------------------------------------------------------

GROWN: list[tuple[Any, Any]] = [
    ([], [1, 2, 3]),
    ([1, 2, 3], []),
    ([1], [1, 2, 3]),
    ([1, 2, 3, 4], [9]),
    ((), (1, 2)),
    ((1, 2, 3), (4,)),
    (set(), {1, 2}),
    (collections.deque(), collections.deque([1], maxlen=2)),
    ([[], []], [[1], [2, 3]]),
]
TENSORS = torch.arange(4.0)
RESHAPED: list[tuple[Any, Any]] = [
    ({}, {"a": 1}),
    ({"a": 1}, {}),
    ({}, {"a": TENSORS}),
    ({"a": torch.zeros(4)}, {}),
    ([], [TENSORS]),
    ([torch.zeros(4)], []),
    ([torch.zeros(4)], [TENSORS, TENSORS + 1]),
    ([torch.zeros(4), torch.zeros(4)], [TENSORS]),
    ({"a": {}}, {"a": {"b": TENSORS}}),
    ([{"a": torch.zeros(4)}], [{"a": TENSORS, "b": TENSORS + 1}]),
    ((torch.zeros(4),), (TENSORS, TENSORS + 1)),
    ([], {"a": TENSORS}),
    ({"a": torch.zeros(4)}, [TENSORS]),
]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(("template", "stored"), GROWN)
def test_sequences_of_plain_values_are_restored_whole(tmp_path: Path, template: Any, stored: Any, deep: bool) -> None:
    save({"x": {"y": stored} if deep else stored, "t": TENSORS}, tmp_path / "a")
    state = {"x": {"y": copy.deepcopy(template)} if deep else copy.deepcopy(template), "t": torch.zeros(4)}
    found = load(state, tmp_path / "a")
    assert_exact(found["x"]["y"] if deep else found["x"], stored)


@pytest.mark.parametrize(("template", "stored"), RESHAPED)
def test_containers_that_grew_or_shrank_are_whole_or_reported(tmp_path: Path, template: Any, stored: Any) -> None:
    """Never a state that is partly the checkpoint's without a word."""
    save({"x": stored, "t": TENSORS}, tmp_path / "a")
    state = {"x": copy.deepcopy(template), "t": torch.zeros(4)}
    error = refused(load, state, tmp_path / "a")
    assert isinstance(error, KeyMismatchError)
    assert all(key == "x" or key.startswith("x.") for key in (*error.missing, *error.unexpected))
    planner = ReshardLoadPlanner(strict=False)
    load({"x": copy.deepcopy(template), "t": torch.zeros(4)}, tmp_path / "a", planner=planner)
    assert (planner.report.missing, planner.report.unexpected) == (error.missing, error.unexpected)
    assert error.missing or error.unexpected
    built = ReshardLoadPlanner(build_from_metadata=True)
    load({}, tmp_path / "a", planner=built)
    assert_exact(built.built["x"], stored)


def test_two_paths_of_one_name_are_kept_apart_or_refused(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(3)}}
    error = refused(save, state, tmp_path / "a")
    assert isinstance(error, DuplicateKeyError)
    assert error.tensor == "a.b"
    assert attempts_in(tmp_path) == []


def test_int_and_str_keys_of_one_name_are_kept_apart_or_refused(tmp_path: Path) -> None:
    for inner in ({1: torch.ones(2), "1": torch.zeros(3)}, {1: 2, "1": 2}, {1: {"b": 2}, "1": {"c": 3}}):
        error = refused(save, {"a": inner}, tmp_path / "a")
        assert isinstance(error, DuplicateKeyError)
        assert error.tensor == "a.1"


def test_a_container_where_a_tensor_was_is_reported(tmp_path: Path) -> None:
    save({"x": torch.ones(2), "y": [torch.ones(2)]}, tmp_path / "a")
    error = refused(load, {"x": [1, 2], "y": [torch.zeros(2)]}, tmp_path / "a")
    assert isinstance(error, KindMismatchError)
    error = refused(load, {"x": torch.zeros(2), "y": [torch.zeros(3)]}, tmp_path / "a")
    assert isinstance(error, ShapeMismatchError)
    assert error.tensor == "y.0"
