"""The extension types of the object encoding: how each Python type is taken apart into plain parts and put together again.

The wire form and the table of codes are specified in :mod:`dcp_engine.objects`. Functions here are pure; a value that cannot be kept
exactly raises :class:`Refusal` when taken apart, and parts that no writer produces raise ``ValueError`` or ``TypeError`` when put together.
"""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import pathlib
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

__all__ = [
    "FACTORIES",
    "INT",
    "MAX_BLOB_BYTES",
    "STANDARD",
    "STR",
    "Blob",
    "Extension",
    "Fields",
    "Refusal",
    "check_parts",
    "factory_name",
    "refusal_of",
    "require",
]

MAX_BLOB_BYTES = 2**32 - 1
"""The longest bin of msgpack."""
MAX_INT_BYTES = 1 << 20
MAX_FRACTION_PART_BITS = 1 << 19
"""Reducing a fraction takes quadratic time, so that its parts are bounded more tightly than an integer."""


class Refusal(Exception):
    """A value that the encoding cannot hold. Internal: the encoder turns it into an ``UnencodableObjectError`` with the place.

    Attributes:
        reason: why, to follow "cannot be stored: ".
        remedy: what the user can do, or ``None`` for the general advice.
        steps: the way from the top of the object to the value, innermost first; filled in while the error travels up.
    """

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy or _GENERAL_REMEDY
        self.steps: list[str] = []


_GENERAL_REMEDY = "store plain values in its place, or register its class with dcp_engine.objects.register_type"
_CODE_REMEDY = "store its name instead, and look the name up after loading"
_REMEDIES = {
    "function": _CODE_REMEDY,
    "builtin_function_or_method": _CODE_REMEDY,
    "method": _CODE_REMEDY,
    "type": _CODE_REMEDY,
    "module": _CODE_REMEDY,
    "memoryview": "store bytes(value)",
    "generator": "store the list of what it yields",
    "Generator": "store its state: value.bit_generator.state of numpy, value.get_state() of torch",
    "RandomState": "store value.get_state()",
    "Random": "store value.getstate()",
    "DTensor": "make it a value of its own in the state, not a part of another object",
}


def refusal_of(value: object) -> Refusal:
    """Refusal of a value whose type has no row in the table, with what to do instead."""
    cls = type(value)
    names = [c.__name__ for c in cls.__mro__ if c.__module__ == "builtins" and c is not object and c is not cls]
    what = f"a {cls.__module__}.{cls.__qualname__}".replace("a builtins.", "a ")
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        what += f" ({getattr(value, '__module__', None)}.{value.__qualname__})"
    if names:
        what += f", a subclass of {names[0]} that would come back as something else"
    return Refusal(f"it is {what}", _REMEDIES.get(cls.__name__))


@dataclass(frozen=True, slots=True)
class Blob:
    """A part to be written as a bin without copying it first. ``data`` is contiguous, one byte an item."""

    data: memoryview


class Fields(dict[str, Any]):
    """A part to be written as a map, whose keys are attributes of the value."""


@dataclass(frozen=True, slots=True)
class Extension:
    """One row of the table.

    Attributes:
        code: msgpack extension code of the tag, append-only.
        explode: value -> parts, each of them encodable, a :class:`Blob`, or :class:`Fields`.
        build: parts -> value; checks everything it is given.
        indexed: whether the parts are the elements of the value, so that an error can name the index.
        unordered: whether the encoder sorts the parts by their encoding, so that equal values give equal bytes.
    """

    code: int
    explode: Callable[[Any], Sequence[object]]
    build: Callable[[list[Any]], object]
    indexed: bool = False
    unordered: bool = False


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def check_parts(parts: list[Any], *kinds: type | tuple[type, ...]) -> list[Any]:
    """Check the number and the exact types of the parts (so that ``True`` is no integer)."""
    require(len(parts) == len(kinds), f"{len(kinds)} parts wanted, {len(parts)} found")
    for part, kind in zip(parts, kinds, strict=True):
        allowed = kind if isinstance(kind, tuple) else (kind,)
        require(type(part) in allowed, f"a part of type {type(part).__name__} where {'/'.join(k.__name__ for k in allowed)} belongs")
    return parts


_NONE = type(None)


# --- text and numbers


def _explode_int(value: int) -> Sequence[object]:
    num_bytes = value.bit_length() // 8 + 1
    if num_bytes > MAX_INT_BYTES:
        raise Refusal(f"an int of {num_bytes} bytes exceeds the limit of {MAX_INT_BYTES}")
    return (value.to_bytes(num_bytes, "little", signed=True),)


def _build_int(parts: list[Any]) -> int:
    (blob,) = check_parts(parts, bytes)
    require(len(blob) <= MAX_INT_BYTES, f"an int of more than {MAX_INT_BYTES} bytes")
    value = int.from_bytes(blob, "little", signed=True)
    require(not -(2**63) <= value < 2**64 and value.bit_length() // 8 + 1 == len(blob), "an int that is not in its shortest form")
    return value


def _explode_str(value: str) -> Sequence[object]:
    return (value.encode("utf-8", "surrogatepass"),)


def _build_str(parts: list[Any]) -> str:
    (blob,) = check_parts(parts, bytes)
    value = cast(str, blob.decode("utf-8", "surrogatepass"))
    require(any("\ud800" <= c <= "\udfff" for c in value), "a string without surrogates in the form for surrogates")
    return value


def _build_complex(parts: list[Any]) -> complex:
    real, imag = check_parts(parts, float, float)
    return complex(real, imag)


def _explode_decimal(value: decimal.Decimal) -> Sequence[object]:
    text = str(value)
    if len(text) > MAX_INT_BYTES:
        raise Refusal(f"a Decimal of {len(text)} characters exceeds the limit of {MAX_INT_BYTES}")
    return (text,)


def _build_decimal(parts: list[Any]) -> decimal.Decimal:
    (text,) = check_parts(parts, str)
    require(len(text) <= MAX_INT_BYTES, "a Decimal beyond the limit")
    value = decimal.Decimal(text)
    require(str(value) == text, "a Decimal that is not in its shortest form")
    return value


def _explode_fraction(value: fractions.Fraction) -> Sequence[object]:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_PART_BITS:
        raise Refusal(f"a Fraction with parts of more than {MAX_FRACTION_PART_BITS} bits")
    return (value.numerator, value.denominator)


def _build_fraction(parts: list[Any]) -> fractions.Fraction:
    num, den = check_parts(parts, int, int)
    require(max(num.bit_length(), den.bit_length()) <= MAX_FRACTION_PART_BITS, "a Fraction beyond the limit")
    value = fractions.Fraction(num, den)
    require(value.numerator == num and value.denominator == den, "a Fraction that is not in lowest terms")
    return value


# --- containers

FACTORIES: dict[str, Callable[[], Any]] = {
    cls.__name__: cls
    for cls in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, OrderedDict, Counter, deque)
}
"""The only default factories that are kept: name in the file -> factory."""
_FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


def factory_name(factory: object) -> str | None:
    """Name of a ``default_factory`` in the file, ``None`` for no factory; ``KeyError`` for one outside the fixed table."""
    try:
        return None if factory is None else _FACTORY_NAMES[cast(Callable[[], Any], factory)]
    except TypeError:  # unhashable
        raise KeyError(factory) from None


def _explode_defaultdict(value: defaultdict[Any, Any]) -> Sequence[object]:
    try:
        return (factory_name(value.default_factory), dict(value))
    except KeyError:
        raise Refusal(
            f"its default_factory {value.default_factory!r} is not one of {', '.join(FACTORIES)}",
            "use one of these factories, or store dict(value)",
        ) from None


def _build_defaultdict(parts: list[Any]) -> defaultdict[Any, Any]:
    name, items = check_parts(parts, (str, _NONE), dict)
    require(name is None or name in FACTORIES, "an unknown default_factory")
    return defaultdict(None if name is None else FACTORIES[name], items)


def _build_ordered(parts: list[Any]) -> OrderedDict[Any, Any]:
    (items,) = check_parts(parts, dict)
    return OrderedDict(items)


def _build_counter(parts: list[Any]) -> Counter[Any]:
    (items,) = check_parts(parts, dict)
    return Counter(items)


def _explode_deque(value: deque[Any]) -> Sequence[object]:
    return (value.maxlen, list(value))


def _build_deque(parts: list[Any]) -> deque[Any]:
    maxlen, items = check_parts(parts, (int, _NONE), list)
    require(maxlen is None or len(items) <= maxlen, "a deque longer than its maxlen")
    return deque(items, maxlen)


def _build_set(parts: list[Any]) -> set[Any]:
    value = set(parts)
    require(len(value) == len(parts), "an element twice in a set")
    return value


def _build_range(parts: list[Any]) -> range:
    return range(*check_parts(parts, int, int, int))


def _build_slice(parts: list[Any]) -> slice:
    require(len(parts) == 3, "a slice has three parts")
    return slice(*parts)


def _build_ellipsis(parts: list[Any]) -> object:
    check_parts(parts)
    return ...


# --- standard library values

_PATHS: dict[str, type[pathlib.PurePath]] = {
    cls.__name__: cls for cls in (pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath)
}


def _build_path(parts: list[Any]) -> pathlib.PurePath:
    name, text = check_parts(parts, str, str)
    cls = _PATHS[name]
    if issubclass(cls, pathlib.Path) and not isinstance(pathlib.Path(), cls):
        # A concrete path of another system cannot be made here: the pure one keeps its value.
        cls = pathlib.PureWindowsPath if cls is pathlib.WindowsPath else pathlib.PurePosixPath
    return cls(text)


def _explode_timezone(value: dt.timezone) -> Sequence[object]:
    args = cast(Any, value).__getinitargs__()
    return (args[0], args[1] if len(args) > 1 else None)


def _build_timezone(parts: list[Any]) -> dt.timezone:
    offset, name = check_parts(parts, dt.timedelta, (str, _NONE))
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _fixed_zone(zone: dt.tzinfo | None) -> dt.tzinfo | None:
    if zone is not None and type(zone) is not dt.timezone:
        raise Refusal(f"its time zone is a {type(zone).__module__}.{type(zone).__qualname__}", "convert it to datetime.timezone.utc")
    return zone


def _explode_time(value: dt.time) -> Sequence[object]:
    return (value.hour, value.minute, value.second, value.microsecond, value.fold, _fixed_zone(value.tzinfo))


def _build_time(parts: list[Any]) -> dt.time:
    hour, minute, second, micro, fold, zone = check_parts(parts, int, int, int, int, int, (dt.timezone, _NONE))
    return dt.time(hour, minute, second, micro, zone, fold=fold)


def _explode_datetime(value: dt.datetime) -> Sequence[object]:
    return (value.year, value.month, value.day, *_explode_time(value.timetz()))


def _build_datetime(parts: list[Any]) -> dt.datetime:
    year, month, day, *clock = check_parts(parts, int, int, int, int, int, int, int, int, (dt.timezone, _NONE))
    return dt.datetime.combine(dt.date(year, month, day), _build_time(clock))


def _build_date(parts: list[Any]) -> dt.date:
    return dt.date(*check_parts(parts, int, int, int))


def _build_timedelta(parts: list[Any]) -> dt.timedelta:
    days, seconds, micros = check_parts(parts, int, int, int)
    value = dt.timedelta(days, seconds, micros)
    require((value.days, value.seconds, value.microseconds) == (days, seconds, micros), "a timedelta that is not normalised")
    return value


def _build_uuid(parts: list[Any]) -> uuid.UUID:
    (blob,) = check_parts(parts, bytes)
    return uuid.UUID(bytes=blob)


# --- the table


def _explode_bytearray(value: bytearray) -> Sequence[object]:
    return (Blob(memoryview(value)),)


def _build_bytearray(parts: list[Any]) -> bytearray:
    (blob,) = check_parts(parts, bytes)
    return bytearray(blob)


STANDARD: dict[type, Extension] = {
    complex: Extension(3, lambda v: (v.real, v.imag), _build_complex),
    bytearray: Extension(4, _explode_bytearray, _build_bytearray),
    type(...): Extension(5, lambda _: (), _build_ellipsis),
    decimal.Decimal: Extension(6, _explode_decimal, _build_decimal),
    fractions.Fraction: Extension(7, _explode_fraction, _build_fraction),
    tuple: Extension(10, lambda v: v, tuple, indexed=True),
    set: Extension(11, lambda v: tuple(v), _build_set, unordered=True),
    frozenset: Extension(12, lambda v: tuple(v), lambda parts: frozenset(_build_set(parts)), unordered=True),
    OrderedDict: Extension(13, lambda v: (dict(v),), _build_ordered),
    defaultdict: Extension(14, _explode_defaultdict, _build_defaultdict),
    Counter: Extension(15, lambda v: (dict(v),), _build_counter),
    deque: Extension(16, _explode_deque, _build_deque),
    range: Extension(17, lambda v: (v.start, v.stop, v.step), _build_range),
    slice: Extension(18, lambda v: (v.start, v.stop, v.step), _build_slice),
    dt.datetime: Extension(20, _explode_datetime, _build_datetime),
    dt.date: Extension(21, lambda v: (v.year, v.month, v.day), _build_date),
    dt.time: Extension(22, _explode_time, _build_time),
    dt.timedelta: Extension(23, lambda v: (v.days, v.seconds, v.microseconds), _build_timedelta),
    dt.timezone: Extension(24, _explode_timezone, _build_timezone),
    uuid.UUID: Extension(25, lambda v: (v.bytes,), _build_uuid),
    **{cls: Extension(26, lambda v: (type(v).__name__, str(v)), _build_path) for cls in _PATHS.values()},
}
"""Exact type -> row, for the types of Python itself. Integers beyond 64 bits and strings with surrogates are rows of the encoder's own."""

INT = Extension(1, _explode_int, _build_int)
STR = Extension(2, _explode_str, _build_str)
