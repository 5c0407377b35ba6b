"""Objects come back with exactly their value and type, or are refused by name; hostile bytes are refused in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import random
import struct
import threading
import tracemalloc
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_engine.errors import (
    InvalidOptionError,
    LimitExceededError,
    MalformedCheckpointError,
    StateError,
    UnencodableObjectError,
)
from dcp_engine.objects import MAX_DEPTH, decode_object, encode_object, register_type

Point = namedtuple("Point", ["x", "y"])


class Colour(enum.Enum):
    RED = "r"
    CRIMSON = "r"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Options:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    runs: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", self.runs + 1)


class Schedule:
    def __init__(self, steps: int) -> None:
        self.steps = steps


class MyDict(dict[Any, Any]):
    pass


class MyInt(int):
    pass


class MyStr(str):
    __slots__ = ()


for _cls in (Point, Colour, Level, Access, Options):
    register_type(_cls, name=f"tests.{_cls.__name__}")
register_type(Schedule, name="tests.Schedule", to_fields=lambda s: {"steps": s.steps}, from_fields=lambda f: Schedule(f["steps"]))


def round_trip(value: Any) -> Any:
    data = encode_object(value, key="k")
    back = decode_object(data, key="k")
    assert encode_object(back, key="k") == data
    return back


def bits(value: Any) -> Any:
    """A value in which everything that must survive can be compared with ``==``: types, NaN payloads, zero signs, order."""
    if isinstance(value, float) and type(value) is float:
        return (float, struct.pack("<d", value))
    if type(value) is complex:
        return (complex, struct.pack("<dd", value.real, value.imag))
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size):
        return (type(value), getattr(value, "maxlen", None), [bits(v) for v in value])
    if isinstance(value, dict):
        return (type(value), getattr(value, "default_factory", None), [(bits(k), bits(v)) for k, v in value.items()])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(map(repr, map(bits, value))))
    if isinstance(value, np.ndarray):
        return (np.ndarray, value.dtype, value.shape, value.flags.f_contiguous, value.flags.c_contiguous, value.tobytes())
    if isinstance(value, np.generic):
        return (type(value), value.dtype, value.tobytes())
    if isinstance(value, torch.Tensor):
        raw = value.detach().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
        return (type(value), value.dtype, tuple(value.shape), value.requires_grad, raw)
    if isinstance(value, Decimal):
        return (Decimal, str(value))
    if isinstance(value, slice):
        return (slice, bits([value.start, value.stop, value.step]))
    return (type(value), value)


VALUES: list[Any] = [
    None,
    True,
    False,
    *(sign * 2**n + d for n in (0, 7, 31, 63, 64, 127, 5000) for d in (-1, 0, 1) for sign in (1, -1)),
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0]),
    *(1 - 2j, complex(-0.0, math.nan)),
    *("", "a", "ü\U0001f600\0", "\ud800", "x\udfffy", "a" * 70000),
    *(b"", b"\xff" * 300, b"\0" * 4097, b"\0" * 65536, bytearray(b"ab"), bytearray(70000)),
    *([], (), {}, set(), frozenset(), [[[]]], ((),), [1, "a", None, 2**80, "\ud800"]),
    {1: "int", "1": "str", (1, 2): "tuple", None: 0, 2.5: 0, b"b": 0, frozenset({1}): 0, Colour.RED: 1, torch.float32: 2},
    *({True: 1}, {1: 1}, {1.0: 1}, {math.nan: 1}, {"b": 1, "a": 2}),
    OrderedDict([("b", 1), ("a", [2])]),
    *(defaultdict(list, {"a": [1]}), defaultdict(None), defaultdict(Counter, {1: Counter("aab")})),
    *(Counter("abca"), deque([1, (2,)]), deque([1], maxlen=3), deque(maxlen=0)),
    *({3, 1, "a", (2, None)}, frozenset({b"x", 1.5}), {frozenset({1, 2}), frozenset({3})}),
    *(range(3), range(10, -5, -3), range(2**70), slice(None), slice(1, 2**65, -1), slice("a", None, 2.0), ...),
    *(Decimal("1.10"), Decimal("-0E+5"), Decimal("Infinity"), Decimal("0.1") ** 3, Fraction(-1, 3), Fraction(2**200, 3)),
    *(dt.date(1, 1, 1), dt.time(23, 59, 59, 999999, fold=1), dt.timedelta(-1, 5, 7), dt.UTC, dt.timedelta.min),
    dt.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
    dt.datetime(2024, 2, 29, tzinfo=dt.timezone(dt.timedelta(hours=-5, minutes=-30), "X")),
    *(uuid.UUID(int=5), pathlib.PurePosixPath("a/../b"), pathlib.PureWindowsPath(r"c:\x"), pathlib.Path("/x/y")),
    *(np.float32(-0.0), np.float64(1.5), np.bool_(True), np.int8(-5), np.uint64(2**64 - 1), np.complex64(1j), np.float16(1)),
    *(np.str_("x\0"), np.bytes_(b"a\0"), np.datetime64("2024-01-01", "ns"), np.datetime64("NaT", "s"), np.timedelta64(5, "25s")),
    np.array((1, 2.5), dtype=[("a", "<i4"), ("b", ">f8")])[()],
    *(np.dtype(">i2"), np.dtype([("a", "u1"), ("b", "<f4", (2, 3))], align=True), np.dtype("M8[us]"), np.dtype("U7")),
    *(torch.float32, torch.bfloat16, torch.quint8, torch.strided, torch.sparse_csr, torch.channels_last, torch.per_tensor_affine),
    *(torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"), torch.Size([]), torch.Size([2, 0, 3])),
    *(Point(1, [2]), Colour.CRIMSON, Colour.BLUE, Level.LOW, Access.READ, Access.READ | Access.WRITE, Access(0)),
    *(random.Random(1).getstate(), np.random.default_rng(1).bit_generator.state, np.random.PCG64DXSM(2).state),
    *(np.random.RandomState(3).get_state(), np.random.Philox(4).state, np.random.SFC64(4).state, np.random.MT19937(4).state),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_value_and_type_come_back_exactly(value: Any) -> None:
    assert bits(round_trip(value)) == bits(value)
    assert bits(round_trip([{"a": (value,)}])) == bits([{"a": (value,)}])


ARRAY_DTYPES = [
    "?",
    "b",
    "B",
    "<i2",
    ">i2",
    "<u2",
    "<i4",
    ">u4",
    "<i8",
    "<u8",
    "<f2",
    ">f4",
    "<f4",
    "<f8",
    "<c8",
    ">c16",
    "M8[ns]",
    ">m8[s]",
]


@pytest.mark.parametrize("dtype", [*ARRAY_DTYPES, "S3", "U5", ">U2", "V4", [("a", "<i4"), ("b", ">f8", (2,)), ("c", [("d", "S2")])]])
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (3,), (2, 3, 4)])
def test_numpy_arrays_keep_dtype_shape_order_and_bits(dtype: Any, shape: tuple[int, ...]) -> None:
    kind = np.dtype(dtype)
    num_bytes = math.prod(shape) * kind.itemsize
    high = 2 if kind.kind == "b" else 97
    raw = np.random.default_rng(0).integers(0, high, num_bytes, dtype=np.uint8)
    if kind.kind == "U":
        raw = np.frombuffer(np.full(num_bytes // 4, 0x1F600, kind.byteorder + "u4").tobytes(), np.uint8)
    array = np.empty(shape, kind)
    array.reshape(-1).view(np.uint8)[:] = raw
    for variant in (array, np.asfortranarray(array), array[..., ::-1] if shape else array):
        back = round_trip({"a": variant})["a"]
        assert back.dtype == variant.dtype
        assert back.shape == variant.shape
        assert back.tobytes() == variant.tobytes()
        assert back.flags.writeable
        if variant.flags.f_contiguous:
            assert back.flags.f_contiguous


TENSOR_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_tensors_inside_objects_keep_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    assert bits(round_trip((tensor,))[0]) == bits(tensor)
    assert bits(round_trip([tensor.T if len(shape) == 2 else tensor])[0]) == bits((tensor.T if len(shape) == 2 else tensor).contiguous())


def test_parameters_stay_parameters_and_views_are_resolved() -> None:
    frozen = torch.nn.Parameter(torch.tensor([1.5, -0.0]), requires_grad=False)
    assert bits(round_trip(frozen)) == bits(frozen)
    assert round_trip(torch.ones(2, requires_grad=True)).requires_grad
    assert round_trip(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    back = round_trip([torch.zeros(2)])[0]
    back += 1
    assert back.tolist() == [1.0, 1.0]


def test_registered_classes_come_back_without_running_their_init() -> None:
    options = Options(0.1)
    assert options.runs == 1
    back = round_trip({"o": [options]})["o"][0]
    assert back == options
    assert back.runs == 1
    schedule = round_trip(Schedule(7))
    assert type(schedule) is Schedule
    assert schedule.steps == 7


def test_timezone_utc_is_the_singleton() -> None:
    assert round_trip(dt.datetime(2024, 1, 1, tzinfo=dt.UTC)).tzinfo is dt.UTC


def test_sets_encode_alike_whatever_their_history() -> None:
    forward, backward = set(range(0, 4000, 8)), set(range(3992, -8, -8))
    grown = set(range(100000)) & forward
    assert encode_object(forward, key="k") == encode_object(backward, key="k") == encode_object(grown, key="k")
    assert encode_object(frozenset({1, "a", (2,)}), key="k") == encode_object(frozenset({(2,), "a", 1}), key="k")


def test_wire_form_is_the_documented_one() -> None:
    assert encode_object([None, True, 1, -1.5, "a", b"b", {2: []}], key="k") == msgpack.packb([None, True, 1, -1.5, "a", b"b", {2: []}])
    assert encode_object((1, 2**64), key="k") == bytes.fromhex("93 c7000a 01 92 c70001 c409 000000000000000001")
    assert encode_object({2, 1}, key="k") == bytes.fromhex("93 c7000b 01 02")
    assert encode_object(torch.float32, key="k") == bytes.fromhex("92 c70021 ad") + b"torch.float32"
    assert encode_object(Level.LOW, key="k") == bytes.fromhex("93 c70028 ab") + b"tests.Level" + b"\xa3LOW"
    assert encode_object(np.array([1], "<u2"), key="k") == bytes.fromhex("95 c7001e a3") + b"<u2" + bytes.fromhex("91 01 a143 c402 0100")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec=None, exclude_categories=()))
    | st.binary()
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
    | st.decimals()
    | st.fractions()
    | st.sampled_from([torch.int8, torch.Size([1, 2]), Colour.RED, Level.LOW, range(5), ...])
)
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
OBJECTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(dict, d))
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 5))
        | st.sets(KEYS, max_size=4)
        | st.binary().map(bytearray)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(OBJECTS)
def test_any_nesting_comes_back_exactly(value: Any) -> None:
    assert bits(round_trip(value)) == bits(value)


def _decode_hostile(data: bytes) -> None:
    # A damaged name of a registered class is StateError: nothing tells it from one that this program never registered.
    with contextlib.suppress(MalformedCheckpointError, LimitExceededError, StateError):
        decode_object(data, key="k", budget_bytes=1 << 20)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_or_a_typed_error(data: bytes) -> None:
    _decode_hostile(data)


@settings(deadline=None)
@given(st.sampled_from(VALUES), st.data())
def test_damaged_bytes_are_a_value_or_a_typed_error(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(encode_object(value, key="k"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(encoded) - 1, 100)))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "set":
            encoded[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del encoded[at : at + data.draw(st.integers(1, 3))]
        else:
            encoded[at:at] = data.draw(st.binary(min_size=1, max_size=3))
        if not encoded:
            break
    _decode_hostile(bytes(encoded))


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_every_truncation_is_refused(cut: int) -> None:
    data = encode_object({"a": [1, (2, "x" * 50)], "b": Point(1, 2)}, key="k")
    with pytest.raises(MalformedCheckpointError):
        decode_object(data[:cut], key="k")


TUPLE, SET, STR, INT = (b"\xc7\x00" + bytes([code]) for code in (10, 11, 2, 1))
MALFORMED = {
    "nothing": b"",
    "trailing byte": b"\xc0\xc0",
    "reserved byte": b"\xc1",
    "invalid utf-8": b"\xa1\xff",
    "timestamp": b"\xd6\xff\0\0\0\0",
    "unknown extension": b"\x91\xc7\x00\x7f",
    "extension with payload": b"\x91\xc7\x01\x0a\x00",
    "tag alone": TUPLE,
    "tag in the middle": b"\x92\x01" + TUPLE,
    "two tags": b"\x92" + TUPLE + TUPLE,
    "tag as key": b"\x81" + TUPLE + b"\x01",
    "tag as value": b"\x81\x01" + TUPLE,
    "unhashable key": b"\x81\x90\x01",
    "same key twice": b"\x82\x01\x01\x01\x02",
    "equal keys of two types": b"\x82\x01\x01\xc3\x02",
    "same element twice": b"\x93" + SET + b"\x01\x01",
    "unhashable element": b"\x92" + SET + b"\x90",
    "string needs no surrogate form": b"\x92" + STR + b"\xc4\x01a",
    "int needs no long form": b"\x92" + INT + b"\xc4\x01\x05",
    "int not shortest": b"\x92" + INT + b"\xc4\x0b" + b"\0" * 8 + b"\x01\0\0",
    "int over the limit": b"\x92" + INT + b"\xc6" + struct.pack(">I", (1 << 20) + 1) + b"\x01" * ((1 << 20) + 1),
    "nested too deep": b"\x91" * 5000 + b"\xc0",
    "nested maps too deep": b"\x81\x01" * 5000 + b"\xc0",
    "array promises too much": b"\xdd\xff\xff\xff\xff",
    "map promises too much": b"\xdf\xff\xff\xff\xff",
    "bin promises too much": b"\xc6\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_refused(name: str) -> None:
    with pytest.raises(MalformedCheckpointError) as caught:
        decode_object(MALFORMED[name], key="model.extra")
    assert caught.value.tensor == "model.extra"


def tagged(code: int, *parts: Any) -> bytes:
    return msgpack.packb([msgpack.ExtType(code, b""), *parts])


HOSTILE_PARTS = {
    "array shape and bytes disagree": tagged(30, "<f8", [10**9], "C", b"\0" * 8),
    "array shape overflows": tagged(30, "<f8", [2**62, 2**62], "C", b""),
    "array with a negative dimension": tagged(30, "<f8", [-1, -1], "C", b"\0" * 8),
    "array of objects": tagged(30, "|O", [1], "C", b"\0" * 8),
    "array of objects in a structure": tagged(30, [8, False, [["a", 0, "|O"]]], [1], "C", b"\0" * 8),
    "array dtype by alias": tagged(30, "float64", [1], "C", b"\0" * 8),
    "array dtype deep": tagged(30, "V99999999999", [0], "C", b""),
    "array order": tagged(30, "<f8", [1], "K", b"\0" * 8),
    "field outside the structure": tagged(30, [4, False, [["a", 100, "<f8"]]], [1], "C", b"\0" * 4),
    "scalar of the wrong size": tagged(31, "<f8", b"\0" * 4),
    "tensor shape and bytes disagree": tagged(36, "float32", [2**40], False, False, b"\0" * 4),
    "tensor of no elements and overflowing strides": tagged(36, "float32", [0, 2**62, 2**62, 2**62], False, False, b""),
    "tensor dtype unknown": tagged(36, "float33", [1], False, False, b"\0" * 4),
    "tensor dtype is a module": tagged(36, "nn", [1], False, False, b"\0" * 4),
    "quantised tensor": tagged(36, "qint8", [1], False, False, b"\0"),
    "gradient of an integer": tagged(36, "int8", [1], False, True, b"\0"),
    "constant that is a function": tagged(33, "torch.load"),
    "device": tagged(34, "cpu; import os"),
    "default factory by import": tagged(14, "os.system", {}),
    "path class": tagged(26, "Popen", "x"),
    "range step": tagged(17, 0, 1, 0),
    "fraction by zero": tagged(7, 1, 0),
    "fraction not reduced": tagged(7, 2, 4),
    "decimal": tagged(6, "1_0"),
    "decimal context": tagged(6, "1e99999999999999999999"),
    "date": tagged(21, 2024, 2, 30),
    "timedelta overflow": tagged(23, 10**12, 0, 0),
    "bool for int": tagged(21, True, 1, 1),
    "uuid": tagged(25, b"short"),
    "deque beyond maxlen": tagged(16, 1, [1, 2]),
    "deque with a negative maxlen": tagged(16, -1, []),
    "size of text": tagged(35, "a"),
    "missing parts": tagged(3, 1.0),
    "record of an enum": tagged(41, "tests.Colour", {}),
    "enum of a record": tagged(40, "tests.Options", "x"),
    "flag by name": tagged(40, "tests.Access", "READ"),
    "flag out of range": tagged(40, "tests.Access", 64),
}


@pytest.mark.parametrize("name", HOSTILE_PARTS)
def test_parts_that_no_writer_produces_are_refused(name: str) -> None:
    with pytest.raises(MalformedCheckpointError):
        decode_object(HOSTILE_PARTS[name], key="k")


@pytest.mark.parametrize(
    "bomb", [b"\xdd\x00\x0f\x42\x40" * 200_000, b"\xdf\x00\x07\xa1\x20" * 200_000, b"\x92" * 1_000_000], ids=["array", "map", "tree"]
)
def test_promises_of_nested_containers_allocate_nothing(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedCheckpointError):
            decode_object(bomb, key="k")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_budget_bounds_what_tiny_containers_take() -> None:
    data = msgpack.packb([[] for _ in range(200_000)])
    assert decode_object(data, key="k") == [[]] * 200_000
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceededError) as caught:
            decode_object(data, key="k", budget_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.tensor == "k"
    with pytest.raises(LimitExceededError):
        decode_object(encode_object(b"\0" * 100, key="k"), key="k", budget_bytes=50)


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates making them; old states still hold them
        return torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.quint8)


REFUSED: dict[str, tuple[Any, str]] = {
    "lambda": (lambda: 1, "function"),
    "class": (int, "type"),
    "module": (math, "module"),
    "lock": (threading.Lock(), "lock"),
    "generator": ((i for i in ()), "generator"),
    "object": (object(), "object"),
    "memoryview": (memoryview(b"a"), "memoryview"),
    "dict subclass": (MyDict(), "MyDict"),
    "int subclass": (MyInt(1), "MyInt"),
    "str subclass": (MyStr("a"), "MyStr"),
    "unregistered namedtuple": (namedtuple("Other", "a")(1), "Other"),
    "unregistered enum": (enum.IntEnum("Loose", "A").A, "Loose"),
    "torch return type": (torch.max(torch.zeros(1, 1), 0), "max"),
    "numpy objects": (np.array([None]), "object"),
    "numpy long double": (np.longdouble(1), "longdouble|float128"),
    "numpy matrix": (np.ma.masked_array([1]), "MaskedArray"),
    "numpy generator": (np.random.default_rng(), "Generator"),
    "default factory": (defaultdict(lambda: 1), "default_factory"),
    "sparse tensor": (torch.eye(2).to_sparse(), "sparse_coo"),
    "quantised tensor": (_quantised(), "quint8"),
    "meta tensor": (torch.zeros(1, device="meta"), "meta"),
    "time zone": (dt.datetime(2024, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})()), "Zone"),
    "too large an int": (1 << (8 << 20), "int of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_key_path_and_type(name: str) -> None:
    value, named = REFUSED[name]
    with pytest.raises(UnencodableObjectError, match=named) as caught:
        encode_object({"lr": [0.1, (value,)]}, key="optimizer.defaults")
    assert caught.value.message.startswith("optimizer.defaults['lr'][1][0] cannot be stored: ")
    assert caught.value.tensor == "optimizer.defaults"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({1: [print]}, "k[1][0]"),
        ({print: 1}, "k<key builtin_function_or_method>"),
        ({(1, print)}, "k<element>[1]"),
        (OrderedDict(a=print), "k['a']"),
        (Options(print), "k.lr"),  # type: ignore[arg-type]
        (Point(1, [print]), "k.y[0]"),
        (deque([print]), "k[0]"),
        (Schedule(print), "k.steps"),  # type: ignore[arg-type]
        ({1 << 20000: print}, "k[int]"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_path_leads_to_the_value(value: Any, place: str) -> None:
    with pytest.raises(UnencodableObjectError) as caught:
        encode_object(value, key="k")
    assert caught.value.message.split(" cannot be stored")[0] == place


def _list_in_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def _dict_in_itself() -> Any:
    value: dict[str, Any] = {}
    value["a"] = (value,)
    return value


@pytest.mark.parametrize("make", [_list_in_itself, _dict_in_itself])
def test_cycles_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UnencodableObjectError, match="contains itself"):
        encode_object(make(), key="k")


def test_depth_is_bounded_at_save() -> None:
    value: Any = None
    for _ in range(MAX_DEPTH):
        value = [value]
    assert bits(round_trip(value)) == bits(value)
    with pytest.raises(UnencodableObjectError, match=f"more than {MAX_DEPTH} deep"):
        encode_object([value], key="k")


def test_shared_parts_are_no_cycle() -> None:
    shared = [1]
    assert round_trip([shared, (shared, shared)]) == [[1], ([1], [1])]


def test_dataclass_with_other_attributes_is_refused() -> None:
    @dataclasses.dataclass
    class Loose:
        a: int

    register_type(Loose, name="tests.Loose")
    value = Loose(1)
    value.b = 2  # type: ignore[attr-defined]
    with pytest.raises(UnencodableObjectError, match="b are no fields"):
        encode_object(value, key="k")


def test_unregistered_name_says_how_to_register() -> None:
    with pytest.raises(StateError, match=r"register_type\(\.\.\., name='acme.Config'\)") as caught:
        decode_object(tagged(41, "acme.Config", {}), key="k")
    assert caught.value.tensor == "k"


def test_changed_fields_are_reported() -> None:
    with pytest.raises(StateError, match="fields of Options") as caught:
        decode_object(tagged(41, "tests.Options", {"lr": 0.1}), key="k")
    assert caught.value.expected == "betas, lr, runs"
    assert caught.value.found == "lr"


def test_errors_of_registered_functions_are_typed() -> None:
    class Fragile:
        pass

    def fail(_: Any) -> Any:
        raise OSError("no")

    register_type(Fragile, name="tests.Fragile", to_fields=fail, from_fields=fail)
    with pytest.raises(UnencodableObjectError, match=r"to_fields of 'tests.Fragile' failed"):
        encode_object(Fragile(), key="k")
    with pytest.raises(StateError, match=r"from_fields of 'tests.Fragile' failed"):
        decode_object(tagged(41, "tests.Fragile", {}), key="k")


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (int, {"name": "x"}),
        (torch.Tensor, {"name": "x"}),
        (MyDict, {"name": "x"}),
        (MyDict, {"name": "x", "to_fields": dict}),
        (Colour, {"name": "x", "to_fields": dict, "from_fields": dict}),
        (Options, {"name": "another name"}),
        (Schedule, {"name": "tests.Options", "to_fields": vars, "from_fields": vars}),
        (Options, {"name": ""}),
        (3, {"name": "x"}),
    ],
)
def test_registrations_that_make_no_sense_are_refused(cls: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        register_type(cls, **options)


def test_redefined_class_replaces_the_earlier_one() -> None:
    def define() -> type:
        @dataclasses.dataclass
        class Cell:
            a: int

        register_type(Cell, name="tests.Cell")
        return Cell

    old, new = define(), define()
    assert type(round_trip(new(1))) is new
    with pytest.raises(UnencodableObjectError):
        encode_object(old(1), key="k")


def test_subclass_of_a_registered_class_is_refused() -> None:
    with pytest.raises(UnencodableObjectError, match="Later"):
        encode_object(type("Later", (Options,), {})(0.1), key="k")


def test_fifty_megabytes_are_copied_once() -> None:
    blob = bytes(50_000_000)
    tracemalloc.start()
    try:
        data = encode_object({"a": [blob]}, key="k")
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()
    assert decode_object(data, key="k") == {"a": [blob]}


@pytest.mark.parametrize("dtype", ["S0", "U0", "V0"])
def test_arrays_of_elements_without_bytes_keep_their_type_and_claim_no_memory(dtype: str) -> None:
    array: np.ndarray[Any, Any] = np.ndarray((2, 3), np.dtype(dtype))
    found = decode_object(encode_object(array, key="k"), key="k")
    assert isinstance(found, np.ndarray)
    assert (found.dtype.str, found.shape) == (np.dtype(dtype).str, (2, 3))

    hostile = msgpack.packb([msgpack.ExtType(30, b""), np.dtype(dtype).str, [1 << 40], "C", b""])
    claimed = decode_object(hostile, key="k")
    assert isinstance(claimed, np.ndarray)
    assert claimed.nbytes == 0


@pytest.mark.parametrize("paths", [{"a.b": ("a", "b"), "c.0": ("c", 0)}, {"a": (1.5, None, True)}, {1: ()}])
def test_a_dict_of_tuples_is_encoded_as_any_other_dict(paths: dict[Any, Any]) -> None:
    """One value that is no tuple takes the general way: the bytes of all others must be those of the fast one."""
    alone, beside = encode_object(paths, key="x"), encode_object({**paths, "z": []}, key="x")
    assert beside == bytes([alone[0] + 1]) + alone[1:] + encode_object("z", key="x") + encode_object([], key="x")
    assert decode_object(alone, key="x") == paths
    assert all(type(value) is tuple for value in decode_object(alone, key="x").values())  # type: ignore[attr-defined]


def test_tuples_that_need_extensions_of_their_own_are_kept() -> None:
    paths = {"a": (1 << 80, "b"), "c": ("\ud800",), "d": ((1,), ())}
    assert decode_object(encode_object(paths, key="x"), key="x") == paths
