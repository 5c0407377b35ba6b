"""Encode Python values that are not tensors as msgpack with a fixed set of extension types, and back with their exact types.

No pickle, no import by name: a reader makes only the types of the table below and those that the program registered itself.

**Wire form.** One msgpack object, nothing after it.

===================  ==============================================================================================================
Python               msgpack
===================  ==============================================================================================================
None, bool, bytes    nil, bool, bin
int                  int, if -2**63 <= value < 2**64
float                float 64, bit for bit
str                  str, if it is valid Unicode
list                 array
dict                 map in insertion order, keys of any hashable type; no key twice (1, 1.0 and True are one key)
everything else      array whose first element is a *tag*: an ext with the code below and no payload; the *parts* follow as elements
===================  ==============================================================================================================

A tag stands nowhere else. No other ext, and no timestamp, occurs. Parts are values in this same encoding.

====  ========================  ===================================================================================================
code  type                      parts
====  ========================  ===================================================================================================
1     int beyond 64 bits        bin: two's complement, little-endian, shortest; at most 1 MiB
2     str with lone surrogates  bin: UTF-8, surrogates as three bytes each
3     complex                   real float, imaginary float
4     bytearray                 bin
5     Ellipsis                  none
6     Decimal                   str(value), at most 1 MiB
7     Fraction                  numerator, denominator in lowest terms, at most 2**19 bits each
10    tuple                     the elements
11    set                       the elements, sorted by their encoded bytes, none twice
12    frozenset                 the same
13    OrderedDict               map
14    defaultdict               name of the factory or nil, map; factories: bool, int, float, complex, str, bytes, bytearray, list, tuple,
                                dict, set, frozenset, OrderedDict, Counter, deque
15    Counter                   map
16    deque                     maxlen or nil, array
17    range                     start, stop, step
18    slice                     start, stop, step
20    datetime                  year, month, day, hour, minute, second, microsecond, fold, timezone or nil
21    date                      year, month, day
22    time                      hour, minute, second, microsecond, fold, timezone or nil
23    timedelta                 days, seconds (0 to 86399), microseconds (0 to 999999)
24    timezone (fixed offset)   timedelta, name or nil
25    UUID                      bin of 16 bytes, big-endian
26    path                      PurePosixPath, PosixPath, PureWindowsPath or WindowsPath; str
30    numpy.ndarray             dtype, array of dimensions, "C" or "F", bin: the elements in that order
31    numpy scalar              dtype and bin; or "S" and bin (numpy.bytes_); or "U" and str (numpy.str_)
32    numpy.dtype               dtype
33    torch constant            "torch.float32" and the like: a dtype, layout, memory format or quantisation scheme
34    torch.device              str
35    torch.Size                the dimensions
36    torch.Tensor              dtype without "torch.", array of dimensions, whether it is an nn.Parameter, requires_grad, bin: row-major
                                little-endian elements
40    enum (registered)         name of the class, name of the member; for a Flag its int
41    record (registered)       name of the class, map from field names to values
====  ========================  ===================================================================================================

A numpy dtype is numpy's own short string ("<f4", "|b1", "<M8[ns]"), or ``[itemsize, aligned, [[name, offset, dtype], ...]]`` for a
structure, or ``[dtype, dimensions]`` for an array inside one. ``object``, long double, and dtypes of other packages are refused.

**Limits.** Values nest at most 128 deep when written; a reader stops at 1,024 msgpack levels. A bin, str, array or map has fewer than
2**32 elements.

**Exactness.** Types are matched exactly: a subclass of dict, int or str is refused unless it is registered, never turned into its
base. What is not kept: that two places hold the same object, the device and strides of a tensor inside an object (it comes back on the
CPU, contiguous; a conjugate or negative view comes back resolved), its autograd history, and memory layouts of numpy other than C and
Fortran. memoryview is refused. Equal values with equal insertion order give equal bytes.
"""

from __future__ import annotations

import enum
import reprlib
import struct
import threading
from contextlib import suppress
from itertools import chain
from typing import Any

import msgpack

from dcp_engine.errors import DcpEngineError, LimitExceededError, MalformedCheckpointError, StateError, UnencodableObjectError
from dcp_engine.object_arrays import ARRAYS, BY_BASE
from dcp_engine.object_registry import ENUM, RECORD, find_by_type, register_type
from dcp_engine.object_types import INT, MAX_BLOB_BYTES, STANDARD, STR, Blob, Extension, Fields, Refusal, refusal_of

__all__ = ["MAX_DEPTH", "Buffer", "decode_object", "encode_object", "register_type"]

Buffer = bytes | bytearray | memoryview

MAX_DEPTH = 128
"""Levels of arrays and maps that the encoder nests."""

_BY_TYPE: dict[type, Extension] = {**STANDARD, **ARRAYS}
_BY_CODE: dict[int, Extension] = {row.code: row for row in (INT, STR, *_BY_TYPE.values(), *BY_BASE.values(), ENUM, RECORD)}
_TAGS = {code: msgpack.packb(msgpack.ExtType(code, b"")) for code in _BY_CODE}
_TUPLE = msgpack.ExtType(_BY_TYPE[tuple].code, b"")
_SCALARS = frozenset((type(None), bool, int, float, str))
_SMALL_BYTES = 4096  # up to here a copy by the packer costs less than another part to join
_threads = threading.local()


def encode_object(value: object, *, key: str) -> bytes:
    """Encode one value.

    Args:
        value: anything that the table of this module holds, nested up to ``MAX_DEPTH``.
        key: name of the value in the state; only for messages.

    Returns:
        The encoding. Equal values (of equal types and insertion orders) give equal bytes.

    Raises:
        UnencodableObjectError: a part of the value cannot be kept exactly; names the key, the path to that part and its type.

    Thread-safety: safe, as long as nobody changes the value meanwhile.
    """
    encoder = _Encoder()
    try:
        encoder.value(value)
    except Refusal as refusal:
        place = key + "".join(reversed(refusal.steps))
        raise UnencodableObjectError(
            f"{place} cannot be stored: {refusal.reason}", tensor=key, remedy=refusal.remedy
        ) from refusal.__cause__
    return b"".join(encoder.parts)


def decode_object(data: Buffer, *, key: str, budget_bytes: int | None = None) -> object:
    """Decode one value, strictly.

    Args:
        data: what :func:`encode_object` returned; may be hostile.
        key: name of the value; only for messages.
        budget_bytes: how much memory the value may take, estimated. Without it, memory stays below some 200 times ``len(data)``, which
            only tiny containers reach.

    Returns:
        A new value of the exact type that was encoded; all mutable parts of it are writable.

    Raises:
        MalformedCheckpointError: the bytes break a rule of the encoding.
        LimitExceededError: the value would exceed the budget.
        StateError: a registered type is not registered in this program, or does not accept the stored fields.

    Thread-safety: safe.
    """
    view = memoryview(data).cast("B")
    decoder = _Decoder(budget_bytes)
    try:
        decoder.charge(len(view))
        _check_structure(view)
        value = msgpack.unpackb(
            view,
            list_hook=decoder.array,
            object_pairs_hook=decoder.mapping,
            ext_hook=decoder.tag,
            strict_map_key=False,
            raw=False,
        )
        decoder.check_types({type(value)})
    except DcpEngineError as error:
        if isinstance(error, LimitExceededError | StateError):
            error.tensor = key
        raise
    except _PARSE_ERRORS as error:
        raise MalformedCheckpointError(
            f"object {key} is not in the object encoding: {str(error) or type(error).__name__}",
            tensor=key,
            remedy="take another checkpoint",
        ) from error
    return value


# Whatever the parser or a constructor of the table says about bad input. RuntimeError is torch's.
_PARSE_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, msgpack.UnpackException)


class _Encoder:
    """State of one encoding: the pieces so far, and the containers that are open."""

    def __init__(self) -> None:
        if not hasattr(_threads, "packer"):
            _threads.packer = msgpack.Packer(strict_types=True, use_bin_type=True)
        self._packer: msgpack.Packer = _threads.packer
        self._open: set[int] = set()
        self.parts: list[bytes | memoryview] = []

    def value(self, value: object) -> None:
        cls = type(value)
        if cls is str:
            try:
                self.parts.append(self._packer.pack(value))
            except UnicodeEncodeError:
                self._extension(STR, value)
        elif cls is int:
            try:
                self.parts.append(self._packer.pack(value))
            except OverflowError:
                self._extension(INT, value)
        elif cls is float or cls is bool or value is None:
            self.parts.append(self._packer.pack(value))
        elif cls is bytes:
            self._blob(value)  # type: ignore[arg-type]
        elif cls is list:
            self._list(value)  # type: ignore[arg-type]
        elif cls is dict:
            self._dict(value)  # type: ignore[arg-type]
        else:
            self._extension(_row_of(value), value)

    def _enter(self, value: object) -> None:
        if id(value) in self._open:
            raise Refusal("it contains itself", "break the cycle")
        if len(self._open) >= MAX_DEPTH:
            raise Refusal(f"it is nested more than {MAX_DEPTH} deep", "flatten it")
        self._open.add(id(value))

    def _flat(self, value: object) -> bool:
        """Encode a container of scalars in one call, if none of them needs an extension."""
        with suppress(OverflowError, UnicodeEncodeError):
            self.parts.append(self._packer.pack(value))
            return True
        return False

    def _flat_tuples(self, items: dict[Any, Any]) -> bool:
        """As :meth:`_flat`, for a dict of tuples of scalars: a state has as many paths as tensors."""
        values, pack = items.values(), self._packer.pack
        nested = {tuple}.issuperset(map(type, values)) and _SCALARS.issuperset(map(type, chain.from_iterable(values)))
        if nested and len(self._open) < MAX_DEPTH:
            with suppress(OverflowError, UnicodeEncodeError):
                # One after the other: as many lists at once would set off collections of all that the process holds.
                parts = [part for key, value in items.items() for part in (pack(key), pack([_TUPLE, *value]))]
                self.parts += (self._packer.pack_map_header(len(items)), *parts)
                return True
        return False

    def _list(self, items: list[object]) -> None:
        self._enter(items)
        if not (_SCALARS.issuperset(map(type, items)) and self._flat(items)):
            self.parts.append(self._packer.pack_array_header(len(items)))
            self._items(items, indexed=True)
        self._open.discard(id(items))

    def _dict(self, items: dict[Any, object], *, attributes: bool = False) -> None:
        self._enter(items)
        flat = self._flat if _SCALARS.issuperset(map(type, items.values())) else self._flat_tuples
        if not (type(items) is dict and _SCALARS.issuperset(map(type, items)) and flat(items)):
            self.parts.append(self._packer.pack_map_header(len(items)))
            for key, item in items.items():
                try:
                    self.value(key)
                except Refusal as refusal:
                    refusal.steps.append(f"<key {_short(key)}>")
                    raise
                try:
                    self.value(item)
                except Refusal as refusal:
                    refusal.steps.append(f".{key}" if attributes else f"[{_short(key)}]")
                    raise
        self._open.discard(id(items))

    def _items(self, items: Any, *, indexed: bool) -> None:
        for index, item in enumerate(items):
            try:
                self.value(item)
            except Refusal as refusal:
                if indexed:
                    refusal.steps.append(f"[{index}]")
                raise

    def _extension(self, row: Extension, value: object) -> None:
        self._enter(value)
        parts = row.explode(value)
        self.parts.append(self._packer.pack_array_header(len(parts) + 1))
        self.parts.append(_TAGS[row.code])
        if row.unordered:
            self.parts.extend(sorted(self._apart(part) for part in parts))
        elif row.indexed:
            self._items(parts, indexed=True)
        else:
            for part in parts:
                if type(part) is Blob:
                    self._blob(part.data)
                elif type(part) is Fields:
                    self._dict(part, attributes=True)
                else:
                    self.value(part)
        self._open.discard(id(value))

    def _apart(self, value: object) -> bytes:
        """The encoding of a value by itself, to sort by."""
        outer, self.parts = self.parts, []
        try:
            self.value(value)
        except Refusal as refusal:
            refusal.steps.append("<element>")
            raise
        inner, self.parts = b"".join(self.parts), outer
        return inner

    def _blob(self, data: bytes | memoryview) -> None:
        num_bytes = len(data)
        if num_bytes <= _SMALL_BYTES:
            self.parts.append(self._packer.pack(bytes(data)))
        elif num_bytes > MAX_BLOB_BYTES:
            raise Refusal(f"it has {num_bytes} bytes, more than the {MAX_BLOB_BYTES} that one value may have", "split it")
        else:
            self.parts.append(struct.pack(">BH", 0xC5, num_bytes) if num_bytes < 65536 else struct.pack(">BI", 0xC6, num_bytes))
            self.parts.append(data)


def _short(key: object) -> str:
    """How a message shows a key: never long, and never an error of its own, as ``repr`` of a huge int or of a user's class can be."""
    is_short = type(key) in (str, bool, float, type(None)) or (type(key) is int and abs(key) < 2**64)
    return reprlib.repr(key) if is_short else type(key).__name__


def _row_of(value: object) -> Extension:
    cls = type(value)
    row = _BY_TYPE.get(cls)
    if row is not None:
        return row
    if find_by_type(cls) is not None:
        return ENUM if issubclass(cls, enum.Enum) else RECORD
    for base, row in BY_BASE.items():
        if isinstance(value, base):
            return row
    raise refusal_of(value)


class _Tag:
    """Stands for a tag until the array that it opens is complete. Never part of a value."""

    __slots__ = ("row",)

    def __init__(self, row: Extension) -> None:
        self.row = row


_INTERNAL = frozenset((_Tag, msgpack.Timestamp, msgpack.ExtType))
_TAG_OBJECTS = {code: _Tag(row) for code, row in _BY_CODE.items()}


def _check_structure(view: memoryview) -> None:
    """Walk the bytes without making anything of them.

    An array's header alone makes the parser allocate for all the elements that it promises, at every level of nesting. After this walk
    every promise is known to be kept, so that what the parser allocates is bounded by the length of the data.
    """
    walker = msgpack.Unpacker(max_buffer_size=max(len(view), 1), strict_map_key=False)
    walker.feed(view)
    walker.skip()
    if walker.tell() != len(view):
        raise ValueError(f"{len(view) - walker.tell()} bytes follow the value")


class _Decoder:
    """Hooks of the parser, which calls them from the innermost container outwards, so that nothing here recurses."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._left = budget_bytes
        self._budget = budget_bytes

    def charge(self, num_bytes: int) -> None:
        if self._left is None:
            return
        self._left -= num_bytes
        if self._left < 0:
            raise LimitExceededError("an object takes more memory than it may", expected=f"at most {self._budget} bytes")

    def check_types(self, types: set[type]) -> None:
        if not _INTERNAL.isdisjoint(types):
            raise ValueError("a tag or timestamp where a value belongs")

    def tag(self, code: int, payload: bytes) -> _Tag:
        if payload or code not in _TAG_OBJECTS:
            raise ValueError(f"an extension with code {code} and {len(payload)} bytes")
        return _TAG_OBJECTS[code]

    def array(self, items: list[Any]) -> object:
        self.charge(64 + 40 * len(items))
        types = set(map(type, items))
        if _INTERNAL.isdisjoint(types):
            return items
        first = items.pop(0)
        if type(first) is not _Tag:
            self.check_types(types)
        self.check_types(set(map(type, items)))
        return first.row.build(items)

    def mapping(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self.charge(128 + 200 * len(pairs))
        self.check_types(set(map(type, chain.from_iterable(pairs))))
        items = dict(pairs)
        if len(items) != len(pairs):
            raise ValueError("a key twice in a map")
        return items
